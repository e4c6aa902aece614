"""The trade-off planes: runs with their intervals, their dial curves, and the papers' points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from generalist.report.axes import Axes, Scale, extent, frame
from generalist.report.drawing import Drawing, Path, series_mark, series_role

WIDTH, HEIGHT = 520.0, 400.0


@dataclass(frozen=True)
class Spot:
    """A network in the plane; accuracies in per cent, with their intervals where known."""

    name: str
    method: str
    x: float
    y: float
    x_bounds: tuple[float, float] | None = None
    y_bounds: tuple[float, float] | None = None
    series: int | None = None
    """The run's number; None for a paper's point."""
    about: str = ""
    """More for the hover."""


@dataclass(frozen=True)
class Way:
    """A dial curve through the plane."""

    name: str
    method: str
    series: int
    points: Sequence[tuple[float, float, str]]
    """x, y and what is said of the point."""
    joined: bool = True
    """Whether it is a line: with more than two learners it is an area."""


def plane(name: str, title: str, x_label: str, y_label: str, spots: Sequence[Spot], ways: Sequence[Way]) -> Drawing:
    drawing = Drawing(name, title, WIDTH, HEIGHT)
    xs = [v for s in spots for v in (s.x, *(s.x_bounds or ()))] + [p[0] for way in ways for p in way.points]
    ys = [v for s in spots for v in (s.y, *(s.y_bounds or ()))] + [p[1] for way in ways for p in way.points]
    axes = frame(drawing, _percents(xs), _percents(ys), x_label=x_label, y_label=y_label)
    for way in ways:
        _draw_way(axes, way)
    papers = [spot for spot in spots if spot.series is None]
    ours = [spot for spot in spots if spot.series is not None]
    for spot in [*papers, *ours]:
        _draw_spot(axes, spot)
    for spot in [*ours, *papers]:  # ours choose their places first
        role = series_role(spot.series) if spot.series is not None else "soft"
        axes.label(
            axes.x(spot.x), axes.y(spot.y), spot.name[:40], role=role, method=spot.method, bold=spot.series is not None
        )
    return drawing


def _percents(values: Sequence[float]) -> Scale:
    """A range within 0 to 100, a little wider than the values."""
    wide = extent(values, room=0.1, least=1.0)
    return Scale(max(-2.0, wide.low), min(102.0, wide.high), 0, 1)


def _draw_way(axes: Axes, way: Way) -> None:
    role = series_role(way.series)
    at = [(axes.x(x), axes.y(y)) for x, y, _ in way.points]
    if way.joined:
        axes.drawing.shapes.append(Path(at, stroke=role, width=1.4, dash="4 3", method=way.method))
    for (x, y), (_, _, tip) in zip(at, way.points, strict=True):
        axes.drawing.mark(x, y, "circle", role=role, size=2.6, tip=tip, method=way.method)
        axes.keep_clear(x, y, 3.5)


def _draw_spot(axes: Axes, spot: Spot) -> None:
    x, y = axes.x(spot.x), axes.y(spot.y)
    tip = f"{spot.name}\n{spot.about}".strip()
    axes.keep_clear(x, y)
    if spot.series is None:
        axes.drawing.mark(x, y, "diamond", role="soft", size=3.8, hollow=True, tip=tip, method=spot.method)
        return
    role = series_role(spot.series)
    if spot.x_bounds:
        _bar(axes, [(end, spot.y) for end in spot.x_bounds], role, spot.method)
    if spot.y_bounds:
        _bar(axes, [(spot.x, end) for end in spot.y_bounds], role, spot.method)
    axes.drawing.mark(x, y, series_mark(spot.series), role=role, size=5.5, tip=tip, method=spot.method)


def _bar(axes: Axes, ends: Sequence[tuple[float, float]], role: str, method: str) -> None:
    points = [(axes.x(x), axes.y(y)) for x, y in ends]
    axes.drawing.shapes.append(Path(points, stroke=role, width=1.2, method=method))
