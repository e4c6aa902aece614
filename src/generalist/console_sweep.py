"""The output of `generalist sweep`: the trials, the best of them or the Pareto front, and the shipped sweeps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from generalist.console import console, print_table, width_of
from generalist.sweep.definition import Sweep, load_sweep, shipped_sweeps
from generalist.sweep.results import directions_of, front, ranked, shown_choice
from generalist.sweep.trials import Row

LONGEST = 20
"""The most characters in a line of a value, in a narrow table."""


def show_sweep(sweep: Sweep, rows: Sequence[Row], folder: Path) -> None:
    """The table, the best trials in it, and where the runs are."""
    winners = front(rows, directions_of(sweep))
    print_table(_fitting_table(sweep, rows, winners))
    for row in rows:
        if row.error:
            console.print(f"trial {row.number} failed: {escape(row.error)}", soft_wrap=True)
    _say_winners(sweep, winners, folder)


def _fitting_table(sweep: Sweep, rows: Sequence[Row], winners: Sequence[Row]) -> Table:
    """The whole table; if that is too wide, a narrow one with as many of the measures as fit."""
    measures = list(sweep.options.measures)
    table = _table(sweep, rows, winners, measures, narrow=False)
    for count in range(len(measures), -1, -1):
        if width_of(table) <= console.width:
            break
        table = _table(sweep, rows, winners, measures[:count], narrow=True)
    return table


def _table(
    sweep: Sweep, rows: Sequence[Row], winners: Sequence[Row], measures: Sequence[str], *, narrow: bool
) -> Table:
    """One line per trial. `narrow`: without a frame, with long names and values broken into several lines."""
    options = sweep.options
    title = f"{sweep.name}: {_states(rows)} of {options.total} trials"
    table = Table(title=escape(title), title_justify="left", min_width=len(title))
    if narrow:
        table.box, table.padding, table.pad_edge = None, (0, 1, 0, 0), False
    if left := [name for name in options.measures if name not in measures]:
        table.caption, table.caption_justify = f"no room for {escape(', '.join(left))}: see --csv", "left"
    table.add_column("trial", justify="right")
    table.add_column("state")
    for name in options.search:
        table.add_column(_header(name, narrow), justify="right", max_width=LONGEST if narrow else None)
    for name in [*(objective.value for objective in options.objectives), *measures]:
        table.add_column(_header(name, narrow), justify="right")
    table.add_column("epoch", justify="right")
    for row in ranked(rows, sweep):
        table.add_row(*_cells(sweep, row, measures, winner=row in winners))
    return table


def _header(name: str, narrow: bool) -> str:
    """A column's name. `narrow`: broken after dots and spaces into lines of about ten characters."""
    lines = [""]
    for part in re.findall(r"[^. ]*[. ]|[^. ]+", name) if narrow else [name]:
        if len(lines[-1] + part.rstrip()) > 10 and lines[-1]:
            lines.append("")
        lines[-1] += part
    return escape("\n".join(line.rstrip() for line in lines))


def _states(rows: Sequence[Row]) -> str:
    counts: Counter[str] = Counter(row.state for row in rows)
    order = ("complete", "pruned", "failed", "running", "waiting")
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state]) or "none begun"


def _cells(sweep: Sweep, row: Row, names: Sequence[str], *, winner: bool) -> list[str]:
    options = sweep.options
    choice = shown_choice(sweep, row)
    values = [f"{value:.4f}" for value in row.values] if row.values else [""] * len(options.objectives)
    measures = [f"{row.measures[name]:.4g}" if name in row.measures else "" for name in names]
    state = f"{row.state} *" if winner else row.state
    cells = [str(row.number), state, *(choice.get(key, "") for key in options.search), *values, *measures]
    return [escape(cell) for cell in [*cells, "" if row.epoch is None else str(row.epoch)]]


def _say_winners(sweep: Sweep, winners: Sequence[Row], folder: Path) -> None:
    if not winners:
        console.print("no trial is complete yet")
    elif len(sweep.options.objectives) > 1:
        numbers = ", ".join(str(row.number) for row in winners)
        where = escape(str(folder / "trials"))
        console.print(f"* the Pareto front, beaten by no other trial: {numbers}; runs in {where}", soft_wrap=True)
    else:
        best = winners[0]
        where = escape(str(folder / "trials" / f"{best.number:04}"))
        console.print(f"* best: trial {best.number}, run: {where}", soft_wrap=True)


def list_sweeps() -> None:
    """List the sweeps that come with the package."""
    table = Table("name", "method", "trials", "varies")
    table.columns[0].no_wrap = True
    for name in shipped_sweeps():
        options = load_sweep(name).options
        table.add_row(name, options.method, str(options.total), escape(", ".join(options.search)))
    console.print(table)
