"""MART (Wang et al., 2020)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from generalist.attacks.losses import others
from generalist.attacks.pgd import Start
from generalist.core.options import Number
from generalist.objectives.at import AdversarialTraining
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, ObjectiveOptions, Progress, accuracy


class MartOptions(ObjectiveOptions):
    """Options of MART."""

    kind: str = "mart"
    """The objective's name."""

    weight: Number = Field(default=6.0, ge=0)
    """The method's lambda, the weight of the divergence. The authors' scripts have 6 for a wide network
    and 5 for ResNet-18. Larger is more robust and less accurate."""


@OBJECTIVES.register("mart")
class Mart(AdversarialTraining):
    """Minimises -log p_y(x') - log(1 - max_{k != y} p_k(x')) + lambda (1 - p_y(x)) KL(p(x) || p(x')), lambda = 6,
    x' from PGD on cross-entropy (Wang et al., 2020): a sample weighs more, the less its clean image is recognised.

    Gradients flow through all of it. The learner's label smoothing acts on the first term. The attack starts at x +
    0.001 N(0, 1), as in the authors' code. Costs steps + 2 forward and backward passes, one more than AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = MartOptions

    @classmethod
    def usual_start(cls, options: ObjectiveOptions) -> Start:
        return "gaussian"

    def __init__(self, options: MartOptions) -> None:
        super().__init__(options)
        self.weight = options.weight

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        batch = inputs.batch
        natural_logits = self.learner.forward(batch.x)
        logits = self.learner.forward(inputs.made["adversarial"])
        boosted = self.learner.cross_entropy(logits, batch.y) + runner_up(logits, batch.y).mean()
        robust = weighted_divergence(natural_logits, logits, batch.y).mean()
        metrics = {"boosted_loss": boosted.detach(), "divergence": robust.detach()}
        return boosted + self.weight * robust, {**metrics, **accuracy(logits, batch.y)}


def runner_up(logits: Tensor, y: Tensor) -> Tensor:
    """-log(1 - p_k), k the likeliest wrong class, [B].

    1 - p_k is the sum of all other probabilities, so its logarithm stays finite where p_k rounds to 1.
    """
    log_p = F.log_softmax(logits, 1)
    likeliest = others(log_p.detach(), y).argmax(1)
    return -torch.logsumexp(others(log_p, likeliest), 1)


def weighted_divergence(natural_logits: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """(1 - p_y(x)) KL(p(x) || p(x')), [B]; in log-probabilities, so that nothing is 0 * inf."""
    natural, robust = F.log_softmax(natural_logits, 1), F.log_softmax(logits, 1)
    divergence = F.kl_div(robust, natural, reduction="none", log_target=True).sum(1)
    unsure = -torch.expm1(natural.gather(1, y.unsqueeze(1)).squeeze(1))
    return unsure * divergence
