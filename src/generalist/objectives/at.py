"""Adversarial training."""

from __future__ import annotations

from torch import Tensor

from generalist.data.sets import Batch
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, Objective, Progress, accuracy


@OBJECTIVES.register("at")
class AdversarialTraining(Objective):
    """Minimises CE(x'), x' from PGD in the learner's threat model (Madry et al., 2018).

    The papers take 10 steps of eps / 4 from a uniform start in the ball; eps is 8/255 in linf and 128/255 in l2. Costs
    steps + 1 forward and backward passes.
    """

    attacks_each = True

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        return Inputs(batch, {"adversarial": self.learner.adversarial(batch, progress)})

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        logits = self.learner.forward(inputs.made["adversarial"])
        return self.learner.cross_entropy(logits, inputs.batch.y), accuracy(logits, inputs.batch.y)
