"""What the verdicts of an evaluation depend on, and its short name: the directory in which its records lie."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from generalist._version import __version__
from generalist.attacks.base import Attack
from generalist.core.errors import GeneralistError
from generalist.data.sets import Images
from generalist.evaluation.plan import Plan
from generalist.evaluation.verdicts import Ints

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def weights_checksum(model: nn.Module) -> str:
    """SHA-256 of the names, types and bytes of all parameters and buffers, the same on every device."""
    digest = hashlib.sha256(type(model).__name__.encode())
    # A state dict lacks the buffers that are not kept in checkpoints, such as a normalization's.
    for name, tensor in sorted({**dict(model.named_buffers()), **model.state_dict()}.items()):
        if not isinstance(tensor, torch.Tensor):  # a module's extra state
            digest.update(f"{name} {tensor!r}".encode())
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def _told(attack: Attack) -> str:
    """All that an attack is, in words; one without words of its own would pass for any other of its class."""
    if type(attack).__repr__ is object.__repr__:
        raise GeneralistError(
            f"attack {attack.name!r}: records must be able to recognise it: make {type(attack).__name__} a dataclass, "
            "or give it a __repr__ with its settings"
        )
    return _ADDRESS.sub("", repr(attack))


def identify(model: nn.Module, images: Images, index: Ints, plan: Plan, **settings: str | int) -> dict[str, Any]:
    """All that a verdict depends on."""
    return {
        "weights": weights_checksum(model),
        "data": images.checksum(),
        "samples": hashlib.sha256(np.ascontiguousarray(index, np.int64).data).hexdigest(),
        "threats": list(dict.fromkeys(str(step.threat) for step in plan.steps)),
        "attacks": {step.label: _told(step.attack) for step in plan.steps},
        "columns": [column.name for column in plan.columns],
        "version": __version__,
        **settings,
    }


def fingerprint(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def key_of(subject: str, split: str, identity: Mapping[str, Any]) -> str:
    """The directory's name: for people first, and unique by its end."""
    return f"{slug(subject)}-{slug(split)}-{fingerprint(identity)[:12]}"


def slug(text: str) -> str:
    """Safe as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")[:60] or "unnamed"
