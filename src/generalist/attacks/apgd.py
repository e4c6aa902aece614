"""Auto-PGD: projected gradient ascent with momentum that finds its own step size.

Croce and Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks"
(ICML 2020), algorithm 1, for linf and l2; for l1 the search of `apgd_l1`. The loop never waits for the device, and all
shapes stay the same: what concerns only some samples is done by masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from generalist.attacks import losses
from generalist.attacks.apgd_l1 import search_l1
from generalist.attacks.ascent import Ascent, Labels, Point, Search, Trail, pick
from generalist.attacks.base import Found, verdict
from generalist.attacks.losses import SampleLoss
from generalist.attacks.pgd import Classifier, borrowed
from generalist.attacks.rounds import InRounds, check_counts
from generalist.attacks.threats import Threat, per_sample, perturb, widen
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch
from generalist.tensors.capture import Given

MOMENTUM = 0.75
"""Weight of the gradient step; the previous step gets the rest. The first step has no previous one."""

FIRST_STEP = 2.0
"""Length of the first steps, in units of eps."""

RHO = 0.75
"""The step size is halved if a smaller share than this of the steps since the last checkpoint raised the loss."""

LOSSES: dict[str, SampleLoss] = {"ce": losses.cross_entropy, "dlr": losses.dlr}


def checkpoints(steps: int) -> list[int]:
    """The iterations after which step sizes are reconsidered: 22, 41, 57, 70, 80, 87, 93, 99 of 100.

    The periods between them, in percent of all steps, start at 22 and shrink by 3 down to 6; each end is rounded up.
    """
    ends, end, period = [], 22, 22
    while end <= 100:
        ends.append(-(-end * steps // 100))
        period = max(period - 3, 6)
        end += period
    return sorted(set(ends))


class Climb(NamedTuple):
    """The state that a step of Auto-PGD reads and changes."""

    previous: Tensor
    """The images before the last step; `trail.here` has those after it."""
    rises: Tensor
    """Steps since the last checkpoint that raised the loss, [B]."""
    trail: Trail


def search(ascent: Ascent, x: Tensor, labels: Labels, start: Tensor, *, threat: Threat, steps: int) -> Tensor:
    """The most wrong image on Auto-PGD's path from the perturbation `start`, for linf and l2."""
    begin = perturb(x, threat.project(start))
    trail = ascent.begin(begin, labels)
    climb = Climb(previous=begin, rises=torch.zeros_like(trail.here.loss), trail=trail)
    size = torch.full_like(trail.here.loss, FIRST_STEP * threat.eps)
    halved, best_then, last = torch.zeros_like(size, dtype=torch.bool), trail.here.loss, 0
    step = ascent.repeated("step", partial(_step, ascent, threat, MOMENTUM), threat)
    ends = set(checkpoints(steps))
    for i in range(1, steps + 1):
        given = (x, size, *labels)
        climb = step(climb, given) if i > 1 else _step(ascent, threat, 1.0, climb, given)
        if i in ends:
            # Too few steps went up, or a whole period with the current step size found nothing better.
            best = climb.trail.best
            halved = (climb.rises < RHO * (i - last)) | (~halved & (best.loss <= best_then))
            size = torch.where(halved, size / 2, size)
            climb, best_then, last = _back_to_best(climb, halved), best.loss.clone(), i
    return climb.trail.most_wrong


def _step(ascent: Ascent, threat: Threat, momentum: float, climb: Climb, given: Given) -> Climb:
    """A gradient step, mixed with the step before it."""
    x, size, *labels = given
    here = climb.trail.here
    ahead = perturb(x, threat.project(here.x - x + per_sample(size, x) * threat.steepest(here.gradient)))
    mixed = here.x + momentum * (ahead - here.x) + (1 - momentum) * (here.x - climb.previous)
    trail = ascent.go(climb.trail, perturb(x, threat.project(mixed - x)), tuple(labels))
    return Climb(previous=here.x, rises=climb.rises + (trail.here.loss > here.loss), trail=trail)


