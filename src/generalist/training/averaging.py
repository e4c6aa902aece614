"""Exponential averages of flat weights."""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.tensors.averages import evenly, trailing, truncated_mean, warm_decay
from generalist.tensors.flat import Flat
from generalist.training.learner_options import AveragingOptions


class Average:
    """One learner's own average of its weights and BatchNorm statistics."""

    def __init__(self, flat: Flat, options: AveragingOptions, *, counters: str = "copy") -> None:
        self.options = options
        self.truncate = counters == "truncate"
        self.vector = flat.vector.clone()
        self.counters = flat.counters.clone()
        self.count = torch.zeros((), dtype=torch.float64, device=flat.vector.device)

    def update(self, flat: Flat) -> None:
        decay = warm_decay(self.count, self.options.decay, warmup=self.options.warmup)
        self.vector.lerp_(flat.vector, (1 - decay).to(self.vector.dtype))
        new = truncated_mean(self.counters, flat.counters, decay) if self.truncate else flat.counters
        self.counters.copy_(new)
        self.count.add_(1)

    def trail(self, steps: int) -> list[float]:
        """How far this average has moved after each of the last `steps` iterations, if the weights moved evenly from 0
        to 1 in these."""
        count, decay, warmup = int(self.count), self.options.decay, self.options.warmup
        return trailing(evenly(steps), count=count, decay=decay, warmup=warmup)

    def restart(self, flat: Flat) -> None:
        self.vector.copy_(flat.vector)
        self.counters.copy_(flat.counters)
        self.count.zero_()

    def state(self) -> dict[str, Tensor]:
        return {"weights": self.vector, "counters": self.counters, "count": self.count}
