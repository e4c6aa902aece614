"""Axes of a plot: round ticks, the frame with its grid, and labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from generalist.report.drawing import Anchor, Drawing, Path, Text, text_width

LABEL = 11.0
"""Size of small text, in pixels."""
NEAR = 9.0
"""Labels within this many pixels of a point are read as its label."""


@dataclass(frozen=True)
class Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """At most `most` round values within the range."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def extent(values: Sequence[float], *, room: float = 0.08, least: float = 1e-9) -> Scale:
    """The range of the values with some room around them, not yet mapped to pixels."""
    low, high = min(values), max(values)
    margin = max((high - low) * room, least, 1e-9 * max(abs(low), abs(high)))  # else rounding would make it vanish
    return Scale(low - margin, high + margin, 0, 1)


@dataclass
class Axes:
    """A plot's frame on a drawing, and the boxes that labels must not cover."""

    drawing: Drawing
    x: Scale
    y: Scale
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)
    points: list[tuple[float, float]] = field(default_factory=list)

    def label(self, x: float, y: float, text: str, *, role: str, method: str = "", bold: bool = False) -> bool:
        """Put a text beside a point, on the first side that has room; returns whether any had."""
        width, height = text_width(text, LABEL), LABEL
        for distance in (8, 20, 34):
            for dx, dy, anchor in _sides(distance):
                left = x + dx - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
                box = (left, y + dy - height, left + width, y + dy + 2)
                if not self._inside(box) or self._crowded(box, (x, y)):
                    continue
                self.taken.append(box)
                if distance > 8:  # far from its point, so a thin line connects them
                    end = (x + dx, y + dy + (3 if dy < 0 else -height))
                    self.drawing.shapes.append(Path([(x, y), end], stroke=role, width=0.6, method=method))
                self.drawing.shapes.append(
                    Text(x + dx, y + dy, text, LABEL, role, anchor, bold, method=method, halo=True)
                )
                return True
        return False

    def keep_clear(self, x: float, y: float, size: float = 6.0) -> None:
        self.taken.append((x - size, y - size, x + size, y + size))

    def _crowded(self, box: tuple[float, float, float, float], own: tuple[float, float]) -> bool:
        """Whether a label there would cover something, or be read as the label of another point."""
        wide = (box[0] - NEAR, box[1] - NEAR, box[2] + NEAR, box[3] + NEAR)
        others = [point for point in self.points if point != own]
        if any(wide[0] < x < wide[2] and wide[1] < y < wide[3] for x, y in others):
            return True
        return any(_overlap(box, other) for other in self.taken)

    def _inside(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        return left >= self.x.start and right <= self.x.end and top >= self.y.end and bottom <= self.y.start


def _sides(distance: float) -> list[tuple[float, float, Anchor]]:
    """Where a label may start, end or be centred; positions clear of the error bars come first."""
    far = distance + 7
    return [
        (distance, -distance, "start"),
        (distance, far, "start"),
        (-distance, -distance, "end"),
        (-distance, far, "end"),
        (distance + 2, 4, "start"),
        (-distance - 2, 4, "end"),
        (0, -distance - 2, "middle"),
        (0, far + 3, "middle"),
    ]


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def frame(
    drawing: Drawing,
    x: Scale,
    y: Scale,
    *,
    x_label: str,
    y_label: str = "",
    title: str = "",
    whole: bool = False,
    top: float = 12.0,
    ticked: bool = True,
) -> Axes:
    """Grid, ticks and labels. `whole`: x has ticks at whole numbers only; `ticked`: whether x has ticks at all."""
    left, right, bottom = 46.0 + (10 if y_label else 0), drawing.width - 14, drawing.height - 42
    x, y = Scale(x.low, x.high, left, right), Scale(y.low, y.high, bottom, top)
    if title:
        drawing.text(left, 17, title, size=13, role="ink", bold=True)
    for value in y.ticks():
        drawing.line(left, y(value), right, y(value))
        drawing.text(left - 7, y(value) + 4, number(value), size=LABEL, anchor="end")
    for value in x.ticks() if ticked else []:
        if whole and value != round(value):
            continue
        drawing.line(x(value), bottom, x(value), bottom + 4, role="mark")
        drawing.text(x(value), bottom + 17, number(value), size=LABEL, anchor="middle")
    drawing.line(left, bottom, right, bottom, role="mark")
    drawing.text((left + right) / 2, drawing.height - 7, x_label, size=12, anchor="middle")
    if y_label:
        drawing.text(12, (top + bottom) / 2, y_label, size=12, anchor="middle", turned=True)
    return Axes(drawing, x, y)


def number(value: float) -> str:
    """In short form: 12, 0.5, 1.2e+06."""
    return f"{value:.4g}"
