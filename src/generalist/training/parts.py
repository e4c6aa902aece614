"""A learner's part of the global learner, for the dial to mix."""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.tensors.flat import Flat


class Part:
    """The average over time of what one learner has contributed to the global one.

    Every iteration has the weight that it has there: (1 - d) gamma_a at first, and less with each that follows.
    `share` is the sum of these weights, so that sum_a share_a part_a is the global learner at any time. Mixed by these
    shares, the parts give it back; mixed by others, a neighbour of it. Redistribution does not change them.
    """

    def __init__(self, flat: Flat, *, share: float) -> None:
        self.vector = flat.vector.clone()
        self.counters = flat.counters.clone()
        self.share = torch.full((), share, dtype=torch.float64, device=flat.vector.device)

    def update(self, vector: Tensor, counters: Tensor, *, kept: Tensor, gamma: Tensor) -> None:
        """After an iteration that kept this share of the global learner. The part of a learner whose gamma has been 0
        all along stays at its start."""
        given = (1 - kept) * gamma
        share = kept * self.share + given
        step = torch.where(share > 0, given / share.clamp_min(1e-300), torch.zeros_like(share))
        # In the form of a step, which leaves a value that never changes exactly as it is.
        self.vector.lerp_(vector, step.to(vector.dtype))
        self.counters.copy_(counters)
        self.share.copy_(share)

    def follow(self, shift: Tensor) -> None:
        """Follow a shift of the global learner that is due to this learner."""
        if float(self.share) > 0:
            self.vector.add_(shift / self.share.to(shift.dtype))

    def fill(self, vector: Tensor, counters: Tensor, share: float) -> None:
        self.vector.copy_(vector)
        self.counters.copy_(counters)
        self.share.fill_(share)

    def state(self) -> dict[str, Tensor]:
        return {"weights": self.vector, "counters": self.counters, "share": self.share}
