"""FAB: the fast adaptive boundary attack, which looks for the nearest misclassified image.

Croce & Hein 2020, "Minimally distorted adversarial examples with a fast adaptive boundary attack". A step replaces
the decision boundary by its tangent plane, projects both the current point and the original onto it inside the box,
and goes slightly beyond a mixture of the two; a point across the boundary is pulled back towards the original. FAB-T
(Croce & Hein 2020, AutoAttack) takes the boundary to one class at a time: two logits instead of all of them.

An image is broken when the nearest misclassified one lies within eps. Unlike other attacks, FAB uses eps only for the
random starts of restarts, and it needs no step size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from generalist.attacks.base import Found, verdict
from generalist.attacks.losses import likely_wrong
from generalist.attacks.pgd import Classifier, borrowed
from generalist.attacks.projections import dual_norm, step_to_plane
from generalist.attacks.rounds import InRounds, a_little_beyond, check_counts
from generalist.attacks.threats import Threat, per_sample, perturb, widen
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch
from generalist.tensors.capture import Given, recorded

FINAL_STEPS = 3
"""Secant steps between the original and the nearest image found; the paper's number."""

FINAL_NUDGE = 0.01
"""How far a secant step continues towards the misclassified end: on the boundary itself, rounding would decide."""


class Approach(NamedTuple):
    """The current images, the nearest misclassified ones so far, and how far these are from the original."""

    x: Tensor
    best: Tensor
    distance: Tensor


