"""Square attack: random search over square windows, which uses only the model's outputs and no gradient.

Andriushchenko, Croce, Flammarion & Hein 2020, "Square Attack: a query-efficient black-box adversarial attack via
random search". Each query proposes to repaint a window of the perturbation and keeps it if the true class loses ground;
windows shrink as queries go by. Masked gradients are no defence against it.

Every draw is a function of (seed, sample index, round, query), so a sample's search does not depend on its batch. Many
queries are drawn at once, because the tensors of a single one are small. A broken sample continues to the end of its
stage of the schedule, which only makes it more wrong, and is then left alone; the whole batch stops, between stages,
once nothing is left to break. Samples do not leave the batch, because rounding may depend on its size. Where a query
paints one window and the network is fused, its first layers are computed around that window alone (`tensors.windows`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from generalist.attacks.base import Found, verdict
from generalist.attacks.painters import PAINTERS, Draws, Painter
from generalist.attacks.pgd import Classifier, borrowed
from generalist.attacks.rounds import InRounds, check_counts
from generalist.attacks.threats import Threat, per_sample, widen
from generalist.core.errors import DataError, GeneralistError
from generalist.data.sets import Batch
from generalist.tensors.capture import Given, recorded
from generalist.tensors.fused import FusedNetwork
from generalist.tensors.windows import Windows

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""The queries, of 10,000, after which the area of the windows is halved (the paper's)."""


@dataclass(frozen=True, eq=False)
class SquareFound(Found):
    """What Square found, and what it cost."""

    queries: Tensor
    """int64 [B]: forward passes until each sample was broken, or the whole budget if it was not. The pass over the
    natural image is not counted; an image that is misclassified already took 0."""


@dataclass(frozen=True, kw_only=True)
class Square(InRounds):
    """Square attack; AutoAttack's settings."""

    queries: int = 5000
    """Forward passes per sample, including that of the start."""

    p_init: float = 0.8
    """Share of the image that the first windows cover."""

    rescaled: bool = False
    """Whether the windows' schedule, made for 10,000 queries, is rescaled to the budget. AutoAttack's is not: its 5,000
    queries end with windows of 1/128 of `p_init`, where a rescaled schedule would reach 1/512."""

    restarts: int = 1
    """Rounds, each a new search with the whole budget."""

    def __post_init__(self) -> None:
        check_counts(self.name, queries=self.queries, restarts=self.restarts)
        if not 0 < self.p_init <= 1:
            raise GeneralistError(f"square: p_init is a share of the image in (0, 1], not {self.p_init}")

    @property
    def name(self) -> str:
        return "square"

    def rounds(self, num_classes: int) -> int:
        """One round per restart, whatever the number of classes."""
        return self.restarts

    def share(self, query: int) -> float:
        """The share of the image that a window covers at this query (the start is query 0)."""
        place = query * 10_000 // self.queries if self.rescaled else query
        return float(self.p_init / 2 ** sum(place > halving for halving in HALVINGS))

    def stages(self) -> list[tuple[float, range]]:
        """The queries after the start, grouped by the share of their windows."""
        shares = [self.share(query) for query in range(self.queries)]
        changes = [1, *(i for i in range(2, self.queries) if shares[i] != shares[i - 1]), self.queries]
        return [(shares[a], range(a, b)) for a, b in pairwise(changes) if a < b]

    @torch.no_grad()
    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> SquareFound:
        if batch.x.dim() != 4:
            raise DataError(f"Square paints windows in images [B,C,H,W], not in {list(batch.x.shape)}")
        with borrowed(model):
            search = _Search(model, batch)
            painter = PAINTERS.get(threat.name)(search.natural, threat.eps)
            draws = Draws(seed, f"square/{threat}", batch.index, round)
            search.start(painter.start(draws))
            for share, stage in self.stages():
                if not search.unbroken_left():
                    break
                search.run(painter, draws, share, stage, key=(self, threat))
            found = verdict(model, batch, search.hunt.best.to(batch.x.dtype), threat=threat)
            queries = torch.where(search.wrong, 0, search.hunt.queries)
            return SquareFound(x=found.x, broken=found.broken, queries=queries)


class Hunt(NamedTuple):
    """The state that a query reads and changes."""

    best: Tensor
    """For each sample the image of largest margin so far."""

    margin: Tensor
    """By how much another class leads the true one at `best`: above 0 where a sample is broken, -inf at the start, inf
    where it is to be left alone."""

    queries: Tensor
    """Queries that each sample took until it was broken."""

    next: Tensor
    """int64 [1]: which query of the plan comes next."""

    memory: tuple[Tensor, ...] = ()
    """Where only windows are recomputed: the outputs of the network's first layers for `best`. Changed in place."""


