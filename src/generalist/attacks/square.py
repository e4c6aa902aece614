"""Square attack: random search over square windows, with the model's answers alone and no gradient.

Andriushchenko, Croce, Flammarion & Hein 2020, "Square Attack: a query-efficient black-box adversarial attack via
random search". A query proposes to repaint a window of the perturbation and keeps what makes the margin smaller;
windows shrink as queries go by. It sees through models whose gradients are masked.

Every draw is a function of (seed, sample index, query), so a sample's search does not know its batch. A broken sample
is left alone by a mask; the whole batch stops, between stages of the schedule, once nothing is left to break.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from generalist.attacks.base import Found, verdict
from generalist.attacks.pgd import Classifier, borrowed
from generalist.attacks.threats import Threat, perturb, widen
from generalist.core import random
from generalist.core.errors import DataError, GeneralistError
from generalist.core.registry import Registry
from generalist.data.sets import Batch

HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""The queries of 10,000 after which the windows' area is halved; other budgets are scaled to these (the paper's)."""

TILES = 5
"""The l2 and l1 searches start with a grid of so many tiles a side (the paper's)."""


@dataclass(frozen=True, eq=False)
class SquareFound(Found):
    """What Square found, and what it cost."""

    queries: Tensor
    """int64 [B]: forward passes that each sample took until it was broken, the whole budget where it was not. That of
    the natural image is not counted; an image that is wrong as it is took 0."""


