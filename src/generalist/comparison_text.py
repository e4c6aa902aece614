"""A comparison as text: CSV with one figure a line, and wide tables in Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import re

from generalist.compare import Comparison

CSV_FIELDS = (
    "source",
    "name",
    "dataset",
    "model",
    "method",
    "metric",
    "value",
    "low",
    "high",
    "samples",
    "flag",
    "note",
)

NAMES = 5
"""Columns of a wide table that say what a row is; figures follow."""


def heads(comparison: Comparison) -> list[str]:
    return ["", "source", "data", "network", "method", "images", *comparison.columns]


def cells_of(comparison: Comparison) -> list[list[str]]:
    """The rows of a wide table: accuracies in per cent, with the number of the footnote where one is marked."""
    marks = comparison.marks()
    table = []
    for i, row in enumerate(comparison.rows):
        figures = []
        for column in comparison.columns:
            cell = row.cells.get(column)
            mark = f" [{marks[i, column]}]" if (i, column) in marks else ""
            figures.append("" if cell is None else f"{100 * cell.value:.2f}{mark}")
        table.append([row.name, row.source, row.dataset, row.model, row.method, row.images, *figures])
    return table


def to_csv(comparison: Comparison) -> str:
    """One line a figure; accuracies in per cent, with Wilson's 95% interval and the number of images where known."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for row in comparison.rows:
        for column in comparison.columns:
            if (cell := row.cells.get(column)) is None:
                continue
            bounds = ["" if bound is None else f"{100 * bound:.2f}" for bound in (cell.value, cell.low, cell.high)]
            who = [_plain(text) for text in (row.source, row.name, row.dataset, row.model, row.method)]
            writer.writerow([*who, _plain(column), *bounds, cell.samples or "", cell.flag, cell.note])
    return stream.getvalue()


def _plain(text: str) -> str:
    """Spreadsheets take a cell that begins with one of these for a formula."""
    return f"'{text}" if text[:1] in {"=", "+", "-", "@", "\t", "\r"} else text


def to_markdown(comparison: Comparison) -> str:
    columns = heads(comparison)
    lines = [_pipes(columns), _pipes(["---"] * NAMES + ["---:"] * (1 + len(comparison.columns)))]
    lines += [_pipes([_escaped(text) for text in row]) for row in cells_of(comparison)]
    notes = [f"{number}. {_escaped(text)}" for number, text in enumerate(comparison.footnotes(), 1)]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def _pipes(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_<>|~#])", r"\\\1", " ".join(text.split()))


def to_latex(comparison: Comparison) -> str:
    """A tabular with booktabs' rules."""
    columns = " & ".join(_tex(text) for text in heads(comparison))
    lines = [
        rf"\begin{{tabular}}{{{'l' * NAMES}{'r' * (1 + len(comparison.columns))}}}",
        r"\toprule",
        rf"{columns} \\",
        r"\midrule",
    ]
    lines += [" & ".join(_tex(text) for text in row) + r" \\" for row in cells_of(comparison)]
    notes = [f"% [{number}] {' '.join(text.split())}" for number, text in enumerate(comparison.footnotes(), 1)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes]) + "\n"


_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def _tex(text: str) -> str:
    return re.sub(r"[\\~^&%$#_{}]", lambda found: _TEX.get(found[0], "\\" + found[0]), " ".join(text.split()))
