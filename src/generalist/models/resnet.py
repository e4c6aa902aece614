"""Residual networks (He et al., 2015), with the stem for 32x32 images or the one for ImageNet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from generalist.models.layers import conv, global_average, he_init
from generalist.models.registry import MODELS


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            conv(in_channels, channels, stride=stride),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            conv(channels, channels),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = _shortcut(in_channels, channels, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the stride is on the 3x3, and `inner` channels are between them."""

    def __init__(self, in_channels: int, channels: int, stride: int, inner: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            conv(in_channels, inner, kernel=1),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            conv(inner, inner, stride=stride),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            conv(inner, channels, kernel=1),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = _shortcut(in_channels, channels, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


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
    """A stem, four stages that halve the resolution from one to the next, an average, a linear layer."""

    def __init__(self, stem: nn.Module, stages: Sequence[nn.Module], features: int, num_classes: int) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(global_average(self.stages(self.stem(x))))
        return logits


def basic_resnet(stem: nn.Module, blocks: Sequence[int], num_classes: int) -> ResNet:
    """Stages of `blocks` basic blocks with 64, 128, 256 and 512 channels."""
    stages, previous = [], 64
    for stage, count in enumerate(blocks):
        channels = 64 << stage
        layers = [BasicBlock(previous, channels, stride=1 if stage == 0 else 2)]
        layers += [BasicBlock(channels, channels, stride=1) for _ in range(count - 1)]
        stages.append(nn.Sequential(*layers))
        previous = channels
    return ResNet(stem, stages, previous, num_classes)


def bottleneck_resnet(stem: nn.Module, blocks: Sequence[int], num_classes: int, widen: int = 1) -> ResNet:
    """Stages of `blocks` bottlenecks with 256 to 2048 channels, a quarter of them inside times `widen`."""
    stages, previous = [], 64
    for stage, count in enumerate(blocks):
        channels, inner = 256 << stage, (64 << stage) * widen
        layers = [Bottleneck(previous, channels, stride=1 if stage == 0 else 2, inner=inner)]
        layers += [Bottleneck(channels, channels, stride=1, inner=inner) for _ in range(count - 1)]
        stages.append(nn.Sequential(*layers))
        previous = channels
    return ResNet(stem, stages, previous, num_classes)


@MODELS.register("resnet18")
def resnet18(*, num_classes: int, in_channels: int) -> nn.Module:
    return basic_resnet(cifar_stem(in_channels), [2, 2, 2, 2], num_classes)


@MODELS.register("resnet34")
def resnet34(*, num_classes: int, in_channels: int) -> nn.Module:
    return basic_resnet(cifar_stem(in_channels), [3, 4, 6, 3], num_classes)


@MODELS.register("resnet50")
def resnet50(*, num_classes: int, in_channels: int) -> nn.Module:
    return bottleneck_resnet(cifar_stem(in_channels), [3, 4, 6, 3], num_classes)


@MODELS.register("resnet50-imagenet")
def resnet50_imagenet(*, num_classes: int, in_channels: int) -> nn.Module:
    model = bottleneck_resnet(imagenet_stem(in_channels), [3, 4, 6, 3], num_classes)
    he_init(model)
    return model


@MODELS.register("wrn-50-2")
def wrn_50_2(*, num_classes: int, in_channels: int) -> nn.Module:
    """A ResNet-50 for ImageNet with twice the channels inside its bottlenecks."""
    model = bottleneck_resnet(imagenet_stem(in_channels), [3, 4, 6, 3], num_classes, widen=2)
    he_init(model)
    return model
