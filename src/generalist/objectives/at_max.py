"""Adversarial training on the worst of several norms."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from generalist.data.sets import Batch
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, ObjectiveOptions, Progress, accuracy
from generalist.objectives.norms import SeveralNorms, SeveralNormsOptions


class MaxOptions(SeveralNormsOptions):
    """Options of training on the worst of several norms."""

    kind: str = "at-max"
    """The objective's name."""


@OBJECTIVES.register("at-max")
class WorstOfNorms(SeveralNorms):
    """Minimises CE(x'), where x' has for each example, of its PGD images in each norm, the one with the highest
    cross-entropy (Tramer and Boneh, 2019, max).

    The norms are the learner's own and l2 128/255, or what `beside` says. The choice is made in the attack's BatchNorm
    mode; the chosen images form one batch. With n norms it costs n steps + 1 forward and backward passes and n forward
    passes: about n times AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = MaxOptions
    attacks_each = True

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        return Inputs(batch, {"adversarial": self.worst(self.attacked(batch, progress), batch.y)})

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        logits = self.learner.forward(inputs.made["adversarial"])
        return self.learner.cross_entropy(logits, inputs.batch.y), accuracy(logits, inputs.batch.y)
