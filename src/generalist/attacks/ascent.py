"""The memory of a gradient ascent: the best point so far, and the most wrong one, sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from generalist.attacks.losses import margin
from generalist.attacks.pgd import Classifier, gradient_of
from generalist.attacks.rounds import per_sample
from generalist.attacks.threats import Threat, widen
from generalist.tensors.capture import State, Step, recorded

Labels = tuple[Tensor, ...]
"""The labels, and what else a loss reads sample by sample (the targets)."""

LabelledLoss = Callable[..., Tensor]
"""(logits [B, K], *labels) to a loss [B]."""


def pick(mask: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """Images of `chosen` where the samples' mask says so, of `other` elsewhere."""
    return torch.where(per_sample(mask, other), chosen, other)


class Point(NamedTuple):
    """Images with their loss [B] and its gradient."""

    x: Tensor
    loss: Tensor
    gradient: Tensor


class Trail(NamedTuple):
    """Where an ascent is, and what it remembers of its way."""

    here: Point
    """The point visited last."""

    best: Point
    """For each sample the point of largest loss."""

    most_wrong: Tensor
    """For each sample the image of largest margin: misclassified if any was, and the safest of these from rounding."""

    margin: Tensor
    """The margin of `most_wrong`."""


class Ascent:
    """Visits points on the way up. One whose loss is nan is never the best, nor the most wrong where its margin is.

    Nothing is larger than nan, so a first point without a number counts as -inf.
    """

    def __init__(self, model: Classifier, loss: LabelledLoss, *, key: Hashable = None, draws: int = 1) -> None:
        """`key` names the attack with its settings, for a network whose recorder tells attacks apart by it."""
        self._model, self._loss, self._key, self._draws = model, loss, key, draws

    def repeated(self, name: str, step: Step[State], *settings: Hashable) -> Step[State]:
        """A step that is taken many times, recorded where the network allows it. It closes over these settings."""
        return recorded(self._model, (self._key, name, *settings), step)

    def begin(self, x: Tensor, labels: Labels) -> Trail:
        """Visit the first point."""
        point, margins = self._measure(x, labels)
        point = point._replace(loss=_ordered(point.loss))
        return Trail(here=point, best=point, most_wrong=x, margin=_ordered(margins))

    def go(self, trail: Trail, x: Tensor, labels: Labels) -> Trail:
        """Visit the next one."""
        point, margins = self._measure(x, labels)
        better = point.loss > trail.best.loss
        best = Point(
            x=pick(better, x, trail.best.x),
            loss=torch.fmax(point.loss, trail.best.loss),
            gradient=pick(better, point.gradient, trail.best.gradient),
        )
        most_wrong = pick(margins > trail.margin, x, trail.most_wrong)
        return Trail(here=point, best=best, most_wrong=most_wrong, margin=torch.fmax(margins, trail.margin))

    def _measure(self, x: Tensor, labels: Labels) -> tuple[Point, Tensor]:
        """Loss, gradient and margin at `x`: of one pass, or means over several where the model answers at random."""
        point, margins = self._pass(x, labels)
        if self._draws == 1:
            return point, margins
        loss, gradient = point.loss, point.gradient
        for _ in range(self._draws - 1):
            again, more = self._pass(x, labels)
            loss, gradient, margins = loss + again.loss, gradient + again.gradient, margins + more
        return Point(point.x, loss / self._draws, gradient / self._draws), margins / self._draws

    def _pass(self, x: Tensor, labels: Labels) -> tuple[Point, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            logits = widen(self._model(x))
            loss = self._loss(logits, *labels)
            gradient = gradient_of(loss.sum(), x)
            return Point(x.detach(), loss.detach(), gradient), margin(logits.detach(), labels[0])


class Search(Protocol):
    """A way up for one norm, from the perturbation `start` of `x`; the answer is the most wrong image on it."""

    def __call__(
        self, ascent: Ascent, x: Tensor, labels: Labels, start: Tensor, *, threat: Threat, steps: int
    ) -> Tensor: ...


def _ordered(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), -torch.inf, values)
