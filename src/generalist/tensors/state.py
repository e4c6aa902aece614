"""Named tensors that a checkpoint stores, and how they are restored."""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.core.errors import RunError


@torch.no_grad()
def restore(live: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Copy saved tensors into live ones with the same names and shapes; if any does not fit, nothing is copied."""
    if live.keys() != saved.keys():
        name = sorted(live.keys() ^ saved.keys())[0]
        raise RunError(f"the checkpoint does not fit the recipe: {name!r} is in only one of them")
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape:
            raise RunError(
                f"the checkpoint does not fit the recipe: {name!r} has shape {tuple(saved[name].shape)}, "
                f"expected {tuple(tensor.shape)}"
            )
    for name, tensor in live.items():
        tensor.copy_(saved[name])


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
