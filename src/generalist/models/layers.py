"""What the convolutional networks share."""

from __future__ import annotations

from torch import Tensor, nn


def conv(in_channels: int, out_channels: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    """A padded convolution without bias: BatchNorm has one."""
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)


def global_average(x: Tensor) -> Tensor:
    """[B, C, H, W] to [B, C]. A plain mean: the backward pass of adaptive pooling is not deterministic on CUDA."""
    return x.mean(dim=(2, 3))


def he_init(model: nn.Module) -> None:
    """He's initialisation by fan-out for every convolution."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
