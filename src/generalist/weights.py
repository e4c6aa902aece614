"""From a weights file to the network that its header describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from generalist.core.errors import RunError
from generalist.models import ModelOptions, build_model, check_size
from generalist.tensors.flat import Flat

MAX_SIDE = 4096
"""More channels or pixels a side than any network here is made for: a weights file that says so is damaged."""


def network_of(state: Mapping[str, Tensor], about: Mapping[str, Any], path: Path, *, trust_code: bool) -> nn.Module:
    """Build what the file's header describes and fill in its weights."""
    try:
        options = ModelOptions.model_validate(about["model"])
        classes, shape = about["classes"], [int(size) for size in about["shape"]]
        if not isinstance(classes, list) or len(shape) != 3 or not all(0 < size <= MAX_SIDE for size in shape):
            raise ValueError(f"images of shape {shape}")  # believing it would allocate a network of that size
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(f"{path} does not say which network it belongs to: {error!r:.200}") from error
    check_size(options, state, num_classes=len(classes), shape=shape)
    model = build_model(options, num_classes=len(classes), shape=shape, seed=0, trust_code=trust_code)
    flat = Flat(model)
    flat.load(*flat.read(state))
    return model