def _back_to_best(climb: Climb, where: Tensor) -> Climb:
    """Continue from the best point `where` the mask says so, and restart the count of rises."""
    here, best = climb.trail.here, climb.trail.best
    here = Point(
        x=pick(where, best.x, here.x),
        loss=torch.where(where, best.loss, here.loss),
        gradient=pick(where, best.gradient, here.gradient),
    )
    return climb._replace(rises=torch.zeros_like(climb.rises), trail=climb.trail._replace(here=here))


SEARCHES: dict[str, Search] = {"linf": search, "l2": search, "l1": search_l1}
"""The search for each norm."""


@dataclass(frozen=True, kw_only=True)
class APGD(InRounds):
    """Untargeted Auto-PGD: `apgd-ce`, `apgd-dlr`. With fewer than three classes, DLR is the margin."""

    loss: Literal["ce", "dlr"] = "ce"
    """What is maximised: cross-entropy, or the difference of logits ratio."""
    steps: int = 100
    """Gradient steps per restart."""
    restarts: int = 1
    """Rounds, each from its own random start."""
    draws: int = 1
    """Passes per step, whose gradients are averaged, for models with random outputs (EOT)."""

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise GeneralistError(f"apgd: loss must be one of {', '.join(LOSSES)}, not {self.loss!r}")
        check_counts(self.name, steps=self.steps, restarts=self.restarts, draws=self.draws)

    @property
    def name(self) -> str:
        return f"apgd-{self.loss}"

    def rounds(self, num_classes: int) -> int:
        """One round per restart, whatever the number of classes."""
        return self.restarts

    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        check_norm(self.name, threat)
        with borrowed(model):
            ascent = Ascent(model, LOSSES[self.loss], key=self, draws=self.draws)
            start = starting_point(self.name, batch, round, threat=threat, seed=seed)
            x = SEARCHES[threat.name](ascent, batch.x, (batch.y,), start, threat=threat, steps=self.steps)
            return verdict(model, batch, x, threat=threat)


@dataclass(frozen=True, kw_only=True)
class TargetedAPGD(InRounds):
    """Auto-PGD towards each of the likeliest wrong classes: `apgd-t`.

    The loss is the targeted DLR; with fewer than four classes, the difference of the target's and the label's logits.
    """

    targets: int = 9
    """Wrong classes to try, likeliest first; all of them if there are fewer."""
    steps: int = 100
    """Gradient steps per target and restart."""
    restarts: int = 1
    """How often each class is tried, each time from its own random start."""

    def __post_init__(self) -> None:
        check_counts(self.name, targets=self.targets, steps=self.steps, restarts=self.restarts)

    @property
    def name(self) -> str:
        return "apgd-t"

    def rounds(self, num_classes: int) -> int:
        """One round per target and restart: all targets once, then all again."""
        return self.restarts * self._ranks(num_classes)

    def _ranks(self, num_classes: int) -> int:
        return min(self.targets, num_classes - 1)

    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        check_norm(self.name, threat)
        with borrowed(model):
            with torch.no_grad():
                logits = widen(model(batch.x))
            target = losses.likely_wrong(logits, batch.y, round % self._ranks(logits.shape[1]) + 1)
            ascent = Ascent(model, losses.dlr_targeted, key=self)
            start = starting_point(self.name, batch, round, threat=threat, seed=seed)
            x = SEARCHES[threat.name](ascent, batch.x, (batch.y, target), start, threat=threat, steps=self.steps)
            return verdict(model, batch, x, threat=threat)


def starting_point(attack: str, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Tensor:
    """A random perturbation of norm eps: one drawn from the ball and stretched to its surface."""
    start = threat.random_start(seed, f"{attack}/{threat}", batch.index, round, batch.x)
    length = threat.norm(start)
    stretch = torch.where(length > 0, threat.eps / length, 1)
    return start * per_sample(stretch, start).to(start.dtype)


def check_norm(attack: str, threat: Threat) -> None:
    """Refuse a norm for which there is no search."""
    if threat.name not in SEARCHES:
        raise GeneralistError(f"{attack} does not support the norm {threat.name!r}; it has {', '.join(SEARCHES)}")
