"""What all exponential averages share: the decay with its warm-up, how they lag behind, and integer averages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def warm_decay(count: Tensor, decay: float | Tensor, *, warmup: bool) -> Tensor:
    """The share of the old average kept at iteration `count`, counted from 0. A `decay` that changes is a tensor."""
    full = decay if isinstance(decay, Tensor) else torch.full_like(count, decay)
    return torch.minimum(full, (count + 1) / (count + 10)) if warmup else full


def trailing(path: Sequence[float], *, count: int, decay: float, warmup: bool) -> list[float]:
    """The average, which begins at 0, after each iteration in which the averaged value takes these positions.

    `count` is the number of iterations that the average has had by the end of the path.
    """
    place, found = 0.0, []
    for k, position in enumerate(path):
        done = max(count - len(path) + k, 0)
        kept = min(decay, (done + 1) / (done + 10)) if warmup else decay
        place = kept * place + (1 - kept) * position
        found.append(place)
    return found


def evenly(steps: int) -> list[float]:
    """The positions of a value that moves from 0 to 1 in so many equal steps."""
    return [(k + 1) / steps for k in range(steps)]


def truncated_mean(old: Tensor, new: Tensor, decay: Tensor) -> Tensor:
    """An average of integers, truncated as by copying floats into an integer tensor."""
    return (decay * old + (1 - decay) * new).to(torch.int64)
