"""Half natural, half adversarial training."""

from __future__ import annotations

from torch import Tensor

from generalist.objectives.at import AdversarialTraining
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, Progress, accuracy


@OBJECTIVES.register("at-half")
class HalfAdversarialTraining(AdversarialTraining):
    """Minimises 0.5 CE(x) + 0.5 CE(x'), x' from PGD (the papers' AT with beta = 1/2).

    Natural and adversarial images are forwarded separately, each with its own BatchNorm statistics. Costs steps + 2
    forward and backward passes, one more than AT.
    """

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        batch = inputs.batch
        natural = self.learner.cross_entropy(self.learner.forward(batch.x), batch.y)
        logits = self.learner.forward(inputs.made["adversarial"])
        robust = self.learner.cross_entropy(logits, batch.y)
        return 0.5 * natural + 0.5 * robust, accuracy(logits, batch.y)
