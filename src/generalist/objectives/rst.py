"""Robust self-training on labelled data (Raghunathan et al., 2020)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from generalist.attacks.pgd import Start
from generalist.core.options import Fraction
from generalist.objectives.at import AdversarialTraining
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, ObjectiveOptions, Progress, accuracy


class RSTOptions(ObjectiveOptions):
    """Options of robust self-training."""

    kind: str = "rst"
    """The objective's name."""

    beta: Fraction = 0.5
    """Share of the adversarial half in the loss, between 0 and 1. Larger is more robust and less accurate."""


@OBJECTIVES.register("rst")
class RobustSelfTraining(AdversarialTraining):
    """Minimises (1 - beta) CE(x) + beta CE(x'), beta = 0.5, x' from PGD (Raghunathan et al., 2020), labelled data only.

    Unlike in `at-half`, both halves pass through the network as one batch, so BatchNorm sees their common statistics.
    Actual self-training adds images with pseudo-labels: `data.extra`. The attack starts at x + 0.001 N(0, 1), as in the
    authors' code. Costs steps + 2 forward and backward passes, one more than AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = RSTOptions

    @classmethod
    def usual_start(cls, options: ObjectiveOptions) -> Start:
        return "gaussian"

    def __init__(self, options: RSTOptions) -> None:
        super().__init__(options)
        self.beta = options.beta

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        x, y = inputs.batch.x, inputs.batch.y
        natural_logits, logits = self.learner.forward(torch.cat([x, inputs.made["adversarial"]])).chunk(2)
        natural, robust = (self.learner.cross_entropy(each, y) for each in (natural_logits, logits))
        metrics = {"natural_loss": natural.detach(), **accuracy(logits, y)}
        return (1 - self.beta) * natural + self.beta * robust, metrics
