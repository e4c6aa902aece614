"""A comparison as text: CSV with one figure per line, and wide tables in Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import re

from generalist.compare import Comparison
from generalist.comparison_rows import PLUS_MINUS, Cell

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
    "runs",
    "deviation",
    "flag",
    "note",
)

NAMES = 5
"""The number of columns of a wide table that identify a row; figures follow."""


def heads(comparison: Comparison) -> list[str]:
    return ["", "source", "data", "network", "method", "images", *comparison.columns]


def cells_of(comparison: Comparison) -> list[list[str]]:
    """The rows of a wide table: accuracies in percent, with the number of the footnote if a figure has one."""
    marks = comparison.marks()
    table = []
    for i, row in enumerate(comparison.rows):
        figures = []
        for column in comparison.columns:
            cell = row.cells.get(column)
            mark = f" [{marks[i, column]}]" if (i, column) in marks else ""
            figures.append("" if cell is None else f"{_figure(cell)}{mark}")
        table.append([row.name, row.source, row.dataset, row.model, row.method, row.images, *figures])
    return table


def _figure(cell: Cell) -> str:
    mean = f"{100 * cell.value:.2f}"
    return mean if cell.deviation is None else f"{mean} {PLUS_MINUS} {100 * cell.deviation:.2f}"


def to_csv(comparison: Comparison) -> str:
    """One line per figure: accuracies in percent, with Wilson's 95% interval and the number of images if known."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for row in comparison.rows:
        shown = {column: row.cells[column] for column in comparison.columns if column in row.cells}
        for column, cell in {**shown, **row.details}.items():
            bounds = [_percent(bound) for bound in (cell.value, cell.low, cell.high)]
            who = [_plain(text) for text in (row.source, row.name, row.dataset, row.model, row.method)]
            counts = [cell.samples or "", cell.runs or "", _percent(cell.deviation)]
            writer.writerow([*who, _plain(column), *bounds, *counts, cell.flag, printable(cell.note)])
    return stream.getvalue()


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"


def _plain(text: str) -> str:
    """The text, quoted where a spreadsheet would take it for a formula."""
    text = printable(text)
    return f"'{text}" if text[:1] in {"=", "+", "-", "@", "\t", "\r"} else text


def to_markdown(comparison: Comparison) -> str:
    columns = heads(comparison)
    lines = [
        _pipes([_escaped(column) for column in columns]),
        _pipes(["---"] * NAMES + ["---:"] * (1 + len(comparison.columns))),
    ]
    lines += [_pipes([_escaped(text) for text in row]) for row in cells_of(comparison)]
    notes = [f"{number}. {_escaped(text)}" for number, text in enumerate(comparison.footnotes(), 1)]
    blocks = [lines, notes, *([_escaped(text)] for text in [*comparison.cautions(), *comparison.lacking])]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _pipes(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    """Text without Markdown's markup: a name must not become a link or a picture."""
    return re.sub(r"([\\`*_<>|~#&]|\](?=[(\[:]))", r"\\\1", printable(text))


def printable(text: str) -> str:
    """The text on one line, with unprintable characters replaced."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split()))


def to_latex(comparison: Comparison) -> str:
    """A tabular with booktabs' rules, and its footnotes as small text below it."""
    columns = " & ".join(_tex(text) for text in heads(comparison))
    lines = [
        rf"\begin{{tabular}}{{{'l' * NAMES}{'r' * (1 + len(comparison.columns))}}}",
        r"\toprule",
        rf"{columns} \\",
        r"\midrule",
    ]
    lines += [_no_option(" & ".join(_tex(text) for text in row)) + r" \\" for row in cells_of(comparison)]
    notes = [rf"[{number}] {_tex(text)}\par" for number, text in enumerate(comparison.footnotes(), 1)]
    below = [r"\par\smallskip", r"{\footnotesize\raggedright", *notes, "}"] if notes else []
    # For the authors who include the table, not for the readers of the document.
    said = [f"% {printable(text)}" for text in [*comparison.cautions(), *comparison.lacking]]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *below, *said]) + "\n"


def _no_option(row: str) -> str:
    """Protect a row that begins with a bracket or star, which LaTeX would take for an option of the command before."""
    return f"{{}}{row}" if row.startswith(("[", "*")) else row


_TEX = {PLUS_MINUS: r"$\pm$", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def _tex(text: str) -> str:
    special = rf"[\\~^&%$#_{{}}{PLUS_MINUS}]"
    return re.sub(special, lambda found: _TEX.get(found[0], "\\" + found[0]), printable(text))


WRITERS = {"csv": to_csv, "markdown": to_markdown, "latex": to_latex}
