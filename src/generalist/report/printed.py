"""Figures as files for a paper: SVG by our own writer, PDF and PNG from the same shapes through matplotlib."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from generalist.core.errors import GeneralistError
from generalist.core.files import write_bytes, write_text
from generalist.report.drawing import ROLES, Drawing, Path, Text
from generalist.report.html import printable
from generalist.report.svg import MILLIMETRES, file_text

FORMATS = ("svg", "pdf", "png")
_GLYPH = re.compile(r"Glyph (\d+) .*missing from font")
DPI = 300


def check_formats(formats: Sequence[str]) -> None:
    """Refuse an unknown format, and one that needs matplotlib if that is missing, before anything is written."""
    for name in formats:
        if name not in FORMATS:
            raise GeneralistError(f"--formats are {', '.join(FORMATS)}, not {name!r:.40}")
    if set(formats) - {"svg"}:
        _matplotlib()


@dataclass(frozen=True)
class Figures:
    """The files that were written."""

    files: Sequence[FilePath]
    lacking: str
    """Characters that PDF and PNG show as boxes, because their font lacks them."""


def write_figures(drawings: Sequence[Drawing], folder: FilePath, formats: Sequence[str]) -> Figures:
    """Write every drawing in every format."""
    files, lacking = [], set[str]()
    for drawing in drawings:
        for form in formats:
            path = folder / f"{drawing.name}.{form}"
            if form == "svg":
                write_text(path, file_text(drawing))
            else:
                lacking |= _write_printed(path, drawing, form)
            files.append(path)
    return Figures(files, "".join(sorted(lacking)))


def file_name(*parts: str) -> str:
    """A name that is safe on every file system."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(parts)).strip("-.").lower()[:100] or "figure"


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.patheffects
    except ImportError:
        raise GeneralistError(
            "PDF and PNG are drawn by matplotlib: pip install 'generalist-at[report]', or ask for --formats svg"
        ) from None
    return matplotlib


def _write_printed(path: FilePath, drawing: Drawing, form: str) -> set[str]:
    """Write the file; returns the characters that its font lacks."""
    matplotlib = _matplotlib()
    size = (MILLIMETRES * drawing.width / 25.4, MILLIMETRES * drawing.height / 25.4)
    scale = 72 * MILLIMETRES / 25.4  # points per pixel of the drawing
    # Text as selectable outlines; no date inside, so that the same figure gives the same file.
    with matplotlib.rc_context({"pdf.fonttype": 42, "font.family": "sans-serif"}):
        figure = matplotlib.figure.Figure(figsize=size)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, drawing.width)
        axes.set_ylim(drawing.height, 0)
        axes.set_axis_off()
        for order, shape in enumerate(drawing.shapes):
            if isinstance(shape, Text):
                _put_text(axes, shape, scale, order)
            else:
                _put_path(axes, shape, scale, order)
        metadata: dict[str, Any] = {"Title": printable(drawing.title)}
        if form == "pdf":
            metadata |= {"CreationDate": None}
        data = io.BytesIO()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            figure.savefig(data, format=form, dpi=DPI, metadata=metadata)
    write_bytes(path, data.getvalue())
    glyphs = (_GLYPH.match(str(warning.message)) for warning in said)
    return {chr(int(found[1])) for found in glyphs if found}


def _put_path(axes: Any, path: Path, scale: float, order: int) -> None:
    xs, ys = zip(*path.points, strict=True)
    dash = [float(word) * scale for word in path.dash.split()]
    style = (0, dash) if dash else "-"
    width = path.width * scale if path.stroke else 0
    edge = ROLES[path.stroke] if path.stroke else "none"
    if path.closed:
        axes.fill(
            xs, ys, facecolor=ROLES[path.fill] if path.fill else "none", edgecolor=edge, linewidth=width, zorder=order
        )
    else:
        axes.plot(xs, ys, color=edge, linewidth=width, linestyle=style, solid_joinstyle="round", zorder=order)


_ALIGNED = {"start": "left", "middle": "center", "end": "right"}


def _put_text(axes: Any, text: Text, scale: float, order: int) -> None:
    put = axes.text(
        text.x,
        text.y,
        printable(" ".join(text.text.split())),  # a line break in a name does not start a second line
        parse_math=False,  # a dollar in a name stays a dollar
        fontsize=text.size * scale,
        color=ROLES[text.role],
        ha=_ALIGNED[text.anchor],
        va="baseline",
        rotation=90 if text.turned else 0,
        rotation_mode="anchor",
        fontweight="bold" if text.bold else "normal",
        zorder=order,
    )
    if text.halo:
        stroke = _matplotlib().patheffects.withStroke(linewidth=3 * scale, foreground=ROLES["paper"])
        put.set_path_effects([stroke])
