"""What exponential averages share: how much of the old is kept, and integers among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def warm_decay(count: Tensor, decay: float | Tensor, *, warmup: bool) -> Tensor:
    """The share of the old average kept at iteration `count`, counted from 0; a decay that changes is a tensor."""
    full = decay if isinstance(decay, Tensor) else torch.full_like(count, decay)
    return torch.minimum(full, (count + 1) / (count + 10)) if warmup else full


def trailing(path: Sequence[float], *, count: int, decay: float, warmup: bool) -> list[float]:
    """Where an average that began at 0 has come, iteration by iteration, behind these positions of what it is of.

    `count` iterations are behind it when they end.
    """
    place, found = 0.0, []
    for k, position in enumerate(path):
        done = max(count - len(path) + k, 0)
        kept = min(decay, (done + 1) / (done + 10)) if warmup else decay
        place = kept * place + (1 - kept) * position
        found.append(place)
    return found


def evenly(steps: int) -> list[float]:
    """The positions of what moves by 1 in so many equal steps."""
    return [(k + 1) / steps for k in range(steps)]


def truncated_mean(old: Tensor, new: Tensor, decay: Tensor) -> Tensor:
    """An integer average as copying floats into an integer tensor makes it."""
    return (decay * old + (1 - decay) * new).to(torch.int64)
