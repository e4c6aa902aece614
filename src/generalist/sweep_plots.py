"""A sweep's trials as curves: each objective over the first field, with a line for every combination of the others.

`train.seed` makes no lines of its own: points are means over seeds, with a bar from the lowest to the highest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from generalist.core.errors import SweepError
from generalist.report.axes import LABEL, Axes, Scale, extent, frame
from generalist.report.drawing import Drawing, Path, Text, series_mark, series_role
from generalist.report.html import short
from generalist.report.plots import legend
from generalist.sweep.definition import Sweep
from generalist.sweep.options import SearchOptions
from generalist.sweep.results import shown_choice
from generalist.sweep.trials import Row

SEED = "train.seed"
MOST_LINES = 8
"""As many as there are colours."""
WIDTH, HEIGHT = 360.0, 270.0

Points = dict[str, dict[float, list[float]]]
"""By the line's name and the position on the x axis, one value per seed."""


def fields_of(sweep: Sweep) -> tuple[str, list[str]]:
    """The field of the x axis, and those that make lines; fields drawn from a range only spread the points."""
    search = sweep.options.search
    axis, *others = [key for key in search if key != SEED] or [SEED]
    return axis, [key for key in others if search[key].choices() is not None]


def check_drawable(sweep: Sweep) -> None:
    """Refuse a picture with more lines than can be told apart, before hours of trials instead of after them."""
    lines = math.prod(len(sweep.options.search[key].choices() or []) for key in fields_of(sweep)[1])
    if lines > MOST_LINES:
        raise SweepError(
            f"--svg: {lines} lines cannot be told apart; there is room for {MOST_LINES}, --csv has them all"
        )


def picture(sweep: Sweep, rows: Sequence[Row]) -> Drawing:
    """A panel for each objective, side by side."""
    check_drawable(sweep)
    complete = [row for row in rows if row.values]
    if not complete:
        raise SweepError("--svg: no trial is complete, there is nothing to draw")
    axis, others = fields_of(sweep)
    space = sweep.options.search[axis]
    texts = space.choices() if space.low is None else None  # a range has numbers, with or without steps
    labels = None if texts is None else short_labels([shown(text) for text in texts])
    panels = []
    for i, objective in enumerate(sweep.options.objectives):
        points: Points = {}
        for row in complete:
            assert row.values is not None
            at = float(row.choice[axis]) if texts is None else float(texts.index(row.choice[axis]))
            points.setdefault(_line_of(sweep, row, others), {}).setdefault(at, []).append(row.values[i])
        panels.append(_panel(sweep.name, objective.value, axis, points, labels, space))
    return beside(sweep.name, panels)


def shown(text: Any) -> Any:
    """A choice as it was written: its text, or the number or list that it stands for."""
    try:
        return json.loads(str(text))
    except ValueError:
        return str(text)


def short_labels(values: Sequence[Any]) -> list[str]:
    """Texts for an axis; for lists that differ in only one place, just that place."""
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) == len(values) > 1 and len({len(value) for value in lists}) == 1:
        places = [i for i, entries in enumerate(zip(*lists, strict=True)) if any(e != entries[0] for e in entries)]
        if len(places) == 1:
            return [str(value[places[0]]) for value in lists]
    return [short(str(value), 12) for value in values]


def _line_of(sweep: Sweep, row: Row, others: Sequence[str]) -> str:
    texts = shown_choice(sweep, row, digits=3)
    return ", ".join(f"{key.split('.')[-1] if len(others) == 1 else key} {texts[key]}" for key in others)


def _panel(
    name: str, objective: str, axis: str, points: Points, labels: Sequence[str] | None, space: SearchOptions
) -> Drawing:
    drawing = Drawing(name, f"{objective} by {axis}", WIDTH, HEIGHT)
    order = {line: i for i, line in enumerate(points)}
    below = 22.0
    if any(points):  # else there is one line, and nothing to tell apart
        entries = [(short(line, 40), series_role(i), "", 1.6) for line, i in order.items() if line]
        below = legend(drawing, entries, 46, 35)
        drawing.height += below - 22
    values = [value for by_place in points.values() for found in by_place.values() for value in found]
    places = [place for by_place in points.values() for place in by_place]
    x = extent(places, room=0.05, least=0.25) if labels is None else Scale(-0.4, len(labels) - 0.6, 0, 1)
    y = extent(values, room=0.08, least=1e-3)
    axes = frame(drawing, x, y, x_label=axis, title=objective, top=below + 13, ticked=labels is None)
    if labels is not None:
        _name_places(axes, labels)
    several = any(len(found) > 1 for by_place in points.values() for found in by_place.values())
    for line, by_place in points.items():
        # Bars at the same position are drawn side by side.
        aside = 5.0 * (order[line] - (len(points) - 1) / 2) if several else 0.0
        connected = labels is not None and space.variants is None
        _draw_line(axes, line, order[line], by_place, labels, connected=connected, aside=aside)
    return drawing


def _name_places(axes: Axes, labels: Sequence[str]) -> None:
    for place, label in enumerate(labels):
        at = axes.x(place)
        axes.drawing.line(at, axes.y.start, at, axes.y.start + 4, role="mark")
        axes.drawing.text(at, axes.y.start + 17, label, size=LABEL, anchor="middle")


def _draw_line(
    axes: Axes,
    line: str,
    series: int,
    by_place: Mapping[float, Sequence[float]],
    labels: Sequence[str] | None,
    *,
    connected: bool,
    aside: float,
) -> None:
    """Means with a bar over the seeds. Values drawn at random, and variants, which have no order, are not connected."""
    role, drawing = series_role(series), axes.drawing
    means = [(place, sum(found) / len(found)) for place, found in sorted(by_place.items())]
    path = [(axes.x(place) + aside, axes.y(mean)) for place, mean in means]
    if connected:
        drawing.shapes.append(Path(path, stroke=role, width=1.6))
    for (place, mean), (at, y) in zip(means, path, strict=True):
        found = by_place[place]
        if len(found) > 1:
            drawing.line(at, axes.y(min(found)), at, axes.y(max(found)), role=role, width=1.2)
        where = f"{place:.4g}" if labels is None else labels[int(place)]
        tip = ", ".join(part for part in (line, where, f"{mean:.4f}") if part)
        drawing.mark(at, y, series_mark(series), role=role, size=3.6, tip=tip)


def beside(name: str, panels: Sequence[Drawing]) -> Drawing:
    """Join drawings from left to right."""
    whole = Drawing(name, "; ".join(panel.title for panel in panels), 0, max(panel.height for panel in panels))
    for panel in panels:
        right = whole.width
        for shape in panel.shapes:
            if isinstance(shape, Text):
                whole.shapes.append(replace(shape, x=shape.x + right))
            else:
                whole.shapes.append(replace(shape, points=[(x + right, y) for x, y in shape.points]))
        whole.width += panel.width
    return whole
