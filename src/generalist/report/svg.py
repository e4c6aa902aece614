"""Drawings as SVG: with classes that the page's themes colour, or as a file in the colours for paper."""

from __future__ import annotations

from generalist.report.drawing import ROLES, Drawing, Path, Shape, Text
from generalist.report.html import Html, tag

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MILLIMETRES = 0.19
"""The size of a pixel in print: the widest figures fill a column of a paper, and all text has 6 to 7 points."""


def inline(drawing: Drawing, *, decorative: bool = False) -> Html:
    """For the page, coloured by class: an image with its title as alternative text, or hidden if only decorative."""
    shapes = [_shape(shape, themed=True) for shape in drawing.shapes]
    view = f"0 0 {_short(drawing.width)} {_short(drawing.height)}"
    width, height = _short(drawing.width), _short(drawing.height)
    return tag(
        "svg",
        *shapes,
        viewBox=view,
        width=width,
        height=height,
        preserveAspectRatio="none" if drawing.stretched else None,
        role=None if decorative else "img",
        aria_label=None if decorative else drawing.title,
        aria_hidden="true" if decorative else None,
        class_="figure",
    )


def file_text(drawing: Drawing) -> str:
    """The text of a file of its own, sized for a paper."""
    shapes = [_shape(shape, themed=False) for shape in drawing.shapes]
    whole = tag(
        "svg",
        tag("title", drawing.title),
        tag("rect", width="100%", height="100%", fill=ROLES["paper"]),
        *shapes,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_short(drawing.width)} {_short(drawing.height)}",
        width=f"{MILLIMETRES * drawing.width:.2f}mm",
        height=f"{MILLIMETRES * drawing.height:.2f}mm",
        font_family=FONT,
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{whole}\n'


def _shape(shape: Shape, *, themed: bool) -> Html:
    return _text(shape, themed=themed) if isinstance(shape, Text) else _path(shape, themed=themed)


def _path(path: Path, *, themed: bool) -> Html:
    points = " ".join(f"{_short(x)},{_short(y)}" for x, y in path.points)
    attributes: dict[str, str | float | None] = {"points": points}
    if themed:
        classes = [f"s-{path.stroke}"] if path.stroke else []
        classes.append(f"f-{path.fill}" if path.fill else "f-none")
        attributes["class_"] = " ".join(classes)
        attributes["data_tip"] = path.tip or None
        attributes["data_method"] = path.method or None
    else:
        attributes["stroke"] = ROLES[path.stroke] if path.stroke else None
        attributes["fill"] = ROLES[path.fill] if path.fill else "none"
    if path.stroke:
        attributes["stroke_width"] = _short(path.width)
        attributes["stroke_dasharray"] = path.dash or None
        attributes["stroke_linejoin"] = "round"
    return tag("polygon" if path.closed else "polyline", **attributes)


def _text(text: Text, *, themed: bool) -> Html:
    x, y = _short(text.x), _short(text.y)
    attributes: dict[str, str | float | None] = {"x": x, "y": y, "font_size": _short(text.size)}
    attributes["text_anchor"] = text.anchor if text.anchor != "start" else None
    attributes["font_weight"] = "600" if text.bold else None
    attributes["transform"] = f"rotate(-90 {x} {y})" if text.turned else None
    if text.halo:
        attributes |= {"paint_order": "stroke", "stroke_width": "3", "stroke_linejoin": "round"}
    if themed:
        attributes["class_"] = f"f-{text.role}" + (" s-paper" if text.halo else "")
        attributes["data_method"] = text.method or None
    else:
        attributes["fill"] = ROLES[text.role]
        attributes["stroke"] = ROLES["paper"] if text.halo else None
    return tag("text", text.text, **attributes)


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
