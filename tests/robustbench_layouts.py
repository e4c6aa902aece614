"""The public layouts that RobustBench loads, small and written here from their definitions, to test exports against.

Only the names of the layers and what they compute are theirs; widths and depths are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def conv1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class Basic(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3(inputs, width, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv3(width, width), nn.BatchNorm2d(width)
        self.side = shortcut if stride != 1 or inputs != width else ""
        if self.side:
            setattr(self, shortcut, nn.Sequential(conv1(inputs, width, stride), nn.BatchNorm2d(width)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (getattr(self, self.side)(x) if self.side else x))


class Bottleneck(nn.Module):
    expansion = 4
    widen = 1

    def __init__(self, inputs: int, width: int, stride: int, shortcut: str) -> None:
        super().__init__()
        inner, outputs = width * self.widen, 4 * width
        self.conv1, self.bn1 = conv1(inputs, inner), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = conv3(inner, inner, stride), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = conv1(inner, outputs), nn.BatchNorm2d(outputs)
        self.side = shortcut if stride != 1 or inputs != outputs else ""
        if self.side:
            setattr(self, shortcut, nn.Sequential(conv1(inputs, outputs, stride), nn.BatchNorm2d(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + (getattr(self, self.side)(x) if self.side else x))


class WideBottleneck(Bottleneck):
    widen = 2


class ResNet(nn.Module):
    """`linear` and `shortcut` for CIFAR; `fc` and `downsample`, a 7x7 stem and pooling as torchvision has them."""

    def __init__(self, block: type[Basic] | type[Bottleneck], counts: Sequence[int], classes: int, *, imagenet: bool):
        super().__init__()
        self.imagenet = imagenet
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False) if imagenet else conv3(3, 64)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for number, count in enumerate(counts):
            width, blocks = 64 << number, []
            for i in range(count):
                stride = 2 if i == 0 and number > 0 else 1
                blocks.append(block(inputs, width, stride, "downsample" if imagenet else "shortcut"))
                inputs = width * block.expansion
            setattr(self, f"layer{number + 1}", nn.Sequential(*blocks))
        setattr(self, "fc" if imagenet else "linear", nn.Linear(inputs, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, 2, 1) if self.imagenet else x
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        x = F.adaptive_avg_pool2d(x, 1) if self.imagenet else F.avg_pool2d(x, 4)
        logits: Tensor = (self.fc if self.imagenet else self.linear)(x.flatten(1))
        return logits


class PreActBlock(nn.Module):
    """The second version: the shortcut comes after the activation."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv3(inputs, width, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), conv3(width, width)
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(conv1(inputs, width, stride))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        side = self.shortcut(y) if hasattr(self, "shortcut") else x
        out: Tensor = self.conv2(F.relu(self.bn2(self.conv1(y)))) + side
        return out


class PreActResNet18(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = conv3(3, 64)
        inputs = 64
        for number in range(4):
            width = 64 << number
            first = PreActBlock(inputs, width, 2 if number else 1)
            setattr(self, f"layer{number + 1}", nn.Sequential(first, PreActBlock(width, width, 1)))
            inputs = width
        self.bn = nn.BatchNorm2d(512)
        self.linear = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        logits: Tensor = self.linear(F.avg_pool2d(F.relu(self.bn(x)), 4).flatten(1))
        return logits


class WideBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv3(inputs, width, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), conv3(width, width)
        self.convShortcut = conv1(inputs, width, stride) if inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        side = x if self.convShortcut is None else self.convShortcut(y)
        out: Tensor = self.conv2(F.relu(self.bn2(self.conv1(y)))) + side
        return out


class WideStage(nn.Module):
    def __init__(self, count: int, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        rest = [WideBlock(width, width, 1) for _ in range(count - 1)]
        self.layer = nn.Sequential(WideBlock(inputs, width, stride), *rest)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    def __init__(self, depth: int, widen: int, classes: int) -> None:
        super().__init__()
        count = (depth - 4) // 6
        self.conv1 = conv3(3, 16)
        self.block1 = WideStage(count, 16, 16 * widen, 1)
        self.block2 = WideStage(count, 16 * widen, 32 * widen, 2)
        self.block3 = WideStage(count, 32 * widen, 64 * widen, 2)
        self.bn1 = nn.BatchNorm2d(64 * widen)
        self.fc = nn.Linear(64 * widen, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        logits: Tensor = self.fc(F.avg_pool2d(F.relu(self.bn1(x)), 8).flatten(1))
        return logits


class Normalizer(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("mean", "std"):
            self.register_buffer(name, torch.ones(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (x - self.mean) / self.std  # type: ignore[operator]
        return out


def normalized(model: nn.Module) -> nn.Sequential:
    """RobustBench's wrapper: a Sequential with the names `normalize` and `model`."""
    whole = nn.Sequential()
    whole.add_module("normalize", Normalizer(3))
    whole.add_module("model", model)
    return whole