@dataclass(frozen=True, kw_only=True)
class FAB(InRounds):
    """FAB with restarts; with `targets`, FAB-T. AutoAttack uses `FAB(targets=9)`."""

    iterations: int = 100
    """Steps per round; each costs two forward passes and a backward pass (untargeted: a backward pass per class)."""

    alpha_max: float = 0.1
    """The largest share of the original's own projection in a step: how strongly it is biased towards the original."""

    eta: float = 1.05
    """How far a step overshoots the plane: 1.05 lands 5% beyond it."""

    beta: float = 0.9
    """The share of its perturbation that a misclassified point keeps when it is pulled back to the original."""

    restarts: int = 1
    """How often each class is tried: first from the image itself, then from random points half of eps away."""

    targets: int | None = None
    """How many of the likeliest wrong classes are tried, one at a time, at most all; None for untargeted FAB."""

    def __post_init__(self) -> None:
        targets = {} if self.targets is None else {"targets": self.targets}
        check_counts(self.name, iterations=self.iterations, restarts=self.restarts, **targets)
        if not (0 <= self.alpha_max <= 1 and self.eta >= 1 and 0 < self.beta < 1):
            raise GeneralistError("fab needs 0 <= alpha_max <= 1, eta >= 1, 0 < beta < 1; the paper's: 0.1, 1.05, 0.9")

    @property
    def name(self) -> str:
        return "fab" if self.targets is None else "fab-t"

    def rounds(self, num_classes: int) -> int:
        """All restarts of the likeliest class, then of the next."""
        return self.restarts * (1 if self.targets is None else min(self.targets, num_classes - 1))

    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        with borrowed(model):
            x = self.nearest(model, batch, round, threat=threat, seed=seed)
            return verdict(model, batch, a_little_beyond(model, batch, x, threat=threat), threat=threat)

    def nearest(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Tensor:
        """The nearest misclassified images that were found; what is further away than eps is drawn back to it."""
        natural, y = widen(batch.x.detach()), batch.y
        target = None
        if self.targets is not None:
            target = likely_wrong(_logits(model, batch.x), y, round // self.restarts + 1)
        best, distance = natural, natural.new_full(y.shape, torch.inf)
        x = self._start(batch, round, threat, seed)
        given = (natural, y) if target is None else (natural, y, target)
        approach = Approach(x, best, distance)
        step = recorded(model, (self, threat), partial(self._iteration, model, batch.x.dtype, threat))
        for _ in range(self.iterations):
            approach = step(approach, given)
        x, best, distance = approach
        best, distance = _final_search(model, batch, natural, best, distance, threat)
        last = torch.where(per_sample(distance.isfinite(), x), best, x)
        inside = perturb(natural, threat.project(last - natural))
        return torch.where(per_sample(distance <= threat.eps, x), best, inside).to(batch.x.dtype)

    def _iteration(
        self, model: Classifier, dtype: torch.dtype, threat: Threat, approach: Approach, given: Given
    ) -> Approach:
        x, best, distance = approach
        natural, y, *targets = given
        value, normal = _boundary(model, x.to(dtype), y, targets[0] if targets else None, threat)
        x = self._step(x, natural, value, normal, threat)
        crossed = _led(_logits(model, x.to(dtype)), y)
        delta = x - natural
        best, distance = _nearer(best, distance, x, crossed, threat.norm(delta))
        return Approach(
            torch.where(per_sample(crossed, x), torch.add(natural, delta, alpha=self.beta), x), best, distance
        )

    def _start(self, batch: Batch, round: Tensor, threat: Threat, seed: int) -> Tensor:
        natural = widen(batch.x.detach())
        if self.restarts == 1:
            return natural
        draw = threat.random_start(seed, f"{self.name}/{threat}", batch.index, round, natural)
        length = threat.norm(draw).clamp_min(torch.finfo(natural.dtype).tiny)
        away = perturb(natural, draw * per_sample(threat.eps / 2 / length, draw))
        return torch.where(per_sample(round % self.restarts == 0, away), natural, away)

    def _step(self, x: Tensor, natural: Tensor, value: Tensor, normal: Tensor, threat: Threat) -> Tensor:
        """Step from x and from the original to slightly beyond the plane, and mix the two points."""
        slope = torch.nan_to_num(widen(normal)).flatten(1)
        points = torch.stack([x, natural]).flatten(2)
        gap = (slope * (points[1] - points[0])).sum(1, dtype=torch.float64)
        steps = step_to_plane(threat, points, slope, torch.stack([value, value + gap]))
        near, far = threat.norm(steps.flatten(0, 1)).chunk(2)
        share = torch.nan_to_num(near / (near + far)).clamp_max(self.alpha_max)  # 0 where neither moves
        here, origin = torch.add(points, steps, alpha=self.eta)
        return torch.lerp(here, origin, share.unsqueeze(1)).clamp(0, 1).reshape(x.shape)


@torch.no_grad()
def _logits(model: Classifier, x: Tensor) -> Tensor:
    return widen(model(x))


def _misclassified(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) != y) & ~logits.isnan().any(1)  # nan is no success: argmax would take it for the largest


def _led(logits: Tensor, y: Tensor) -> Tensor:
    """Whether another class has a larger logit than the true one; false for ties and nan, left to the verdict."""
    return logits.gather(1, y.unsqueeze(1)).squeeze(1) < logits.amax(1)


def _nearer(best: Tensor, distance: Tensor, x: Tensor, crossed: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest misclassified images so far, and how far they are."""
    nearer = crossed & (size < distance)
    return torch.where(per_sample(nearer, x), x, best), torch.where(nearer, size, distance)


def _boundary(model: Classifier, x: Tensor, y: Tensor, target: Tensor | None, threat: Threat) -> tuple[Tensor, Tensor]:
    """By how much the rival's logit exceeds the true one (negative where the true class leads), and the gradient."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = widen(model(x))
        if not logits.requires_grad:
            raise GeneralistError(
                "the logits have no gradient with respect to the images: "
                "the model must not detach its input, nor run under no_grad or inference_mode"
            )
    lead = (logits - logits.gather(1, y.unsqueeze(1))).detach()
    if target is None:
        return _nearest_class(logits, lead, x, y, lambda normal: dual_norm(threat, normal))
    # The gradient of the difference of two logits, without a graph for that difference.
    seed = torch.zeros_like(lead).scatter_(1, target.unsqueeze(1), 1).scatter_(1, y.unsqueeze(1), -1)
    (normal,) = torch.autograd.grad(logits, x, seed)
    return lead.gather(1, target.unsqueeze(1)).squeeze(1), normal


def _nearest_class(
    logits: Tensor, lead: Tensor, x: Tensor, y: Tensor, steepness: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Of all wrong classes the one whose tangent plane is nearest, regardless of the box.

    Takes a backward pass per class and keeps only the nearest so far, as the gradients of many classes would not fit
    into memory.
    """
    classes = lead.shape[1]
    value, normal = torch.zeros_like(lead[:, 0]), torch.zeros_like(x)
    nearest = torch.full_like(value, torch.inf)
    own = torch.zeros_like(lead).scatter_(1, y.unsqueeze(1), 1)
    for k in range(classes):
        seed = -own
        seed[:, k] += 1
        (gradient,) = torch.autograd.grad(logits, x, seed, retain_graph=k < classes - 1)
        steep = steepness(gradient)
        away = torch.where((steep > 0) & (y != k), lead[:, k].abs() / steep, torch.inf)
        nearer = away < nearest
        nearest = torch.where(nearer, away, nearest)
        value = torch.where(nearer, lead[:, k], value)
        normal = torch.where(per_sample(nearer, x), gradient, normal)
    return value, normal


def _final_search(
    model: Classifier, batch: Batch, natural: Tensor, best: Tensor, distance: Tensor, threat: Threat
) -> tuple[Tensor, Tensor]:
    """Secant steps towards the boundary on the segment from the original to the nearest image found."""
    y, dtype = batch.y, batch.x.dtype
    logits = _logits(model, best.to(dtype))
    rival = likely_wrong(logits, y, 1)

    def lead(logits: Tensor) -> Tensor:
        return (logits.gather(1, y.unsqueeze(1)) - logits.gather(1, rival.unsqueeze(1))).squeeze(1)

    low, high = torch.zeros_like(distance), torch.ones_like(distance)
    at_low, at_high = lead(_logits(model, batch.x)), lead(logits)
    end = best
    for _ in range(FINAL_STEPS):
        fall = at_low - at_high
        part = torch.where(fall > 0, low + at_low / fall * (high - low), high)
        part = part + FINAL_NUDGE * (high - part)
        part = torch.nan_to_num(part, nan=1.0).clamp(0, 1).to(distance.dtype)
        x = perturb(natural, per_sample(part, end) * (end - natural))
        logits = _logits(model, x.to(dtype))
        crossed = _misclassified(logits, y)
        best, distance = _nearer(best, distance, x, crossed & distance.isfinite(), threat.norm(x - natural))
        low, at_low = torch.where(crossed, low, part), torch.where(crossed, at_low, lead(logits))
        high, at_high = torch.where(crossed, part, high), torch.where(crossed, lead(logits), at_high)
    return best, distance
