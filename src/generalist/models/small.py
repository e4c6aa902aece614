"""A small convolutional network for images of 8x8 to 32x32: trained on a CPU in seconds."""

from __future__ import annotations

from torch import Tensor, nn

from generalist.models.layers import conv, global_average
from generalist.models.registry import MODELS


class SmallNet(nn.Module):
    """Four 3x3 convolutions with BatchNorm, two of them of stride 2, then the average over what is left."""

    def __init__(self, *, num_classes: int, in_channels: int, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_layer(in_channels, width),
            *_layer(width, 2 * width, stride=2),
            *_layer(2 * width, 2 * width),
            *_layer(2 * width, 4 * width, stride=2),
        )
        self.classifier = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(global_average(self.features(x)))
        return logits


def _layer(in_channels: int, out_channels: int, stride: int = 1) -> list[nn.Module]:
    return [conv(in_channels, out_channels, stride=stride), nn.BatchNorm2d(out_channels), nn.ReLU()]


@MODELS.register("small")
def small(*, num_classes: int, in_channels: int, width: int = 32) -> nn.Module:
    return SmallNet(num_classes=num_classes, in_channels=in_channels, width=width)
