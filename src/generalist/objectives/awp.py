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
"""The suffix of the wrapped objective's variants in iterations without a perturbation."""


class AWPOptions(WrapperOptions):
    """Options of adversarial weight perturbation."""

    kind: str = "awp"
    """The objective's name."""

    around: ObjectiveChoice = Field(default="at", validate_default=True)
    """The objective whose loss is flattened around the weights, written as a learner's own would be."""

    rho: Number = Field(default=0.005, ge=0, le=1)
    """Length of a weight tensor's perturbation, as a share of the tensor's own norm. The authors use 0.005 with TRADES
    and 0.01 with AT. A larger one narrows the gap between training and test, but fits the training images less."""

    warmup: Fraction = 0
    """Fraction of training, rounded to whole epochs, before the perturbations begin: over-fitting comes late, perturbed
    weights learn more slowly, and until then an epoch costs only what the wrapped objective costs."""


@OBJECTIVES.register("awp")
class AdversarialWeightPerturbation(Wrapper):
    """Minimises max_v L(w + v), L the loss of the objective that it wraps (Wu et al., 2020).

    One step of ascent: v = rho |w| g / |g| for each weight tensor w (two dimensions or more: no biases, no BatchNorm),
    g its gradient on the inputs that the wrapped objective has prepared, rho = 0.005. The gradients are taken at w + v,
    and w is restored exactly before the optimizer's step. The first pass leaves no trace: BatchNorm's statistics and
    the wrapped objective's state only see the second one. Costs the wrapped objective and its loss once more: steps + 2
    forward and backward passes around AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = AWPOptions

    def __init__(self, options: AWPOptions) -> None:
        super().__init__(options)
        self.rho, self.share = options.rho, options.warmup

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.warmup = learner.epochs_of(self.share)
        if self.warmup:  # variants, as a captured iteration cannot branch: those of the warm-up skip the ascent
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
    """The progress for the wrapped objective, which only knows its own variants."""
    return replace(progress, variant=progress.variant.removesuffix(WARMING_UP))


def perturbation(weight: Tensor, gradient: Tensor, *, rho: float) -> Tensor:
    """rho |w| g / |g|: the step of that length that raises the loss most; zero where there is no gradient."""
    length: Tensor = torch.linalg.vector_norm(weight)
    return rho * length * unit(gradient)
