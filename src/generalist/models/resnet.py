"""Residual networks (He et al., 2015), with the stem for 32x32 images or the one for ImageNet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from generalist.models.layers import conv, global_average, he_init
from generalist.models.registry import MODELS


class Residual(nn.Module):
    """A branch and a shortcut around it, added and rectified."""

    def __init__(self, branch: nn.Module, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = _shortcut(in_channels, channels, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


def basic_block(in_channels: int, channels: int, stride: int) -> Residual:
    """Two 3x3 convolutions."""
    branch = nn.Sequential(
        conv(in_channels, channels, stride=stride),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        conv(channels, channels),
        nn.BatchNorm2d(channels),
    )
    return Residual(branch, in_channels, channels, stride)


def bottleneck(in_channels: int, channels: int, stride: int, *, widen: int = 1) -> Residual:
    """1x1, 3x3 and 1x1 convolutions with the stride on the 3x3; inside, a quarter of the channels times `widen`."""
    inner = channels // 4 * widen
    branch = nn.Sequential(
        conv(in_channels, inner, kernel=1),
        nn.BatchNorm2d(inner),
        nn.ReLU(),
        conv(inner, inner, stride=stride),
        nn.BatchNorm2d(inner),
        nn.ReLU(),
        conv(inner, channels, kernel=1),
        nn.BatchNorm2d(channels),
    )
    return Residual(branch, in_channels, channels, stride)


def _shortcut(in_channels: int, channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == channels:
        return nn.Identity()
    return nn.Sequential(conv(in_channels, channels, kernel=1, stride=stride), nn.BatchNorm2d(channels))


def cifar_stem(in_channels: int) -> nn.Sequential:
    """One 3x3 convolution at full resolution."""
    return nn.Sequential(conv(in_channels, 64), nn.BatchNorm2d(64), nn.ReLU())


def imagenet_stem(in_channels: int) -> nn.Sequential:
    """A 7x7 convolution and max-pooling, each of stride 2."""
    return nn.Sequential(
        conv(in_channels, 64, kernel=7, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    )


class ResNet(nn.Module):
    """A stem, four stages, each with half the resolution of the one before, an average and a linear layer."""

    def __init__(self, stem: nn.Module, stages: Sequence[nn.Module], features: int, num_classes: int) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(global_average(self.stages(self.stem(x))))
        return logits


Block = Callable[[int, int, int], Residual]
"""Maps (channels in, channels out, stride) to a block."""


def resnet(stem: nn.Module, block: Block, blocks: Sequence[int], *, channels: int, num_classes: int) -> ResNet:
    """Stages of `blocks` blocks; the first has `channels` channels, each further one twice as many as the last."""
    stages, previous = [], 64
    for stage, count in enumerate(blocks):
        width = channels << stage
        layers = [block(previous, width, 1 if stage == 0 else 2)]
        layers += [block(width, width, 1) for _ in range(count - 1)]
        stages.append(nn.Sequential(*layers))
        previous = width
    return ResNet(stem, stages, previous, num_classes)


@MODELS.register("resnet18")
def resnet18(*, num_classes: int, in_channels: int) -> nn.Module:
    return resnet(cifar_stem(in_channels), basic_block, [2, 2, 2, 2], channels=64, num_classes=num_classes)


@MODELS.register("resnet34")
def resnet34(*, num_classes: int, in_channels: int) -> nn.Module:
    return resnet(cifar_stem(in_channels), basic_block, [3, 4, 6, 3], channels=64, num_classes=num_classes)


@MODELS.register("resnet50")
def resnet50(*, num_classes: int, in_channels: int) -> nn.Module:
    return resnet(cifar_stem(in_channels), bottleneck, [3, 4, 6, 3], channels=256, num_classes=num_classes)


@MODELS.register("resnet50-imagenet")
def resnet50_imagenet(*, num_classes: int, in_channels: int) -> nn.Module:
    return _for_imagenet(bottleneck, num_classes=num_classes, in_channels=in_channels)


@MODELS.register("wrn-50-2")
def wrn_50_2(*, num_classes: int, in_channels: int) -> nn.Module:
    """A ResNet-50 for ImageNet with twice as many channels inside its bottlenecks."""
    return _for_imagenet(partial(bottleneck, widen=2), num_classes=num_classes, in_channels=in_channels)


def _for_imagenet(block: Block, *, num_classes: int, in_channels: int) -> nn.Module:
    model = resnet(imagenet_stem(in_channels), block, [3, 4, 6, 3], channels=256, num_classes=num_classes)
    he_init(model)
    return model
