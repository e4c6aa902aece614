"""Adversarial weight perturbation (Wu et al., 2020), around any objective."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from generalist.core.options import Fraction, Number
from generalist.data.sets import Batch
from generalist.objectives.base import (
    OBJECTIVES,
    Inputs,
    LearnerView,
    Metrics,
    ObjectiveChoice,
    ObjectiveOptions,
    Progress,
)
from generalist.objectives.geometry import unit
from generalist.objectives.wrapper import Wrapper, WrapperOptions
from generalist.tensors.modes import restored

WARMING_UP = ", warming up"
"""What the variants of the wrapped objective end with in iterations without a perturbation."""


class AWPOptions(WrapperOptions):
    """Options of adversarial weight perturbation."""

    kind: str = "awp"
    """The objective's name."""

    around: ObjectiveChoice = Field(default="at", validate_default=True)
    """The objective whose loss is made flat around the weights, written as the learner's own would be."""

    rho: Number = Field(default=0.005, ge=0, le=1)
    """Length of a weight tensor's perturbation, as a share of the tensor's own norm. The authors use 0.005 with TRADES
    and 0.01 with AT. Larger narrows the gap between training and test, and fits less."""

    warmup: Fraction = 0
    """Share of training without a perturbation first, rounded to whole epochs: over-fitting comes late, perturbed
    weights learn more slowly, and up to there an epoch costs what the objective inside costs."""


@OBJECTIVES.register("awp")
class AdversarialWeightPerturbation(Wrapper):
    """Minimises max_v L(w + v), L the loss of the objective that it wraps (Wu et al., 2020).

    One step of ascent: v = rho |w| g / |g| for each weight tensor w (two dimensions or more: no biases, no BatchNorm),
    g its gradient on inputs that are made already, rho = 0.005. The gradients are taken at w + v, and w comes back bit
    for bit before the optimizer's step. The first pass leaves no trace: BatchNorm's statistics and the wrapped
    objective's state see the second one alone. Costs the wrapped objective and its loss once more: steps + 2 forward
    and backward passes around AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = AWPOptions

    def __init__(self, options: AWPOptions) -> None:
        super().__init__(options)
        self.rho, self.share = options.rho, options.warmup

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.warmup = learner.epochs_of(self.share)
        if self.warmup:  # a captured iteration cannot branch, and one of the warm-up is spared the pass of the ascent
            self.variants = (*self.inner.variants, *(name + WARMING_UP for name in self.inner.variants))

    def variant(self, step: int, epoch: int) -> str:
        return self.inner.variant(step, epoch) + (WARMING_UP if epoch <= self.warmup else "")

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        return self.inner.prepare(batch, inside(progress))

    def gradients_of(self, inputs: Inputs, progress: Progress) -> tuple[list[Tensor], Metrics]:
        warming_up, progress = progress.variant.endswith(WARMING_UP), inside(progress)
        if warming_up:
            return self.inner.gradients_of(inputs, progress)
        model = self.learner.model
        with restored([*model.buffers(), *self.inner.state_dict().values()]):
            ascent = self.learner.means(self.inner.gradients_of(inputs, progress)[0])
        parameters = [parameter.detach() for parameter in model.parameters()]
        with restored([weight for weight in parameters if weight.dim() > 1]):
            for weight, gradient in zip(parameters, ascent, strict=True):
                if weight.dim() > 1:
                    weight.add_(perturbation(weight, gradient, rho=self.rho))
            del ascent
            return self.inner.gradients_of(inputs, progress)

    def state_dict(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.inner.load_state_dict(state)


def inside(progress: Progress) -> Progress:
    """For the wrapped objective, which knows its own variants alone."""
    return replace(progress, variant=progress.variant.removesuffix(WARMING_UP))


def perturbation(weight: Tensor, gradient: Tensor, *, rho: float) -> Tensor:
    """rho |w| g / |g|: the step of that length along which the loss rises most; zero where there is no gradient."""
    length: Tensor = torch.linalg.vector_norm(weight)
    return rho * length * unit(gradient)
