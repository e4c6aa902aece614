"""The momentum iterative method (Dong et al., 2018): PGD along a running sum of normalised gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from generalist.attacks.base import Found, verdict
from generalist.attacks.pgd import Classifier, borrowed, input_gradient, starting_point, summed_cross_entropy
from generalist.attacks.rounds import InRounds, check_counts
from generalist.attacks.threats import Threat, per_sample, perturb
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch
from generalist.tensors.capture import Given, recorded


class Path(NamedTuple):
    """The images so far, and the running sum of their gradients."""

    adversarial: Tensor
    gathered: Tensor


@dataclass(frozen=True, kw_only=True)
class MIM(InRounds):
    """Momentum iterative attack from a random start in the ball, like PGD's."""

    steps: int = 20
    decay: float = 1.0
    """The factor on the gathered gradient at each step; 0 makes it PGD."""

    def __post_init__(self) -> None:
        check_counts(self.name, steps=self.steps)
        if not (math.isfinite(self.decay) and self.decay >= 0):
            raise GeneralistError(f"mim: decay must be a number of at least 0, not {self.decay!r}")

    @property
    def name(self) -> str:
        return "mim"

    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        x, size = batch.x, threat.default_step(self.steps)
        purpose = f"{self.name}/{threat}"
        start = starting_point(threat, "uniform", seed=seed, purpose=purpose, index=batch.index, step=round, like=x)
        adversarial = perturb(x, threat.project(start))
        path = Path(adversarial, torch.zeros_like(x))
        with borrowed(model):
            step = recorded(model, (self, threat), partial(self._step, model, threat, size))
            for _ in range(self.steps):
                path = step(path, (x, batch.y))
            return verdict(model, batch, path.adversarial, threat=threat)

    def _step(self, model: Classifier, threat: Threat, size: float, path: Path, given: Given) -> Path:
        x, y = given
        grad = input_gradient(model, path.adversarial, y, summed_cross_entropy)
        gathered = self.decay * path.gathered + _of_mean_one(grad)
        return Path(perturb(x, threat.project(path.adversarial - x + size * threat.steepest(gathered))), gathered)


def _of_mean_one(grad: Tensor) -> Tensor:
    """The gradient divided by the mean of its absolute values; zeros stay zero, nan counts as zero."""
    # Divided by its largest entry first: a sum of tiny or huge numbers would leave the range of floats.
    grad = torch.nan_to_num(grad)
    largest = per_sample(grad.abs().flatten(1).amax(1), grad)
    grad = torch.where(largest > 0, grad / largest, 0)
    mean = per_sample(grad.abs().flatten(1).mean(1), grad)
    return torch.where(mean > 0, grad / mean, 0)
