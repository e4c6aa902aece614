"""Square attack: random search over square windows, with the model's answers alone and no gradient.

Andriushchenko, Croce, Flammarion & Hein 2020, "Square Attack: a query-efficient black-box adversarial attack via
random search". A query proposes to repaint a window of the perturbation and keeps what makes the margin smaller;
windows shrink as queries go by. It sees through models whose gradients are masked.

Every draw is a function of (seed, sample index, round, query), so a sample's search does not know its batch. Queries
are drawn many at once, as a query of its own has few and small tensors. A broken sample goes on to the end of its
stage of the schedule, which only makes it more wrong, and is left alone after that; the whole batch stops, between
stages, once nothing is left to break. Samples do not leave the batch: rounding may depend on its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from generalist.attacks.base import Found, verdict
from generalist.attacks.painters import PAINTERS, Draws, Painter
from generalist.attacks.pgd import Classifier, borrowed
from generalist.attacks.rounds import InRounds, per_sample
from generalist.attacks.threats import Threat, widen
from generalist.core.errors import DataError, GeneralistError
from generalist.data.sets import Batch

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""The queries of 10,000 after which the windows' area is halved; other budgets are scaled to these (the paper's)."""


@dataclass(frozen=True, eq=False)
class SquareFound(Found):
    """What Square found, and what it cost."""

    queries: Tensor
    """int64 [B]: forward passes that each sample took until it was broken, the whole budget where it was not. That of
    the natural image is not counted; an image that is wrong as it is took 0."""


@dataclass(frozen=True, kw_only=True)
class Square(InRounds):
    """Square attack; AutoAttack's settings."""

    queries: int = 5000
    """Forward passes a sample may take, the first of them of the start."""

    p_init: float = 0.8
    """Share of the image that the first windows cover."""

    restarts: int = 1
    """Rounds, each another search with the whole budget."""

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries must be 1 or more, not {self.queries}")
        if not 0 < self.p_init <= 1:
            raise ValueError(f"p_init is a share of the image in (0, 1], not {self.p_init}")
        if self.restarts < 1:
            raise ValueError(f"restarts must be 1 or more, not {self.restarts}")

    @property
    def name(self) -> str:
        return "square"

    def rounds(self, num_classes: int) -> int:
        """A round a restart, whatever the number of classes."""
        return self.restarts

    def share(self, query: int) -> float:
        """The share of the image that a window covers at this query (the start is query 0)."""
        scaled = query * 10_000 // self.queries
        return float(self.p_init / 2 ** sum(scaled > halving for halving in HALVINGS))

    def stages(self) -> list[tuple[float, range]]:
        """The queries after the start, by the share of their windows."""
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
                search.run(painter, draws, share, stage)
            found = verdict(model, batch, search.best.to(batch.x.dtype), threat=threat)
            return SquareFound(x=found.x, broken=found.broken, queries=search.queries)


class _Search:
    """The best images so far, their margins and their cost. Nothing here waits for the device but `unbroken_left`."""

    margin: Tensor
    """By how much another class leads the true one at `best`: above 0 where a sample is broken, -inf to begin with,
    inf where it is to be left alone."""

    queries: Tensor
    """Queries that each sample took until it was broken, up to the last `count`."""

    def __init__(self, model: Classifier, batch: Batch) -> None:
        """Look at the natural images: one that is wrong as it is needs no search."""
        self._model, self._dtype = model, batch.x.dtype
        self.natural = self.best = widen(batch.x.detach())
        logits = widen(model(batch.x))
        if logits.shape[1] < 2:
            raise GeneralistError("the model has 1 output per image: an attack needs 2 classes or more")
        wrong = (logits.argmax(1) != batch.y) & ~logits.isnan().any(1)  # a model without an answer is not a success
        self.margin = torch.where(wrong, torch.inf, -torch.inf).to(logits.dtype)
        self.queries = torch.zeros_like(batch.y)
        self._margins = [self.margin]
        # The margin of `losses`, with what it makes of the labels made once: thousands of queries ask for it.
        self._label = batch.y.unsqueeze(1)
        self._own = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, self._label, True)

    def start(self, x: Tensor) -> None:
        """The first query."""
        self.ask(x)
        self.count()
        self._leave_broken()

    def run(self, painter: Painter, draws: Draws, share: float, queries: range) -> None:
        """The queries of one stage."""
        painter.resize(share)
        size = painter.chunk()
        for chunk in (queries[i : i + size] for i in range(0, len(queries), size)):
            plan = painter.plan(draws, chunk)
            for i in range(len(chunk)):
                self.ask(painter.proposal(self.best, plan, i))
            self.count()
        self._leave_broken()

    def ask(self, x: Tensor) -> None:
        """Ask the model about `x` and keep it where the margin grows; one of nan, without an answer, never does."""
        logits = widen(self._model(x.to(self._dtype)))
        found = logits.masked_fill(self._own, -torch.inf).amax(1) - logits.gather(1, self._label).squeeze(1)
        self.best = torch.where(per_sample(found > self.margin, x), x, self.best)
        self.margin = torch.fmax(self.margin, found)
        self._margins.append(self.margin)

    def count(self) -> None:
        """Count the queries since the last time, each for the samples that were not broken before it."""
        before = torch.stack(self._margins[:-1])
        self.queries = self.queries + (before <= 0).sum(0)
        self._margins = [self.margin]

    def _leave_broken(self) -> None:
        """Here and not when all are broken: what a sample ends with must not depend on the others."""
        self.margin = torch.where(self.margin > 0, torch.inf, self.margin)
        self._margins = [self.margin]

    def unbroken_left(self) -> bool:
        return not bool((self.margin > 0).all())
