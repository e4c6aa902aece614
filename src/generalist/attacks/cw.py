"""Two attacks named after Carlini and Wagner (2017).

`cw` is what papers on adversarial training report: PGD on the margin of the logits. `cw-l2` is the original attack: it
searches for the smallest Euclidean perturbation that misleads, by Adam in a space without bounds, with a binary search
for the weight of success against size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from generalist.attacks.ascent import pick
from generalist.attacks.base import Found, verdict
from generalist.attacks.losses import margin
from generalist.attacks.pgd import Classifier, borrowed, gradient_of
from generalist.attacks.pgd_attack import restarted_pgd, summed_margin
from generalist.attacks.rounds import InRounds, a_little_beyond, check_counts
from generalist.attacks.threats import L2, Threat, perturb, widen
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch

INSIDE = 1 - 1e-6
"""Pixels are scaled away from 0 and 1 by this factor, as tanh reaches these only at infinity."""

NO_LIMIT = 1e10
"""The largest weight of success; a search that would go beyond it has failed."""


@dataclass(frozen=True, kw_only=True)
class CW(InRounds):
    """PGD on the margin: the largest other logit minus that of the label."""

    steps: int = 20

    def __post_init__(self) -> None:
        check_counts(self.name, steps=self.steps)

    @property
    def name(self) -> str:
        return "cw"

    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        with borrowed(model):
            x = restarted_pgd(model, batch, round, threat=threat, seed=seed, steps=self.steps, loss=summed_margin)
            return verdict(model, batch, x, threat=threat)


@dataclass(frozen=True, kw_only=True)
class CWL2(InRounds):
    """The smallest perturbation in l2; a sample is broken where it is at most eps. Nothing is random."""

    steps: int = 1000
    """Steps of Adam for each weight."""
    searches: int = 9
    """Number of weights tried: ten times the last one while it fails, then halfway between failure and success."""
    lr: float = 0.01
    weight: float = 1e-3
    """The first weight of success against size."""
    confidence: float = 0.0
    """By how much the wrong logit has to exceed the label's."""

    def __post_init__(self) -> None:
        check_counts(self.name, steps=self.steps, searches=self.searches)
        for name, value in (("lr", self.lr), ("weight", self.weight)):
            if not (math.isfinite(value) and value > 0):
                raise GeneralistError(f"cw-l2: {name} must be a number above 0, not {value!r}")
        if not (math.isfinite(self.confidence) and self.confidence >= 0):
            raise GeneralistError(f"cw-l2: confidence must be a number of at least 0, not {self.confidence!r}")

    @property
    def name(self) -> str:
        return "cw-l2"

    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        if not isinstance(threat, L2):
            raise GeneralistError(f"cw-l2 looks for small l2 perturbations and cannot judge {threat}: use cw for it")
        with borrowed(model):
            nearest, _ = self.nearest(model, batch.x, batch.y)
            x = perturb(batch.x, threat.project(nearest - batch.x))
            return verdict(model, batch, a_little_beyond(model, batch, x, threat=threat), threat=threat)

    def nearest(self, model: Classifier, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest misclassified images, or the image itself where none was found; and where [B] one was found."""
        weight = torch.full(x.shape[:1], self.weight, dtype=widen(x).dtype, device=x.device)
        low, high = torch.zeros_like(weight), torch.full_like(weight, NO_LIMIT)
        best, distance = x, torch.full_like(weight, torch.inf)
        with borrowed(model):
            for _ in range(self.searches):
                closest, reached = self._descend(model, x, y, weight)
                nearer = reached < distance
                best, distance = pick(nearer, closest, best), torch.where(nearer, reached, distance)
                success = reached < torch.inf
                low, high = torch.where(success, low, weight), torch.where(success, weight, high)
                weight = torch.where(high < NO_LIMIT, (low + high) / 2, 10 * weight).clamp(max=NO_LIMIT)
        return best, distance < torch.inf

    def _descend(self, model: Classifier, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Adam on squared distance + weight * hinge. Returns the nearest success and its squared distance, or inf."""
        free = torch.atanh((2 * x - 1) * INSIDE)
        first, second = torch.zeros_like(free), torch.zeros_like(free)
        best, distance = x, torch.full_like(weight, torch.inf)
        for i in range(1, self.steps + 1):
            with torch.enable_grad():
                free = free.detach().requires_grad_()
                image = (torch.tanh(free) + 1) / 2
                size = (image - x).flatten(1).square().sum(1)
                gap = margin(widen(model(image)), y)
                hinge = (self.confidence - gap).clamp_min(0)
                gradient = torch.nan_to_num(gradient_of((size + weight * hinge).sum(), free))
            nearer = (gap > self.confidence) & (size < distance)
            best, distance = pick(nearer, image.detach(), best), torch.where(nearer, size, distance).detach()
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square()
            scale = (second / (1 - 0.999**i)).sqrt() + 1e-8
            free = free - self.lr * first / (1 - 0.9**i) / scale
        return best, distance
