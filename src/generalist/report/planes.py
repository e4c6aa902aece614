"""The trade-off planes: runs with their intervals, their dial curves, and the papers' points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from generalist.report.axes import Axes, Scale, extent, frame
from generalist.report.drawing import Drawing, Path, series_mark, series_role
from generalist.report.html import short
from generalist.report.plots import mark_legend

WIDTH, HEIGHT = 460.0, 380.0
OUTLIER = 0.25
"""As a share of the largest value: lower ones are put at the edge, with their figures, and do not squeeze the rest."""


@dataclass(frozen=True)
class Spot:
    """A network in the plane; accuracies in percent, with their intervals if known."""

    name: str
    method: str
    x: float
    y: float
    x_bounds: tuple[float, float] | None = None
    y_bounds: tuple[float, float] | None = None
    series: int | None = None
    """The run's number; None for a point from a paper."""
    about: str = ""
    """Further text for the tooltip."""


@dataclass(frozen=True)
class Way:
    """A dial curve through the plane."""

    name: str
    method: str
    series: int
    points: Sequence[tuple[float, float, str]]
    """x, y and the text for each point."""
    joined: bool = True
    """Whether the points are joined by a line: with more than two learners they form an area."""


def plane(name: str, title: str, x_label: str, y_label: str, spots: Sequence[Spot], ways: Sequence[Way]) -> Drawing:
    drawing = Drawing(name, title, WIDTH, HEIGHT)
    xs = _percents(
        [(spot.x, *(spot.x_bounds or ())) for spot in spots], [point[0] for way in ways for point in way.points]
    )
    ys = _percents(
        [(spot.y, *(spot.y_bounds or ())) for spot in spots], [point[1] for way in ways for point in way.points]
    )
    axes = frame(drawing, xs, ys, x_label=x_label, y_label=y_label)
    for way in ways:
        _draw_way(axes, way)
    papers = [spot for spot in spots if spot.series is None]
    ours = [spot for spot in spots if spot.series is not None]
    for spot in [*papers, *ours]:
        _draw_spot(axes, spot)
    unnamed = []
    ours.sort(key=lambda spot: not _place(axes, spot.x, spot.y)[2])
    for spot in [*ours, *papers]:  # those at the edge have least room and choose first, the papers' points last
        role = series_role(spot.series) if spot.series is not None else "soft"
        bold = spot.series is not None
        x, y, outside = _place(axes, spot.x, spot.y)
        name = f"{short(spot.name, 30)} ({spot.x:.1f}, {spot.y:.1f})" if outside else short(spot.name, 40)
        if not axes.label(x, y, name, role=role, method=spot.method, bold=bold) and spot.series is not None:
            unnamed.append((spot.name, spot.series))
    if unnamed:
        drawing.height = mark_legend(drawing, unnamed, drawing.height + 14)
    return drawing


def _percents(networks: Sequence[tuple[float, ...]], dials: Sequence[float]) -> Scale:
    """A range within 0 to 100, a little wider than the values and the ends of their bars, outliers excepted.

    Outliers are judged among networks only: a dial lies higher, and must not push its own network out of the plane.
    """
    least = OUTLIER * max([entry[0] for entry in networks] or dials)
    shown = [value for entry in networks if entry[0] >= least for value in entry]
    wide = extent([*shown, *(value for value in dials if value >= least)], room=0.06, least=1.0)
    return Scale(max(-2.0, wide.low), min(102.0, wide.high), 0, 1)


def _place(axes: Axes, x: float, y: float) -> tuple[float, float, bool]:
    """The pixels of a point, moved to the edge if it lies outside, and whether it does."""
    inside = min(max(x, axes.x.low), axes.x.high), min(max(y, axes.y.low), axes.y.high)
    return axes.x(inside[0]), axes.y(inside[1]), inside != (x, y)


def _draw_way(axes: Axes, way: Way) -> None:
    role = series_role(way.series)
    at = [_place(axes, x, y) for x, y, _ in way.points]
    if way.joined:
        line = [(x, y) for x, y, _ in at]
        axes.drawing.shapes.append(Path(line, stroke=role, width=1.4, dash="4 3", method=way.method))
    for (x, y, outside), (own_x, own_y, gammas) in zip(at, way.points, strict=True):
        tip = f"{way.name}\n{gammas}\n{own_x:.2f}, {own_y:.2f}"
        axes.drawing.mark(x, y, "circle", role=role, size=2.6, hollow=outside, tip=tip, method=way.method)
        axes.keep_clear(x, y, 3.5)


def _draw_spot(axes: Axes, spot: Spot) -> None:
    x, y, outside = _place(axes, spot.x, spot.y)
    tip = f"{spot.name}\n{spot.about}".strip()
    axes.keep_clear(x, y)
    axes.points.append((x, y))
    if spot.series is None:
        axes.drawing.mark(x, y, "diamond", role="soft", size=3.8, hollow=True, tip=tip, method=spot.method)
        return
    role = series_role(spot.series)
    if spot.x_bounds and not outside:
        _bar(axes, [(end, spot.y) for end in spot.x_bounds], role, spot.method)
    if spot.y_bounds and not outside:
        _bar(axes, [(spot.x, end) for end in spot.y_bounds], role, spot.method)
    axes.drawing.mark(x, y, series_mark(spot.series), role=role, size=5.5, hollow=outside, tip=tip, method=spot.method)


def _bar(axes: Axes, ends: Sequence[tuple[float, float]], role: str, method: str) -> None:
    points = [_place(axes, x, y)[:2] for x, y in ends]
    axes.drawing.shapes.append(Path(points, stroke=role, width=1.2, method=method))
