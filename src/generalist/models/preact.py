"""The pre-activation residual network of 18 layers (He et al., 2016) for 32x32 images."""

from __future__ import annotations

from torch import Tensor, nn

from generalist.models.layers import conv, global_average
from generalist.models.registry import MODELS


class PreactBlock(nn.Module):
    """BatchNorm and ReLU before each of two 3x3 convolutions. Wide residual networks consist of it as well.

    If the shape changes, the shortcut is a 1x1 convolution of the activated input; otherwise it is the input itself.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.activate = nn.Sequential(nn.BatchNorm2d(in_channels), nn.ReLU())
        self.branch = nn.Sequential(
            conv(in_channels, channels, stride=stride),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            conv(channels, channels),
        )
        same_shape = stride == 1 and in_channels == channels
        self.shortcut = None if same_shape else conv(in_channels, channels, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activate(x)
        residual: Tensor = self.branch(activated)
        return residual + (x if self.shortcut is None else self.shortcut(activated))


class PreactNet(nn.Module):
    """A 3x3 convolution, stages of pre-activation blocks, a last BatchNorm and ReLU, an average and a linear layer."""

    def __init__(
        self, *, num_classes: int, in_channels: int, stem_channels: int, stage_channels: list[int], blocks: int
    ) -> None:
        super().__init__()
        self.stem = conv(in_channels, stem_channels)
        stages, previous = [], stem_channels
        for stage, channels in enumerate(stage_channels):
            layers = [PreactBlock(previous, channels, stride=1 if stage == 0 else 2)]
            layers += [PreactBlock(channels, channels, stride=1) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(*layers))
            previous = channels
        self.stages = nn.Sequential(*stages)
        self.activate = nn.Sequential(nn.BatchNorm2d(previous), nn.ReLU())
        self.classifier = nn.Linear(previous, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(global_average(self.activate(self.stages(self.stem(x)))))
        return logits


@MODELS.register("preact-resnet18")
def preact_resnet18(*, num_classes: int, in_channels: int) -> nn.Module:
    """Has the last BatchNorm of the paper, which some ports leave out."""
    return PreactNet(
        num_classes=num_classes,
        in_channels=in_channels,
        stem_channels=64,
        stage_channels=[64, 128, 256, 512],
        blocks=2,
    )