class _Search:
    """The search over one batch. Nothing here waits for the device but `unbroken_left`."""

    def __init__(self, model: Classifier, batch: Batch) -> None:
        """Evaluate the natural images, for the number of classes and for those that need no query."""
        self._model, self._dtype = model, batch.x.dtype
        self.natural = widen(batch.x.detach())
        logits = widen(model(batch.x))
        self.wrong = (logits.argmax(1) != batch.y) & ~logits.isnan().any(1)  # nan is no success
        margin = torch.full_like(logits[:, 0], -torch.inf)
        self._first = torch.zeros(1, dtype=torch.int64, device=batch.y.device)
        self.hunt = Hunt(self.natural, margin, torch.zeros_like(batch.y), self._first)
        # As in `losses.margin`, but the masks of the labels are made once for thousands of queries.
        label = batch.y.unsqueeze(1)
        self._labels = label, torch.zeros_like(logits, dtype=torch.bool).scatter_(1, label, True)

    def start(self, x: Tensor) -> None:
        """The first query."""
        self.hunt = self.ask(self.hunt, x, self._labels)
        self._leave_broken()

    def run(self, painter: Painter, draws: Draws, share: float, queries: range, *, key: Hashable) -> None:
        """The queries of one stage."""
        painter.resize(share)
        size = painter.chunk()
        windows = self._windows(painter)
        step = recorded(self._model, (key, windows and windows.side), partial(self._query, painter, windows))
        if windows is not None:
            self.hunt = self.hunt._replace(memory=(windows.fill(self.hunt.best.to(self._dtype)),))
        for first in range(queries.start, queries.stop, size):
            # Always a whole plan, even if the stage ends before it does: a recording needs one shape.
            planned = range(first, first + size)
            plan = painter.plan(draws, planned)
            if windows is not None:  # repeats the draws that `plan` has made
                plan = (*plan, windows.corners(*painter.corners(draws, planned, "window")))
            given = (*self._labels, *painter.given, *plan)
            self.hunt = self.hunt._replace(next=self._first)
            for _ in range(min(size, queries.stop - first)):
                self.hunt = step(self.hunt, given)
        self.hunt = self.hunt._replace(memory=())
        self._leave_broken()

    def _windows(self, painter: Painter) -> Windows | None:
        """The network's way to recompute only the current windows, if it has one and a query paints a single window."""
        if not (painter.one_window and isinstance(self._model, FusedNetwork)):
            return None
        return self._model.windows(self.natural, painter.side)

    def _query(self, painter: Painter, windows: Windows | None, hunt: Hunt, given: Given) -> Hunt:
        label, own, *rest = given
        known, plan = rest[: len(painter.given)], rest[len(painter.given) :]
        query = [part.index_select(0, hunt.next).squeeze(0) for part in plan]
        around = None if windows is None else (windows, query.pop())
        found = self.ask(hunt, painter.proposal(hunt.best, known, query), (label, own), around)
        return found._replace(next=hunt.next + 1)

    def ask(
        self, hunt: Hunt, x: Tensor, labels: tuple[Tensor, Tensor], around: tuple[Windows, Tensor] | None = None
    ) -> Hunt:
        """Query the model with `x` and keep it where the margin grows, which it never does for nan."""
        label, own = labels
        images = x.to(self._dtype)
        if around is None:
            logits = widen(self._model(images))
        else:
            windows, corners = around
            logits = widen(windows.logits(images, corners, *hunt.memory))
        found = logits.masked_fill(own, -torch.inf).amax(1) - logits.gather(1, label).squeeze(1)
        better = found > hunt.margin
        if around is not None:
            windows.keep(better, corners, *hunt.memory)
        return Hunt(
            best=torch.where(per_sample(better, x), x, hunt.best),
            margin=torch.fmax(hunt.margin, found),
            queries=hunt.queries + (hunt.margin <= 0),
            next=hunt.next,
            memory=hunt.memory,
        )

    def _leave_broken(self) -> None:
        """Leave broken samples alone from now on. This is done at the end of a stage, whether or not others are broken:
        the result for a sample must not depend on the other samples."""
        margin = self.hunt.margin
        self.hunt = self.hunt._replace(margin=torch.where(margin > 0, torch.inf, margin))

    def unbroken_left(self) -> bool:
        return not bool((self.hunt.margin > 0).all())
