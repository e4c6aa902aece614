"""The other figures: lines over epochs, the simplex of a dial, heat maps, dots by class, intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from generalist.report.axes import LABEL, Scale, extent, frame, number
from generalist.report.drawing import (
    HEAT,
    Drawing,
    Path,
    heat_ink,
    heat_role,
    series_mark,
    series_role,
    text_width,
)
from generalist.report.html import short

T = TypeVar("T")

LONGEST_CLASS = 20
"""The most characters of a class's name beside its marks."""
MOST_SPREAD = 16.0
"""The pixels over which the marks of one class are spread."""
MOST_EDGED = 8
MOST_POINTS = 200
"""The most points of a line: more could not be seen, and would make the page large."""


# -- lines over epochs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    role: str
    width: float = 1.6
    dash: str = ""


def lines(
    name: str, title: str, y_label: str, series: Sequence[Line], marks: Sequence[float], *, alt: str = ""
) -> Drawing:
    """Values over epochs, with a mark on the axis at every redistribution."""
    drawing = Drawing(name, alt or f"{title}: {y_label} by epoch", 360, 250)
    points = [point for line in series for point in line.points]
    x = extent([p[0] for p in points], room=0.0, least=0.5)
    y = extent([p[1] for p in points], room=0.08, least=1e-3)
    # The title also labels y: a small panel has no room for both.
    head = f"{title} ({y_label})" if y_label else title
    entries = [(line.name, line.role, line.dash, line.width) for line in series]
    below = legend(drawing, entries, 46, 35)
    drawing.height += below - 35
    axes = frame(drawing, x, y, x_label="epoch", title=head, whole=True, top=below + 13)
    for epoch in marks:
        at = axes.x(epoch)
        drawing.shapes.append(Path([(at, axes.y.start), (at, axes.y.end)], stroke="mark", width=0.8, dash="1 3"))
    for line in series:
        path = [(axes.x(epoch), axes.y(value)) for epoch, value in thinned(line.points, MOST_POINTS)]
        if len(path) == 1:
            drawing.mark(*path[0], "circle", role=line.role, size=3)
        drawing.shapes.append(Path(path, stroke=line.role, width=line.width, dash=line.dash))
    return drawing


def legend(drawing: Drawing, entries: Sequence[tuple[str, str, str, float]], x: float, y: float) -> float:
    """Names, each beside a sample of its line, in as many rows as needed from y on; returns the last row's baseline."""
    left = x
    for name, role, dash, width in entries:
        needed = 26 + text_width(name, LABEL) + 10
        if x > left and x + needed > drawing.width:
            x, y = left, y + 16
        drawing.shapes.append(Path([(x, y - 4), (x + 18, y - 4)], stroke=role, width=width, dash=dash))
        drawing.text(x + 23, y, name, size=LABEL)
        x += needed
    return y


