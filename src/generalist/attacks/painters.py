"""What a query of the Square attack paints, for each norm; the windows of many queries are drawn at once.

Andriushchenko, Croce, Flammarion & Hein 2020, "Square Attack", sections 3.2 and 3.3.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from generalist.attacks.apgd_l1 import project_to_ball_and_box
from generalist.attacks.threats import perturb
from generalist.core import random
from generalist.core.registry import Registry

CHUNK = 64
"""The most queries that are drawn at once."""

TILES = 5
"""The l2 and l1 searches start with a grid of this many tiles per side (the paper's)."""


@dataclass(frozen=True, eq=False)
class Draws:
    """The randomness of a batch of searches; each draw has the shape [queries, samples, ...]."""

    seed: int
    purpose: str
    index: Tensor
    round: Tensor

    def below(self, high: int, what: str, queries: range) -> Tensor:
        """Numbers in [0, high)."""
        return random.integers(high, self.seed, f"{self.purpose}/{what}", *self._keys(queries))

    def signs(self, *shape: int, what: str, queries: range) -> Tensor:
        """-1 or 1, int64."""
        return 2 * random.integers(2, self.seed, f"{self.purpose}/{what}", *self._keys(queries), shape=shape) - 1

    def _keys(self, queries: range) -> tuple[Tensor, Tensor, Tensor]:
        query = torch.arange(queries.start, queries.stop, device=self.index.device)
        return self.index, self.round, query.unsqueeze(1)


class Painter(ABC):
    """How the search for one norm starts and repaints windows. All images lie inside ball and box."""

    given: tuple[Tensor, ...]
    """The tensors that `proposal` needs from the natural images."""

    one_window: ClassVar[bool] = False
    """Whether a query's images differ from the best ones in a single window, drawn as `corners(..., "window")`."""

    def __init__(self, natural: Tensor, eps: float) -> None:
        self.natural, self.eps = natural, eps
        self.given = (natural,)
        self.channels, self.height, self.width = natural.shape[1:]
        self.side = 1

    def resize(self, share: float) -> None:
        """From now on, let windows cover this share of the image, as nearly as squares inside it can."""
        side = self.fit(math.sqrt(share * self.height * self.width))
        self.side = min(side, self.height, self.width)

    def fit(self, side: float) -> int:
        return max(round(side), 1)

    def corners(self, draws: Draws, queries: range, what: str) -> tuple[Tensor, Tensor]:
        """Top row and left column of a window for each query and sample."""
        top = draws.below(self.height - self.side + 1, f"{what}-top", queries)
        left = draws.below(self.width - self.side + 1, f"{what}-left", queries)
        return top, left

    def inside(self, corner: Tensor, length: int) -> Tensor:
        """Which of `length` rows or columns a window that begins at `corner` covers, bool [..., length]."""
        place = torch.arange(length, device=corner.device) - corner.unsqueeze(-1)
        return (place >= 0) & (place < self.side)

    @abstractmethod
    def chunk(self) -> int:
        """How many queries to plan at once, so that a plan takes no more memory than a few batches of images."""

    @abstractmethod
    def start(self, draws: Draws) -> Tensor:
        """The images of the first query."""

    @abstractmethod
    def plan(self, draws: Draws, queries: range) -> tuple[Tensor, ...]:
        """All random choices of these queries."""

    @abstractmethod
    def proposal(self, best: Tensor, given: Sequence[Tensor], query: Sequence[Tensor]) -> Tensor:
        """The images of one query, whose part of the plan is `query`. Depends only on these tensors and on the norm,
        because it may be recorded and replayed for other images."""


PAINTERS: Registry[type[Painter]] = Registry("norm of the Square attack")


@PAINTERS.register("linf")
class LinfPainter(Painter):
    """Every pixel at -eps or eps: vertical stripes at the start, then windows with one sign per channel."""

    one_window = True

    def __init__(self, natural: Tensor, eps: float) -> None:
        super().__init__(natural, eps)
        self.given = (natural - eps).clamp(0, 1), (natural + eps).clamp(0, 1)

    def chunk(self) -> int:
        return min(4 * self.width, CHUNK)

    def start(self, draws: Draws) -> Tensor:
        signs = draws.signs(self.channels, 1, self.width, what="stripes", queries=range(1))[0]
        lowest, highest = self.given
        return torch.where(signs > 0, highest, lowest)

    def plan(self, draws: Draws, queries: range) -> tuple[Tensor, ...]:
        """Windows as products of rows [Q,B,C,H,1], 2 or -2 where they paint, and columns [Q,B,1,1,W] of 0 and 1."""
        top, left = self.corners(draws, queries, "window")
        signs = draws.signs(self.channels, 1, 1, what="sign", queries=queries).to(self.natural)
        rows = 2 * signs * self.inside(top, self.height)[:, :, None, :, None]
        return rows, self.inside(left, self.width)[:, :, None, None, :].to(rows.dtype)

    def proposal(self, best: Tensor, given: Sequence[Tensor], query: Sequence[Tensor]) -> Tensor:
        (lowest, highest), (rows, columns) = given, query
        # Moved by 2, a pixel leaves its range on the wanted side, wherever it was, and is clipped to that end.
        return torch.addcmul(best, rows, columns).clamp(lowest, highest)


class BudgetPainter(Painter):
    """The l2 search, for any power p >= 1. The budget is the sum of |delta|^p: that of a first window, of a second one
    which is erased, and what was unused, is spent again on the first, in the shape of two pyramids of opposite sign."""

    power: ClassVar[int]
    decay: ClassVar[int] = 2
    """How fast a pyramid falls off from its tip."""
    _shapes: tuple[Tensor, Tensor]
    """The shape to paint, upright and turned, each [S] and of norm 1."""

    def resize(self, share: float) -> None:
        super().resize(share)
        pattern = opposite_pyramids(self.side, power=self.power, decay=self.decay).to(self.natural)
        pattern = pattern / self._norm(pattern, (0, 1))
        self._shapes = pattern.flatten(), pattern.T.flatten()

    def fit(self, side: float) -> int:
        """Odd, so that a pyramid has a tip, and at least 3, so that there are two of them."""
        return max(round(side), 3) // 2 * 2 + 1

    def chunk(self) -> int:
        return max(1, min(4 * self.height * self.width // self.side**2, CHUNK))

    def start(self, draws: Draws) -> Tensor:
        """A grid of pyramids with random signs that uses all of eps."""
        delta = self.tiled(draws, pyramid)
        return perturb(self.natural, delta * (self.eps / self._norm(delta, (1, 2, 3))))

    def tiled(self, draws: Draws, shape: Callable[[int, int], Tensor]) -> Tensor:
        """A perturbation of square tiles, each of them `shape(height, width)` times a random sign per channel."""
        tile = max(1, min(self.height, self.width) // TILES)
        rows, columns = self.height // tile, self.width // tile
        signs = draws.signs(self.channels, rows, columns, what="tiles", queries=range(1))[0].to(self.natural)
        tiles = torch.kron(signs, shape(tile, tile).to(self.natural)[None, None])
        delta = torch.zeros_like(self.natural)
        top, left = (self.height - rows * tile) // 2, (self.width - columns * tile) // 2
        delta[:, :, top : top + rows * tile, left : left + columns * tile] = tiles
        return delta

    def plan(self, draws: Draws, queries: range) -> tuple[Tensor, ...]:
        """For each query and sample the pixels [Q,B,C,S] of both windows, which of the second lie outside of the
        first [Q,B,1,S], and the shape to paint [Q,B,C,S]; S is the area of a window."""
        first = self.corners(draws, queries, "window")
        second = self.corners(draws, queries, "erased")
        rows, columns = (place.flatten() for place in self._places(first[0].device))
        outside = self._beside(second[0] - first[0], rows) | self._beside(second[1] - first[1], columns)
        upright, lying = self._shapes
        turned = draws.below(2, "turned", queries)[:, :, None, None] == 1
        signs = draws.signs(self.channels, 1, what="sign", queries=queries).to(self.natural)
        pixels = [
            ((top * self.width + left)[:, :, None] + rows * self.width + columns)[:, :, None]
            for top, left in (first, second)
        ]
        shape = (*signs.shape[:3], len(rows))
        return (
            pixels[0].expand(shape),
            pixels[1].expand(shape),
            outside[:, :, None].to(signs.dtype),
            signs * torch.where(turned, lying, upright),
        )

    def proposal(self, best: Tensor, given: Sequence[Tensor], query: Sequence[Tensor]) -> Tensor:
        (natural,) = given
        return perturb(natural, self.repainted(best - natural, query))

    def repainted(self, delta: Tensor, query: Sequence[Tensor]) -> Tensor:
        """The perturbation with one window repainted and another erased; it uses all of eps, until the box clips it."""
        first, second, outside, shape = query
        rows = delta.flatten(2)
        held = rows.gather(2, first)
        size = self._norm(held, 2)
        mixed = torch.addcdiv(shape, held, size.clamp_min(torch.finfo(size.dtype).tiny))
        length = self._norm(mixed, 2)
        # The old content can cancel the new shape, as in windows of one pixel; the new shape then replaces it.
        cancelled = length == 0
        mixed, length = torch.where(cancelled, shape, mixed), length + cancelled
        unused = (self.eps**self.power - self._norm(rows, (1, 2)) ** self.power).clamp_min(0)
        erased = self._norm(rows.gather(2, second) * outside, 2)
        available = size**self.power + erased**self.power + unused / self.channels
        painted = mixed * (available ** (1 / self.power) / length)
        return rows.scatter(2, second, 0).scatter(2, first, painted).reshape(delta.shape)

    def _norm(self, values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(values, self.power, dims, keepdim=True)
        return norm

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and column of each pixel of a window within it."""
        side = torch.arange(self.side, device=device)
        return side.repeat_interleave(self.side), side.repeat(self.side)

    def _beside(self, away: Tensor, place: Tensor) -> Tensor:
        """Whether each row (or column) of a window is outside of another one, from which the window is `away`."""
        moved = away.unsqueeze(-1) + place
        return (moved < 0) | (moved >= self.side)


@PAINTERS.register("l2")
class L2Painter(BudgetPainter):
    power = 2


@PAINTERS.register("l1")
class L1Painter(BudgetPainter):
    """The l1 search of Croce & Hein 2021 ("Mind the box"), with sharper pyramids. A query paints more than eps, and the
    whole is then projected onto ball and box together. That keeps its largest entries: few pixels, moved to their ends.
    """

    power = 1
    decay = 4

    def start(self, draws: Draws) -> Tensor:
        """Tiles of norm 1 each, which together are several times eps, projected."""

        def shape(side: int, _: int) -> Tensor:
            pair = opposite_pyramids(side, power=self.power, decay=self.decay)
            return pair / self._norm(pair, (0, 1))

        return self._projected(self.natural, self.tiled(draws, shape))

    def proposal(self, best: Tensor, given: Sequence[Tensor], query: Sequence[Tensor]) -> Tensor:
        (natural,) = given
        return self._projected(natural, self.repainted(best - natural, query))

    def repainted(self, delta: Tensor, query: Sequence[Tensor]) -> Tensor:
        """Every channel's window gets as many times its share of the budget as there are channels."""
        painted = super().repainted(delta, query).flatten(2)
        first = query[0]
        return painted.scatter(2, first, self.channels * painted.gather(2, first)).reshape(delta.shape)

    def _projected(self, natural: Tensor, delta: Tensor) -> Tensor:
        return perturb(natural, project_to_ball_and_box(natural, delta, self.eps))


def pyramid(height: int, width: int, *, decay: int = 2) -> Tensor:
    """The paper's bump, float64: 1/(n+1)^2 + ... + 1/(d+1)^2 at Chebyshev distance d from the middle; or another power.

    n is half of the height, rounded down; the height is the longer side.
    """
    half = height // 2
    rows = (torch.arange(height) - half).abs()
    columns = (torch.arange(width) - width // 2).abs()
    distance = torch.maximum(rows[:, None], columns[None, :])
    terms = 1 / torch.arange(1, half + 2, dtype=torch.float64) ** decay
    return terms.flip(0).cumsum(0).flip(0)[distance]


def opposite_pyramids(side: int, *, power: int = 2, decay: int = 2) -> Tensor:
    """A square of two bumps side by side, of opposite signs and of length 1 each in the norm of that power, float64."""
    parts = [pyramid(side, side // 2, decay=decay), -pyramid(side, side - side // 2, decay=decay)]
    return torch.cat([part / part.norm(power) if part.numel() else part for part in parts], 1)
