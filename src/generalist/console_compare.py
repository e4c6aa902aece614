"""The output of `generalist compare`: a table as wide as the terminal allows, and its footnotes."""

from __future__ import annotations

import textwrap

from rich.markup import escape
from rich.table import Table

from generalist.compare import Comparison
from generalist.comparison_rows import parts_of
from generalist.comparison_text import NAMES, cells_of, heads
from generalist.console import console, print_table, width_of


def show_comparison(comparison: Comparison) -> None:
    """One row per run; if that is too wide and the transpose is not, one column per run."""
    table = _row_a_run(comparison)
    if width_of(table) > console.width and width_of(turned := _column_a_run(comparison)) <= console.width:
        table = turned
    print_table(table)
    for number, text in enumerate(comparison.footnotes(), 1):
        console.print(escape(f"[{number}] {text}"), soft_wrap=True)
    for text in comparison.remarks():
        console.print(escape(text), soft_wrap=True)


def _row_a_run(comparison: Comparison) -> Table:
    table = Table(*(escape("\n".join(parts_of(head)).strip()) for head in heads(comparison)))  # attack above threat
    table.columns[1].no_wrap = True
    for column in table.columns[NAMES:]:
        column.justify = "right"
    for row in cells_of(comparison):
        table.add_row(*(escape(text) for text in row))
    return table


def _column_a_run(comparison: Comparison) -> Table:
    """The transposed table, for a narrow terminal: names are broken at their hyphens, figures never."""
    names, rows = heads(comparison), cells_of(comparison)
    room = (console.width - max(map(len, names)) - 4) // len(rows) - 3
    table = Table("")
    for row in rows:
        table.add_column(_broken(row[0], room), justify="right", no_wrap=True)
    for number, name in enumerate(names[1:], 1):
        table.add_row(escape(" ".join(parts_of(name)).strip()), *(_broken(row[number], room) for row in rows))
    return table


def _broken(text: str, width: int) -> str:
    return escape(textwrap.fill(text, max(width, 6)))
