"""State dicts with the key names of RobustBench's architectures, for networks that RobustBench has as well.

RobustBench names its layers as the common CIFAR ports do (`layer1.0.conv1`, `linear`; wide ones `block1.layer.0.conv1`,
`fc`), and uses torchvision's networks for ImageNet. Its normalization is a wrapper around `model` with two buffers,
`normalize.mean` and `normalize.std`; a network of ours that normalizes gets the keys of that wrapper.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from generalist.core.errors import GeneralistError
from generalist.core.files import atomic_write
from generalist.export.source import Source
from generalist.models import Normalized

Rules = Mapping[str, str]
"""Beginnings of our key names, as patterns, and their replacements; S is the stage's number from 1."""

_CIFAR_RESNET: Rules = {
    r"stem\.0": "conv1",
    r"stem\.1": "bn1",
    r"stages\.(\d)\.(\d+)\.branch\.0": r"layer{S}.\2.conv1",
    r"stages\.(\d)\.(\d+)\.branch\.1": r"layer{S}.\2.bn1",
    r"stages\.(\d)\.(\d+)\.branch\.3": r"layer{S}.\2.conv2",
    r"stages\.(\d)\.(\d+)\.branch\.4": r"layer{S}.\2.bn2",
    r"stages\.(\d)\.(\d+)\.branch\.6": r"layer{S}.\2.conv3",
    r"stages\.(\d)\.(\d+)\.branch\.7": r"layer{S}.\2.bn3",
    r"stages\.(\d)\.(\d+)\.shortcut": r"layer{S}.\2.shortcut",
    r"classifier": "linear",
}
_TORCHVISION: Rules = {
    **_CIFAR_RESNET,
    r"stages\.(\d)\.(\d+)\.shortcut": r"layer{S}.\2.downsample",
    r"classifier": "fc",
}
_PREACT: Rules = {
    r"stem": "conv1",
    r"stages\.(\d)\.(\d+)\.activate\.0": r"layer{S}.\2.bn1",
    r"stages\.(\d)\.(\d+)\.branch\.0": r"layer{S}.\2.conv1",
    r"stages\.(\d)\.(\d+)\.branch\.1": r"layer{S}.\2.bn2",
    r"stages\.(\d)\.(\d+)\.branch\.3": r"layer{S}.\2.conv2",
    r"stages\.(\d)\.(\d+)\.shortcut": r"layer{S}.\2.shortcut.0",
    r"activate\.0": "bn",
    r"classifier": "linear",
}
_WIDE: Rules = {
    r"stem": "conv1",
    r"stages\.(\d)\.(\d+)\.activate\.0": r"block{S}.layer.\2.bn1",
    r"stages\.(\d)\.(\d+)\.branch\.0": r"block{S}.layer.\2.conv1",
    r"stages\.(\d)\.(\d+)\.branch\.1": r"block{S}.layer.\2.bn2",
    r"stages\.(\d)\.(\d+)\.branch\.3": r"block{S}.layer.\2.conv2",
    r"stages\.(\d)\.(\d+)\.shortcut": r"block{S}.layer.\2.convShortcut",
    r"activate\.0": "bn1",
    r"classifier": "fc",
}


@dataclass(frozen=True)
class Layout:
    """A network of RobustBench that computes the same function as one of ours."""

    rules: Rules
    call: str
    """How RobustBench constructs it; {classes} stands for the number of classes."""
    side: int | None = 32
    """Height and width that it takes: the networks for CIFAR end in an average over a window of fixed size."""


_ROOM = "robustbench.model_zoo.architectures"
_RESNET = f"{_ROOM}.resnet"
_WRN = f"{_ROOM}.wide_resnet.WideResNet"
LAYOUTS = {
    "resnet18": Layout(_CIFAR_RESNET, _RESNET + ".ResNet(BasicBlock, [2, 2, 2, 2], num_classes={classes})"),
    "resnet34": Layout(_CIFAR_RESNET, _RESNET + ".ResNet(BasicBlock, [3, 4, 6, 3], num_classes={classes})"),
    "resnet50": Layout(_CIFAR_RESNET, _RESNET + ".ResNet(Bottleneck, [3, 4, 6, 3], num_classes={classes})"),
    # The plain PreActBlock there takes the shortcut before the activation, and the plain network has no last BatchNorm.
    "preact-resnet18": Layout(
        _PREACT, _RESNET + ".PreActResNet(PreActBlockV2, [2, 2, 2, 2], num_classes={classes}, bn_before_fc=True)"
    ),
    "wrn-28-10": Layout(_WIDE, _WRN + "(depth=28, widen_factor=10, num_classes={classes})"),
    "wrn-32-10": Layout(_WIDE, _WRN + "(depth=34, widen_factor=10, num_classes={classes})"),
    "wrn-34-10": Layout(_WIDE, _WRN + "(depth=34, widen_factor=10, num_classes={classes})"),
    "resnet50-imagenet": Layout(_TORCHVISION, "torchvision.models.resnet50(num_classes={classes})", side=None),
    "wrn-50-2": Layout(_TORCHVISION, "torchvision.models.wide_resnet50_2(num_classes={classes})", side=None),
}


def renamed(state: Mapping[str, Tensor], rules: Rules) -> dict[str, Tensor]:
    """The same tensors under other names, in the same order."""
    return {_rename(name, rules): tensor for name, tensor in state.items()}


def _rename(name: str, rules: Rules) -> str:
    for pattern, replacement in rules.items():
        if found := re.match(pattern + r"\.", name):
            stage = str(int(found[1]) + 1) if found.groups() else ""
            return found.expand(replacement.replace("{S}", stage)) + name[found.end() - 1 :]
    raise GeneralistError(f"RobustBench has no place for the tensor {name!r}: export to safetensors instead")


def write_robustbench(source: Source, path: Path) -> list[str]:
    """A file that `torch.load(..., weights_only=True)` reads and that the named network loads strictly."""
    layout = _layout_of(source)
    model = source.model
    state = source.state()
    call = layout.call.format(classes=len(source.classes))
    if isinstance(model, Normalized):
        inner = {name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")}
        state = {"normalize.mean": state["mean"], "normalize.std": state["std"]}
        state |= {f"model.{name}": tensor for name, tensor in renamed(inner, layout.rules).items()}
        mean, std = (buffer.flatten().tolist() for buffer in (model.mean, model.std))
        call = f"{_ROOM}.utils_architectures.normalize_model({call}, {mean}, {std})"
    else:
        state = renamed(state, layout.rules)
    atomic_write(path, lambda stream: torch.save(state, stream))
    return [
        f"load it into: {call}",
        "with: model.load_state_dict(torch.load(FILE, weights_only=True)); images in [0, 1]",
    ]


def _layout_of(source: Source) -> Layout:
    name, (channels, height, width) = str(source.about["model"]["name"]), source.shape
    layout = LAYOUTS.get(name)
    if layout is None:
        known = ", ".join(LAYOUTS)
        raise GeneralistError(f"RobustBench has no counterpart of the network {name!r}, but of {known}")
    if channels != 3:
        raise GeneralistError(f"RobustBench's networks take 3 channels, and this one takes {channels}")
    if layout.side is not None and (height, width) != (layout.side, layout.side):
        raise GeneralistError(
            f"RobustBench's counterpart of {name!r} takes images of {layout.side}x{layout.side}, this one was trained "
            f"on {height}x{width}"
        )
    return layout
