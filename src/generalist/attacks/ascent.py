"""The memory of a gradient ascent: the best point so far, and the most wrong one, sample by sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from generalist.attacks.losses import SampleLoss, margin
from generalist.attacks.pgd import Classifier, gradient_of
from generalist.attacks.rounds import per_sample
from generalist.attacks.threats import Threat, widen


def pick(mask: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """Images of `chosen` where the samples' mask says so, of `other` elsewhere."""
    return torch.where(per_sample(mask, other), chosen, other)


@dataclass(frozen=True, eq=False)
class Point:
    """Images with their loss [B] and its gradient."""

    x: Tensor
    loss: Tensor
    gradient: Tensor


class Ascent:
    """Points visited on the way up. Losses and margins that are nan count as -inf: such a point is never the best."""

    best: Point
    """For each sample the point of largest loss."""

    most_wrong: Tensor
    """For each sample the image of largest margin: misclassified if any was, and the safest of these from rounding."""

    def __init__(self, model: Classifier, y: Tensor, loss: SampleLoss) -> None:
        self._model, self._y, self._loss = model, y, loss

    def begin(self, x: Tensor) -> Point:
        """Forget all, and visit `x`."""
        point, self._margin = self._measure(x)
        self.best, self.most_wrong = point, x
        return point

    def go(self, x: Tensor) -> Point:
        """Visit `x`."""
        point, margins = self._measure(x)
        better = point.loss > self.best.loss
        self.best = Point(
            x=pick(better, x, self.best.x),
            loss=torch.where(better, point.loss, self.best.loss),
            gradient=pick(better, point.gradient, self.best.gradient),
        )
        worse = margins > self._margin
        self.most_wrong = pick(worse, x, self.most_wrong)
        self._margin = torch.where(worse, margins, self._margin)
        return point

    def _measure(self, x: Tensor) -> tuple[Point, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            logits = widen(self._model(x))
            loss = self._loss(logits, self._y)
            gradient = gradient_of(loss.sum(), x)
        return Point(x.detach(), _ordered(loss), gradient), _ordered(margin(logits, self._y))


class Search(Protocol):
    """A way up for one norm, from the perturbation `start` of `x`; the answer is the most wrong image on it."""

    def __call__(self, ascent: Ascent, x: Tensor, start: Tensor, *, threat: Threat, steps: int) -> Tensor: ...


def _ordered(values: Tensor) -> Tensor:
    values = values.detach()
    return torch.where(values.isnan(), -torch.inf, values)