@dataclass(frozen=True, kw_only=True)
class Square:
    """Square attack; AutoAttack's settings."""

    queries: int = 5000
    """Forward passes a sample may take, the first of them of the start."""

    p_init: float = 0.8
    """Share of the image that the first windows cover."""

    restart: int = 0
    """Another number is another search."""

    name: ClassVar[str] = "square"

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries must be 1 or more, not {self.queries}")
        if not 0 < self.p_init <= 1:
            raise ValueError(f"p_init is a share of the image in (0, 1], not {self.p_init}")

    def rounds(self, num_classes: int) -> list[Square]:
        """One round: a query depends on those before it."""
        return [self]

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
    def run(self, model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> SquareFound:
        if batch.x.dim() != 4:
            raise DataError(f"Square paints windows in images [B,C,H,W], not in {list(batch.x.shape)}")
        with borrowed(model):
            search = _Search(model, batch)
            draws = _Draws(seed, f"square/{threat}/{self.restart}", batch.index)
            painter = PAINTERS.get(threat.name)(search.natural, threat.eps)
            search.start(painter.start(draws))
            for share, queries in self.stages():
                if not search.unbroken_left():
                    break
                painter.resize(share)
                for query in queries:
                    search.propose(painter.proposal(search.best, draws, query))
            found = verdict(model, batch, search.best.to(batch.x.dtype), threat=threat)
            return SquareFound(x=found.x, broken=found.broken, queries=search.queries)


@dataclass(frozen=True)
class _Draws:
    """The randomness of one search."""

    seed: int
    purpose: str
    index: Tensor

    def below(self, high: int, what: str, query: int) -> Tensor:
        """A number in [0, high) for each sample."""
        return random.integers(high, self.seed, f"{self.purpose}/{what}", self.index, query)

    def signs(self, *shape: int, what: str, query: int) -> Tensor:
        """-1 or 1, [B, *shape]."""
        return 2 * random.integers(2, self.seed, f"{self.purpose}/{what}", self.index, query, shape=shape) - 1


class _Search:
    """The best images so far, their margins and their cost. Nothing here waits for the device but `unbroken_left`."""

    def __init__(self, model: Classifier, batch: Batch) -> None:
        self._model, self._y, self._dtype = model, batch.y, batch.x.dtype
        self.natural = self.best = widen(batch.x.detach())
        self._margin, self._broken = self._ask(self.natural)
        self.queries = torch.zeros_like(batch.y)

    def start(self, x: Tensor) -> None:
        """The first query is kept whatever its margin, unless the image is wrong as it is."""
        self._margin = torch.full_like(self._margin, torch.inf)
        self.propose(x)

    def propose(self, x: Tensor) -> None:
        """Ask the model about `x` and keep it where the margin shrinks."""
        margin, broken = self._ask(x)
        open_ = ~self._broken
        better = open_ & (broken | (margin < self._margin))
        self.queries = self.queries + open_
        self.best = torch.where(better[:, None, None, None], x, self.best)
        self._margin = torch.where(better, margin, self._margin)
        self._broken = self._broken | (open_ & broken)

    def unbroken_left(self) -> bool:
        return not bool(self._broken.all())

    def _ask(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """By how much the true class leads the others, and whether it does not."""
        logits = widen(self._model(x.to(self._dtype)))
        if logits.shape[1] < 2:
            raise GeneralistError("the model has 1 output per image: an attack needs 2 classes or more")
        truth = self._y.unsqueeze(1)
        margin = logits.gather(1, truth).squeeze(1) - logits.scatter(1, truth, -torch.inf).amax(1)
        answered = ~logits.isnan().any(1)  # a model without an answer is not a success
        return torch.where(answered, margin, torch.inf), answered & (logits.argmax(1) != self._y)


class Painter(ABC):
    """How one norm starts and repaints a window. Results lie inside ball and box."""

    def __init__(self, natural: Tensor, eps: float) -> None:
        self.natural, self.eps = natural, eps
        self.channels, self.height, self.width = natural.shape[1:]
        self.side = 1

    def resize(self, share: float) -> None:
        """Windows from now on cover this share of the image, as nearly as squares inside it can."""
        side = self.fit(math.sqrt(share * self.height * self.width))
        self.side = min(side, self.height, self.width)

    def fit(self, side: float) -> int:
        return max(round(side), 1)

    def windows(self, draws: _Draws, query: int, what: str) -> tuple[Tensor, Tensor, Tensor]:
        """A window for each sample: the row [B,1,H,1] and the column [B,1,1,W] of each pixel within it, and a mask."""
        top = draws.below(self.height - self.side + 1, f"{what}-top", query)
        left = draws.below(self.width - self.side + 1, f"{what}-left", query)
        device = self.natural.device
        row = torch.arange(self.height, device=device)[None, None, :, None] - top[:, None, None, None]
        column = torch.arange(self.width, device=device)[None, None, None, :] - left[:, None, None, None]
        return row, column, self._within(row) & self._within(column)

    def _within(self, place: Tensor) -> Tensor:
        return (place >= 0) & (place < self.side)

    @abstractmethod
    def start(self, draws: _Draws) -> Tensor:
        """The images of the first query."""

    @abstractmethod
    def proposal(self, best: Tensor, draws: _Draws, query: int) -> Tensor:
        """The images of a later query."""


PAINTERS: Registry[type[Painter]] = Registry("norm of the Square attack")


@PAINTERS.register("linf")
class LinfPainter(Painter):
    """Every pixel at -eps or eps: vertical stripes to start with, then windows of one sign a channel."""

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        eps = torch.full_like(self.natural, self.eps)
        return perturb(self.natural, -eps), perturb(self.natural, eps)

    def _painted(self, signs: Tensor) -> Tensor:
        lowest, highest = self._ends
        return torch.where(signs > 0, highest, lowest)

    def start(self, draws: _Draws) -> Tensor:
        return self._painted(draws.signs(self.channels, 1, self.width, what="stripes", query=0))

    def proposal(self, best: Tensor, draws: _Draws, query: int) -> Tensor:
        _, _, mask = self.windows(draws, query, "window")
        return torch.where(mask, self._painted(draws.signs(self.channels, 1, 1, what="sign", query=query)), best)


class BudgetPainter(Painter):
    """The l2 search, for any power p >= 1: what |.|^p a window and an erased second one held, and what was not used,
    is spent again on the first window in the shape of two pyramids of opposite sign."""

    power: ClassVar[int]
    _pattern: Tensor

    def resize(self, share: float) -> None:
        super().resize(share)
        pattern = opposite_pyramids(self.side).to(self.natural)
        self._pattern = pattern / self._sum(pattern, (0, 1)) ** (1 / self.power)

    def fit(self, side: float) -> int:
        """Odd, so that a pyramid has a tip, and at least 3, so that there are two of them."""
        return max(round(side), 3) // 2 * 2 + 1

    def start(self, draws: _Draws) -> Tensor:
        """A grid of pyramids of random signs that spends eps."""
        tile = max(1, min(self.height, self.width) // TILES)
        rows, columns = self.height // tile, self.width // tile
        signs = draws.signs(self.channels, rows, columns, what="tiles", query=0).to(self.natural)
        tiles = torch.kron(signs, pyramid(tile, tile).to(self.natural)[None, None])
        delta = torch.zeros_like(self.natural)
        top, left = (self.height - rows * tile) // 2, (self.width - columns * tile) // 2
        delta[:, :, top : top + rows * tile, left : left + columns * tile] = tiles
        size = self._sum(delta, (1, 2, 3)) ** (1 / self.power)
        return perturb(self.natural, delta * (self.eps / size))

    def proposal(self, best: Tensor, draws: _Draws, query: int) -> Tensor:
        return perturb(self.natural, self.repainted(best - self.natural, draws, query))

    def repainted(self, delta: Tensor, draws: _Draws, query: int) -> Tensor:
        """The perturbation with one window repainted and another erased; it spends eps, before the box clips it."""
        row, column, first = self.windows(draws, query, "window")
        _, _, second = self.windows(draws, query, "erased")
        upright = draws.below(2, "turned", query)[:, None, None, None] == 0
        r, c = row.clamp(0, self.side - 1), column.clamp(0, self.side - 1)
        shape = torch.where(upright, self._pattern[r, c], self._pattern[c, r]) * first
        held = delta * first
        size = self._sum(held, (2, 3)) ** (1 / self.power)
        signed = draws.signs(self.channels, 1, 1, what="sign", query=query) * shape
        mixed = signed + torch.where(size > 0, held / size, 0)
        # What was held can cancel the new shape, as in windows of one pixel; the new shape then replaces it.
        mixed = torch.where(self._sum(mixed, (2, 3)) > 0, mixed, signed)
        unused = (self.eps**self.power - self._sum(delta, (1, 2, 3))).clamp_min(0)
        available = self._sum(delta * (first | second), (2, 3)) + unused / self.channels
        new = mixed * (available / self._sum(mixed, (2, 3))) ** (1 / self.power)
        return torch.where(first, new, torch.where(second, 0, delta))

    def _sum(self, values: Tensor, dims: tuple[int, ...]) -> Tensor:
        return values.abs().pow(self.power).sum(dims, keepdim=True)


@PAINTERS.register("l2")
class L2Painter(BudgetPainter):
    power = 2


@PAINTERS.register("l1")
class L1Painter(BudgetPainter):
    """The l2 search with sums of absolute values for sums of squares; what the box clips, the next query spends again.

    Simpler than the l1 search of Croce & Hein 2021 ("Mind the box"), and a few points weaker where the box clips much.
    """

    power = 1


def pyramid(height: int, width: int) -> Tensor:
    """The paper's bump, float64: 1/(n+1)^2 + ... + 1/(d+1)^2 at Chebyshev distance d from the middle.

    n is half of the height, rounded down; the height is the longer side.
    """
    half = height // 2
    rows = (torch.arange(height) - half).abs()
    columns = (torch.arange(width) - width // 2).abs()
    distance = torch.maximum(rows[:, None], columns[None, :])
    terms = 1 / torch.arange(1, half + 2, dtype=torch.float64) ** 2
    return terms.flip(0).cumsum(0).flip(0)[distance]


def opposite_pyramids(side: int) -> Tensor:
    """A square of two bumps side by side, of opposite signs and equal Euclidean length, float64."""
    parts = [pyramid(side, side // 2), -pyramid(side, side - side // 2)]
    return torch.cat([part / part.norm() if part.numel() else part for part in parts], 1)
