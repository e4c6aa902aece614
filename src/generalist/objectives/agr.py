"""AGR: adversarial training steered through clean and adversarial gradient directions (Tong et al., 2024)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from generalist.core.options import Fraction, Number
from generalist.core.schedule import Schedule
from generalist.objectives.at import AdversarialTraining
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, ObjectiveOptions, Progress, gradients_with
from generalist.objectives.geometry import unit


class AGROptions(ObjectiveOptions):
    """Options of AGR."""

    kind: str = "agr"
    """The objective's name."""

    start: Fraction = 0.75
    """Share of training after which the gradients are combined; before it the adversarial one is used alone."""

    clip: Number = Field(default=0.1, gt=0)
    """Largest Euclidean norm of a parameter tensor's combined gradient; a longer one is scaled down to it."""


@OBJECTIVES.register("agr")
class AdversarialGradientSteering(AdversarialTraining):
    """Minimises CE(x'), x' from PGD, along a direction that does not hurt CE(x) (Tong et al., 2024).

    In the last quarter of training, for each parameter tensor with adversarial gradient g1, clean gradient g2 and their
    cosine c: g1 minus its projection on g2 where c <= 0, else c g2 + (1 - c) g1; then clipped to norm 0.1. Before that,
    plain g1. The clean forward pass is always made, as in the authors' code, so that both kinds of images enter
    BatchNorm's running statistics. Costs steps + 2 forward and backward passes, one more than AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = AGROptions

    def __init__(self, options: AGROptions) -> None:
        super().__init__(options)
        self.clip = options.clip
        self.steered = Schedule(fractions=[0.0, options.start, options.start], values=[0.0, 0.0, 1.0])

    def schedules(self) -> dict[str, Schedule]:
        return {"steered": self.steered}

    def gradients_of(self, inputs: Inputs, progress: Progress) -> tuple[list[Tensor], Metrics]:
        batch = inputs.batch
        natural = self.learner.cross_entropy(self.learner.forward(batch.x), batch.y)
        clean = self.learner.means(gradients_with(natural, self.learner.model))
        gradients, metrics = super().gradients_of(inputs, progress)
        adversarial = self.learner.means(gradients)
        steered, cosines = [], []
        for own, other in zip(adversarial, clean, strict=True):
            combined, cosine = steer(own, other, clip=self.clip)
            steered.append(torch.where(progress.scalars["steered"] > 0, combined, own))
            cosines.append(cosine)
        conflict = (torch.stack(cosines) <= 0).float().mean()
        return steered, {**metrics, "natural_loss": natural.detach(), "conflict": conflict}


def steer(adversarial: Tensor, clean: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """The combined gradient of one parameter tensor, and the cosine between the two."""
    direction = unit(clean)
    cosine = (unit(adversarial) * direction).sum()
    against = adversarial - (adversarial * direction).sum() * direction
    along = cosine * clean + (1 - cosine) * adversarial
    combined = torch.where(cosine > 0, along, against)
    # clip / 0 is inf, and the smaller of it and 1 is 1.
    return combined * (clip / torch.linalg.vector_norm(combined)).clamp(max=1), cosine
