"""Named tensors that a checkpoint keeps, and how they come back."""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.core.errors import RunError


@torch.no_grad()
def restore(live: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Copy saved tensors into live ones of the same names and shapes; nothing is copied where one does not fit."""
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
    """Those whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
