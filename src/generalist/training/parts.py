"""A learner's part of the global learner: what the dial mixes best."""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.tensors.flat import Flat


class Part:
    """The average over time of what one learner has given to the global one.

    Every iteration counts as much as it does there: (1 - d) gamma_a at first, and less with each that follows. `share`
    is what they all add up to, so that sum_a share_a part_a is the global learner at any time: mixed by these shares
    the parts give it back, by others what lies beside it. A redistribution leaves them alone.
    """

    def __init__(self, flat: Flat, *, share: float) -> None:
        self.vector = flat.vector.clone()
        self.counters = flat.counters.clone()
        self.share = torch.full((), share, dtype=torch.float64, device=flat.vector.device)

    def update(self, vector: Tensor, counters: Tensor, *, kept: Tensor, gamma: Tensor) -> None:
        """After an iteration that kept so much of the global learner. One who has given nothing yet stays behind."""
        given = (1 - kept) * gamma
        share = kept * self.share + given
        step = torch.where(share > 0, given / share.clamp_min(1e-300), torch.zeros_like(share))
        # A step towards them, as it leaves a value that never changes exactly as it is.
        self.vector.lerp_(vector, step.to(vector.dtype))
        self.counters.copy_(counters)
        self.share.copy_(share)

    def follow(self, shift: Tensor) -> None:
        """Go along where the global learner is shifted by what this learner has moved."""
        if float(self.share) > 0:
            self.vector.add_(shift / self.share.to(shift.dtype))

    def fill(self, vector: Tensor, counters: Tensor, share: float) -> None:
        self.vector.copy_(vector)
        self.counters.copy_(counters)
        self.share.fill_(share)

    def state(self) -> dict[str, Tensor]:
        return {"weights": self.vector, "counters": self.counters, "share": self.share}
