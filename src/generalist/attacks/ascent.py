"""A gradient ascent that remembers, for each sample, the best point so far and the most wrong one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from generalist.attacks.losses import margin
from generalist.attacks.pgd import Classifier, gradient_of
from generalist.attacks.threats import Threat, per_sample, widen
from generalist.tensors.capture import State, Step, recorded

Labels = tuple[Tensor, ...]
"""The labels, and other values per sample that a loss reads (the targets)."""

LabelledLoss = Callable[..., Tensor]
"""(logits [B, K], *labels) to a loss [B]."""


def pick(mask: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """Images from `chosen` where the mask [B] is true, from `other` elsewhere."""
    return torch.where(per_sample(mask, other), chosen, other)


class Point(NamedTuple):
    """Images with their loss [B] and its gradient."""

    x: Tensor
    loss: Tensor
    gradient: Tensor


class Trail(NamedTuple):
    """Where an ascent is, and what it remembers of its path."""

    here: Point
    """The latest point."""

    best: Point
    """For each sample the point of largest loss."""

    most_wrong: Tensor
    """For each sample the image of largest margin: misclassified if any was, and by as much as possible."""

    margin: Tensor
    """The margin of `most_wrong`."""


class Ascent:
    """Visits points on the way up. A point whose loss is nan is never the best, and with a nan margin never the most
    wrong; as nothing compares as larger than nan, a nan at the first point is replaced by -inf.
    """

    def __init__(self, model: Classifier, loss: LabelledLoss, *, key: Hashable = None, draws: int = 1) -> None:
        """`key` identifies the attack and its settings, for networks that record steps."""
        self._model, self._loss, self._key, self._draws = model, loss, key, draws

    def repeated(self, name: str, step: Step[State], *settings: Hashable) -> Step[State]:
        """A step that is taken many times, recorded where the network allows it; `settings` are what it closes over."""
        return recorded(self._model, (self._key, name, *settings), step)

    def begin(self, x: Tensor, labels: Labels) -> Trail:
        """Visit the first point."""
        point, margins = self._measure(x, labels)
        point = point._replace(loss=_ordered(point.loss))
        return Trail(here=point, best=point, most_wrong=x, margin=_ordered(margins))

    def go(self, trail: Trail, x: Tensor, labels: Labels) -> Trail:
        """Visit the next point."""
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
        """Loss, gradient and margin at `x`, as means over the passes (more than one for models with random outputs)."""
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
    """An ascent for one norm, from the perturbation `start` of `x`; returns the most wrong images on its path."""

    def __call__(
        self, ascent: Ascent, x: Tensor, labels: Labels, start: Tensor, *, threat: Threat, steps: int
    ) -> Tensor: ...


def _ordered(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), -torch.inf, values)
