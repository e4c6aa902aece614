"""Adversarial training."""

from __future__ import annotations

from torch import Tensor

from generalist.data.sets import Batch
from generalist.objectives.base import OBJECTIVES, Metrics, Objective, Progress
from generalist.objectives.nt import accuracy


@OBJECTIVES.register("at")
class AdversarialTraining(Objective):
    """Minimises CE(x'), x' from PGD in the learner's threat model (Madry et al., 2018).

    Costs steps + 1 forward and backward passes.
    """

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, Metrics]:
        logits = self.learner.forward(self.learner.adversarial(batch, progress))
        return self.learner.cross_entropy(logits, batch.y), accuracy(logits, batch.y)