def thinned(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def mark_legend(drawing: Drawing, entries: Sequence[tuple[str, int]], y: float) -> float:
    """Names beside their marks, in as many rows as needed below y; returns where they end."""
    x = 12.0
    for name, series in entries:
        shown = short(name, 40)
        needed = 14 + text_width(shown, LABEL) + 12
        if x > 12 and x + needed > drawing.width:
            x, y = 12.0, y + 16
        drawing.mark(x, y - 4, series_mark(series), role=series_role(series), size=4.4)
        drawing.text(x + 10, y, shown, size=LABEL)
        x += needed
    return y + 8


# -- the simplex ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corner:
    """A point on a dial of three learners."""

    shares: tuple[float, float, float]
    value: float
    tip: str
    pareto: bool = False


def simplex(name: str, title: str, learners: Sequence[str], points: Sequence[Corner], own: Sequence[float]) -> Drawing:
    """The triangle of shares, each point coloured by its accuracy, from the lowest to the highest of them."""
    drawing = Drawing(name, f"{title} over the shares of {', '.join(learners)}", 340, 352)
    corners = ((170.0, 60.0), (308.0, 272.0), (32.0, 272.0))
    drawing.text(14, 18, title, size=13, role="ink", bold=True)
    drawing.shapes.append(Path(corners, stroke="mark", closed=True))
    low, high = min(p.value for p in points), max(p.value for p in points)
    size = max(3.0, min(11.0, 80 / math.sqrt(len(points))))
    for point in points:
        x, y = _barycentric(corners, point.shares)
        share = (point.value - low) / (high - low) if high > low else 0.5
        drawing.mark(x, y, "circle", role=heat_role(share), size=size, edge="mark", tip=point.tip)
        if point.pareto:
            ring = [(x + (size + 2.4) * math.cos(a), y + (size + 2.4) * math.sin(a)) for a in _ANGLES]
            drawing.shapes.append(Path(ring, stroke="ink", width=1.2, closed=True))
    x, y = _barycentric(corners, own)
    drawing.mark(x, y, "cross", role="c1", size=5, tip="the run's own shares")
    names = [short(learner, 24) for learner in learners]
    drawing.text(corners[0][0], 38, names[0], role="ink", anchor="middle")
    drawing.text(min(corners[1][0], 332 - text_width(names[1], 12) / 2), 303, names[1], role="ink", anchor="middle")
    drawing.text(max(corners[2][0], 8 + text_width(names[2], 12) / 2), 303, names[2], role="ink", anchor="middle")
    _colour_bar(drawing, 95, 326, 150, f"{low:.1f}", f"{high:.1f}")
    return drawing


_ANGLES = [math.tau * i / 24 for i in range(24)]


def _barycentric(corners: Sequence[tuple[float, float]], shares: Sequence[float]) -> tuple[float, float]:
    x = sum(share * corner[0] for share, corner in zip(shares, corners, strict=True))
    return x, sum(share * corner[1] for share, corner in zip(shares, corners, strict=True))


def _colour_bar(drawing: Drawing, x: float, y: float, width: float, low: str, high: str) -> None:
    for i in range(len(HEAT)):
        drawing.box(x + i * width / len(HEAT), y, width / len(HEAT), 9, fill=f"h{i}")
    drawing.shapes.append(Path([(x, y), (x + width, y), (x + width, y + 9), (x, y + 9)], stroke="mark", closed=True))
    drawing.text(x - 6, y + 9, low, size=LABEL, anchor="end")
    drawing.text(x + width + 6, y + 9, high, size=LABEL)


# -- heat maps --------------------------------------------------------------------------------------------------------


def heat_map(name: str, title: str, cells: Mapping[str, Mapping[str, float]], *, x_label: str) -> Drawing:
    """Accuracies from 0 to 1, one row per name and one column per key; the colours mean the same in every map."""
    columns = list(dict.fromkeys(key for row in cells.values() for key in row))
    left, top, cell = 128.0, 50.0, 22.0
    width = left + 44 * len(columns) + 10
    drawing = Drawing(name, f"{title}: accuracy in per cent", width, top + cell * len(cells) + 34)
    drawing.text(4, 17, title, size=13, role="ink", bold=True)
    for j, column in enumerate(columns):
        drawing.text(left + 44 * j + 22, top - 7, column, size=LABEL, anchor="middle")
    for i, (row, values) in enumerate(cells.items()):
        y = top + cell * i
        drawing.text(left - 8, y + 15, short(row, 20), size=LABEL, anchor="end", role="ink")
        for j, column in enumerate(columns):
            if column not in values:
                continue
            value = values[column]
            tip = f"{row}, {x_label} {column}: {100 * value:.1f}%"
            drawing.box(left + 44 * j, y, 43, cell - 1, fill=heat_role(value), tip=tip)
            at = left + 44 * j + 21.5
            drawing.text(at, y + 15, f"{100 * value:.0f}", size=LABEL, role=heat_ink(value), anchor="middle")
    drawing.text(left + 22 * len(columns), drawing.height - 10, x_label, size=12, anchor="middle")
    return drawing


# -- by class ---------------------------------------------------------------------------------------------------------


def dots(
    name: str, title: str, classes: Sequence[str], rows: Sequence[tuple[str, int, Mapping[str, float]]]
) -> Drawing:
    """One line per class, one mark per network: accuracy in percent. Rows are name, series and accuracy by class."""
    shown = [short(label, LONGEST_CLASS) for label in classes]
    left, top = max(48.0, 16 + max(text_width(label, LABEL) for label in shown)), 34.0
    apart = min(3.0, MOST_SPREAD / max(1, len(rows) - 1))  # a class stays one line, however many networks there are
    step = max(19.0, 11.0 + apart * len(rows))
    drawing = Drawing(name, f"{title} by class", 360, top + step * len(classes) + 36)
    height = mark_legend(drawing, [(row, series) for row, series, _ in rows], drawing.height + 14)
    drawing.text(4, 17, title, size=13, role="ink", bold=True)
    x = Scale(0, 100, left, drawing.width - 16)
    bottom = top + step * len(classes)
    for value in x.ticks(5):
        drawing.line(x(value), top - 4, x(value), bottom)
        drawing.text(x(value), bottom + 15, number(value), size=LABEL, anchor="middle")
    for i, label in enumerate(classes):
        y = top + step * i + step / 2
        drawing.text(left - 9, y + 4, shown[i], size=LABEL, anchor="end", role="ink")
        found = [values[label] for _, _, values in rows if label in values]
        if found:
            drawing.line(x(100 * min(found)), y, x(100 * max(found)), y, role="mark")
        for place, (row, series, values) in enumerate(rows):
            if label in values:
                lifted = y + apart * (place - (len(rows) - 1) / 2)
                tip = f"{row}, {label}: {100 * values[label]:.1f}%"
                role, at = series_role(series), x(100 * values[label])
                # With many networks, a light edge would cover the marks behind it.
                size, edge = (4.4, "paper") if len(rows) <= MOST_EDGED else (3.2, role)
                drawing.mark(at, lifted, series_mark(series), role=role, size=size, edge=edge, tip=tip)
    drawing.text((left + drawing.width - 16) / 2, bottom + 30, "accuracy (%)", size=12, anchor="middle")
    drawing.height = height
    return drawing


# -- intervals --------------------------------------------------------------------------------------------------------


def interval(title: str, value: float, low: float | None, high: float | None) -> Drawing:
    """An accuracy from 0 to 1 as a bar, and its interval as a thin line."""
    drawing = Drawing("interval", title, 200, 12, stretched=True)
    drawing.box(0, 4, 200, 4, fill="grid")
    drawing.box(0, 4, 200 * value, 4, fill="c0")
    if low is not None and high is not None:
        drawing.shapes.append(Path([(200 * low, 6), (200 * high, 6)], stroke="ink", width=1.4))
        for end in (low, high):
            drawing.shapes.append(Path([(200 * end, 2), (200 * end, 10)], stroke="ink", width=1.4))
    return drawing
