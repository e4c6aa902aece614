"""A figure as a list of shapes, in pixels from the top left: one description for the page, SVG, PDF and PNG.

Shapes name the role of a colour instead of the colour, so that the page can show them in its light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from unicodedata import east_asian_width

SERIES = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#3f8fc4", "#6b4c9a", "#555555")
"""Can be told apart with any kind of colour blindness (after Okabe and Ito, darkened where thin lines need it)."""

HEAT = (
    "#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838",
)  # fmt: skip
"""From 0 to 1 in tenths: dark blue to yellow, ordered by brightness for any kind of colour vision (cividis)."""

ROLES = {"ink": "#1b1f24", "soft": "#57606a", "grid": "#dfe3e8", "paper": "#ffffff", "mark": "#b3bac2"}
ROLES |= {f"c{number}": colour for number, colour in enumerate(SERIES)}
ROLES |= {f"h{number}": colour for number, colour in enumerate(HEAT)}
ROLES |= {"h-light": "#ffffff", "h-dark": "#111418"}
"""The colours on paper, and in the page's light theme."""

Anchor = Literal["start", "middle", "end"]
Mark = Literal["circle", "square", "triangle", "diamond", "down", "cross"]
MARKS: tuple[Mark, ...] = ("circle", "square", "triangle", "diamond", "down", "cross")


@dataclass(frozen=True)
class Path:
    """A line through points, or the border of an area if `fill` is set."""

    points: Sequence[tuple[float, float]]
    stroke: str | None = "ink"
    width: float = 1.0
    dash: str = ""
    """Lengths of dashes and gaps, as in `4 3`."""
    fill: str | None = None
    closed: bool = False
    tip: str = ""
    """The text shown when the pointer is over it."""
    method: str = ""
    """The method that it belongs to, by which the page hides it."""


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    """The y of the baseline."""
    text: str
    size: float = 12.0
    role: str = "soft"
    anchor: Anchor = "start"
    bold: bool = False
    turned: bool = False
    """Whether it reads from bottom to top."""
    method: str = ""
    halo: bool = False
    """Whether lines below it keep a little distance."""


Shape = Path | Text


@dataclass
class Drawing:
    """A figure: its shapes, and a description in words."""

    name: str
    """The name of its files, without the ending."""
    title: str
    """One line that describes it, for those who cannot see it."""
    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)
    stretched: bool = False
    """Whether the page may change its proportions."""

    def line(self, x1: float, y1: float, x2: float, y2: float, *, role: str = "grid", width: float = 1.0) -> None:
        self.shapes.append(Path([(x1, y1), (x2, y2)], stroke=role, width=width))

    def box(self, x: float, y: float, width: float, height: float, *, fill: str, tip: str = "") -> None:
        corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
        self.shapes.append(Path(corners, stroke=None, fill=fill, closed=True, tip=tip))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12.0,
        role: str = "soft",
        anchor: Anchor = "start",
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        self.shapes.append(Text(x, y, text, size, role, anchor, bold, turned))

    def mark(
        self,
        x: float,
        y: float,
        kind: Mark,
        *,
        role: str,
        size: float = 5.0,
        hollow: bool = False,
        edge: str = "paper",
        tip: str = "",
        method: str = "",
    ) -> None:
        """A point of a scatter plot; `size` is the distance from its centre to its edge."""
        outline = [(x + size * dx, y + size * dy) for dx, dy in _OUTLINES[kind]]
        fill = "paper" if hollow else role
        self.shapes.append(
            Path(outline, stroke=role if hollow else edge, width=1.4, fill=fill, closed=True, tip=tip, method=method)
        )


def _circle() -> list[tuple[float, float]]:
    return [(math.cos(math.tau * i / 20), math.sin(math.tau * i / 20)) for i in range(20)]


_OUTLINES: dict[Mark, list[tuple[float, float]]] = {
    "circle": _circle(),
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0, -1.15), (1.1, 0.85), (-1.1, 0.85)],
    "down": [(0, 1.15), (1.1, -0.85), (-1.1, -0.85)],
    "diamond": [(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)],
    "cross": [
        (-0.35, -1.1), (0.35, -1.1), (0.35, -0.35), (1.1, -0.35), (1.1, 0.35), (0.35, 0.35),
        (0.35, 1.1), (-0.35, 1.1), (-0.35, 0.35), (-1.1, 0.35), (-1.1, -0.35), (-0.35, -0.35),
    ],
}  # fmt: skip


def series_role(number: int) -> str:
    return f"c{number % len(SERIES)}"


def series_mark(number: int) -> Mark:
    """The eight colours in the first shape, then the same colours in the next shape."""
    return MARKS[number // len(SERIES) % len(MARKS)]


def heat_role(share: float) -> str:
    """The colour role for an accuracy from 0 to 1."""
    return f"h{min(len(HEAT) - 1, max(0, int(share * len(HEAT))))}"


def heat_ink(share: float) -> str:
    """The colour role of text that is readable on it."""
    return "h-light" if share < 0.5 else "h-dark"


def text_width(text: str, size: float) -> float:
    """Roughly how wide a text is in the wider of the usual fonts: enough to keep labels apart and inside."""
    return size * sum(map(_letter_width, text))


def _letter_width(letter: str) -> float:
    """In units of the size. Chinese, Japanese and Korean letters fill a square."""
    if letter in "MWmw@%…" or east_asian_width(letter) in "WF":
        return 1.0
    return 0.75 if letter.isupper() else 0.6
