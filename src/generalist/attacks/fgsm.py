"""One steepest step of length eps: the fast gradient sign method (Goodfellow et al., 2015), for any threat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from generalist.attacks.base import Found, verdict
from generalist.attacks.pgd import Classifier, borrowed, input_gradient, summed_cross_entropy
from generalist.attacks.rounds import InRounds
from generalist.attacks.threats import Threat, perturb
from generalist.data.sets import Batch


@dataclass(frozen=True, kw_only=True)
class FGSM(InRounds):
    """The sign of the gradient for linf, its direction for l2; it starts at the image itself, so nothing is random."""

    @property
    def name(self) -> str:
        return "fgsm"

    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        with borrowed(model):
            grad = input_gradient(model, batch.x, batch.y, summed_cross_entropy)
            x = perturb(batch.x, threat.project(threat.eps * threat.steepest(grad)))
            return verdict(model, batch, x, threat=threat)
