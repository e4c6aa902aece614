"""What exponential averages share: how much of the old is kept, and integers among them."""

from __future__ import annotations

import torch
from torch import Tensor


def warm_decay(count: Tensor, decay: float | Tensor, *, warmup: bool) -> Tensor:
    """The share of the old average kept at iteration `count`, counted from 0; a decay that changes is a tensor."""
    full = decay if isinstance(decay, Tensor) else torch.full_like(count, decay)
    return torch.minimum(full, (count + 1) / (count + 10)) if warmup else full


def truncated_mean(old: Tensor, new: Tensor, decay: Tensor) -> Tensor:
    """An integer average as copying floats into an integer tensor makes it."""
    return (decay * old + (1 - decay) * new).to(torch.int64)
