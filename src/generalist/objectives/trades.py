"""TRADES (Zhang et al., 2019)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from generalist.attacks.pgd import Start
from generalist.core.options import Number
from generalist.data.sets import Batch
from generalist.objectives.base import (
    OBJECTIVES,
    Inputs,
    LearnerView,
    Metrics,
    Objective,
    ObjectiveOptions,
    Progress,
    accuracy,
)
from generalist.tensors.modes import frozen


class TradesOptions(ObjectiveOptions):
    """Options of TRADES."""

    kind: str = "trades"
    """The objective's name."""

    beta: Number = Field(6.0, ge=0)
    """Weight of the divergence; the papers compare 6 and 1. Larger is more robust and less accurate."""


@OBJECTIVES.register("trades")
class Trades(Objective):
    """Minimises CE(x) + beta * KL(p(x) || p(x')), beta = 6, gradients through both, x' maximising the same divergence
    (Zhang et al., 2019).

    The attack starts at x + 0.001 N(0, 1). Costs steps + 2 forward and backward passes and one forward pass: one of
    each more than AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = TradesOptions
    attacks_each = True

    @classmethod
    def usual_start(cls, options: ObjectiveOptions) -> Start:
        return "gaussian"

    def __init__(self, options: TradesOptions) -> None:
        super().__init__(options)
        self.beta = options.beta

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        learner.require_random_start()

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        with torch.no_grad(), frozen(self.learner.model, training=self.learner.attack.batchnorm == "train"):
            target = self.learner.forward(batch.x)
        attacked = self.learner.adversarial(batch, progress, loss=lambda logits, _: divergence(target, logits))
        return Inputs(batch, {"adversarial": attacked})

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        batch = inputs.batch
        natural_logits = self.learner.forward(batch.x)
        logits = self.learner.forward(inputs.made["adversarial"])
        natural = self.learner.cross_entropy(natural_logits, batch.y)
        robust = divergence(natural_logits, logits) / len(batch.y)
        metrics = {"natural_loss": natural.detach(), "divergence": robust.detach()}
        return natural + self.beta * robust, {**metrics, **accuracy(logits, batch.y)}


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(p_target || p_logits), summed over the batch.

    In terms of log-probabilities, so that it stays finite where a probability underflows to zero.
    """
    return F.kl_div(F.log_softmax(logits, 1), F.log_softmax(target, 1), reduction="sum", log_target=True)
