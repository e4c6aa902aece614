"""The command `generalist compare`."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from generalist.compare import Comparison, parts_of
from generalist.compare import compare as compare_runs
from generalist.comparison_text import NAMES, cells_of, heads, to_csv, to_latex, to_markdown
from generalist.console import console, print_table, print_version, width_of
from generalist.core.errors import GeneralistError

Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]

WRITERS = {"csv": to_csv, "markdown": to_markdown, "latex": to_latex}


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories that were evaluated.", metavar="RUN")],
    paper: Annotated[
        bool, typer.Option("--paper", help="Show the papers' figures for the same data, network and method, too.")
    ] = False,
    seeds: Annotated[
        bool, typer.Option("--seeds", help="Runs that differ in the seed alone as one row: mean and deviation.")
    ] = False,
    form: Annotated[str, typer.Option("--format", help="table, csv, markdown or latex.")] = "table",
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow import paths in the recipes, which run code.")
    ] = False,
    version: Version = False,
) -> None:
    """Put evaluated runs side by side, and beside the papers.

    Example: generalist compare runs/mine runs/baseline-cifar10-resnet18-msd --paper --format markdown
    """
    if form != "table" and form not in WRITERS:
        raise GeneralistError(f"--format is table, {', '.join(WRITERS)}, not {form!r}")
    comparison = compare_runs(runs, paper=paper, seeds=seeds, trust_code=trust_code)
    if form == "table":
        _show(comparison)
    else:
        sys.stdout.write(WRITERS[form](comparison))


def _show(comparison: Comparison) -> None:
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
    """The same on its side, for a narrow terminal: names are broken at their hyphens, figures never."""
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
