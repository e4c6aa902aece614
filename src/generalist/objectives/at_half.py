"""Half natural, half adversarial training."""

from __future__ import annotations

from torch import Tensor

from generalist.data.sets import Batch
from generalist.objectives.base import OBJECTIVES, Metrics, Objective, Progress
from generalist.objectives.nt import accuracy


@OBJECTIVES.register("at-half")
class HalfAdversarialTraining(Objective):
    """Minimises 0.5 CE(x) + 0.5 CE(x'), x' from PGD (the papers' AT with beta = 1/2).

    Natural and adversarial images are forwarded apart, each with its own BatchNorm statistics. Costs steps + 2
    forward and backward passes.
    """

    def loss(self, batch: Batch, progress: Progress) -> tuple[Tensor, Metrics]:
        adversarial = self.learner.adversarial(batch, progress)
        natural_logits = self.learner.forward(batch.x)
        logits = self.learner.forward(adversarial)
        natural = self.learner.cross_entropy(natural_logits, batch.y)
        robust = self.learner.cross_entropy(logits, batch.y)
        return 0.5 * natural + 0.5 * robust, accuracy(logits, batch.y)
