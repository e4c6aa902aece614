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
    """Points visited on the way up. One whose loss is nan is never the best, nor the most wrong where its margin is.

    Nothing is larger than nan, so a first point without a number counts as -inf.
    """

    best: Point
    """For each sample the point of largest loss."""

    most_wrong: Tensor
    """For each sample the image of largest margin: misclassified if any was, and the safest of these from rounding."""

    def __init__(self, model: Classifier, y: Tensor, loss: SampleLoss, *, draws: int = 1) -> None:
        self._model, self._y, self._loss, self._draws = model, y, loss, draws

    def begin(self, x: Tensor) -> Point:
        """Forget all, and visit `x`."""
        point, margins = self._measure(x)
        point = Point(point.x, _ordered(point.loss), point.gradient)
        self.best, self.most_wrong, self._margin = point, x, _ordered(margins)
        return point

    def go(self, x: Tensor) -> Point:
        """Visit `x`."""
        point, margins = self._measure(x)
        better = point.loss > self.best.loss
        self.best = Point(
            x=pick(better, x, self.best.x),
            loss=torch.fmax(point.loss, self.best.loss),
            gradient=pick(better, point.gradient, self.best.gradient),
        )
        worse = margins > self._margin
        self.most_wrong = pick(worse, x, self.most_wrong)
        self._margin = torch.fmax(margins, self._margin)
        return point

    def _measure(self, x: Tensor) -> tuple[Point, Tensor]:
        """Loss, gradient and margin at `x`: of one pass, or means over several where the model answers at random."""
        point, margins = self._pass(x)
        if self._draws == 1:
            return point, margins
        loss, gradient = point.loss, point.gradient
        for _ in range(self._draws - 1):
            again, more = self._pass(x)
            loss, gradient, margins = loss + again.loss, gradient + again.gradient, margins + more
        return Point(point.x, loss / self._draws, gradient / self._draws), margins / self._draws

    def _pass(self, x: Tensor) -> tuple[Point, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            logits = widen(self._model(x))
            loss = self._loss(logits, self._y)
            gradient = gradient_of(loss.sum(), x)
            return Point(x.detach(), loss.detach(), gradient), margin(logits.detach(), self._y)


class Search(Protocol):
    """A way up for one norm, from the perturbation `start` of `x`; the answer is the most wrong image on it."""

    def __call__(self, ascent: Ascent, x: Tensor, start: Tensor, *, threat: Threat, steps: int) -> Tensor: ...


def _ordered(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), -torch.inf, values)
