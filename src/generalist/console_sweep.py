"""What `generalist sweep` shows: the trials, the best of them or the Pareto front, and the shipped sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from generalist.console import console, print_table
from generalist.sweep.definition import Sweep, load_sweep, shipped_sweeps
from generalist.sweep.results import directions_of, front, ranked, shown_choice
from generalist.sweep.trials import Row


def show_sweep(sweep: Sweep, rows: Sequence[Row], folder: Path) -> None:
    """The table, what is best in it, and where the runs lie."""
    options, winners = sweep.options, front(rows, directions_of(sweep))
    title = f"{sweep.name}: {_states(rows)} of {options.total} trials"
    table = Table(title=escape(title), title_justify="left", min_width=len(title))
    table.add_column("trial", justify="right")
    table.add_column("state")
    for name in [*options.search, *(objective.value for objective in options.objectives), *options.measures]:
        table.add_column(escape(name), justify="right")
    table.add_column("epoch", justify="right")
    for row in ranked(rows, sweep):
        table.add_row(*_cells(sweep, row, winner=row in winners))
    print_table(table)
    for row in rows:
        if row.error:
            console.print(f"trial {row.number} failed: {escape(row.error)}", soft_wrap=True)
    _say_winners(sweep, winners, folder)


def _states(rows: Sequence[Row]) -> str:
    counts: Counter[str] = Counter(row.state for row in rows)
    order = ("complete", "pruned", "failed", "running", "waiting")
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state]) or "none begun"


def _cells(sweep: Sweep, row: Row, *, winner: bool) -> list[str]:
    options = sweep.options
    choice = shown_choice(sweep, row)
    values = [f"{value:.4f}" for value in row.values] if row.values else [""] * len(options.objectives)
    measures = [f"{row.measures[name]:.4g}" if name in row.measures else "" for name in options.measures]
    state = f"{row.state} *" if winner else row.state
    cells = [str(row.number), state, *(choice.get(key, "") for key in options.search), *values, *measures]
    return [escape(cell) for cell in [*cells, "" if row.epoch is None else str(row.epoch)]]


def _say_winners(sweep: Sweep, winners: Sequence[Row], folder: Path) -> None:
    if not winners:
        console.print("no trial is complete yet")
    elif len(sweep.options.objectives) > 1:
        numbers = ", ".join(str(row.number) for row in winners)
        console.print(f"* the Pareto front, beaten by no other trial: {numbers}; runs in {escape(str(folder))}/trials")
    else:
        best = winners[0]
        where = folder / "trials" / f"{best.number:04}"
        console.print(f"* best: trial {best.number}, run: {escape(str(where))}", soft_wrap=True)


def list_sweeps() -> None:
    """The sweeps that come with the package."""
    table = Table("name", "method", "trials", "varies")
    table.columns[0].no_wrap = True
    for name in shipped_sweeps():
        options = load_sweep(name).options
        table.add_row(name, options.method, str(options.total), escape(", ".join(options.search)))
    console.print(table)
