"""The output of `generalist mix`: progress along the curve, the curve as a table, and where a mixture is stored."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from generalist.console import accuracy_table, console, print_table, progress_bars
from generalist.dial import Curve, Measured, Mixture, Point

Follow = Callable[[int, int, Point], None]
FRONT = "*"


@contextmanager
def curve_listener() -> Iterator[Follow]:
    """A bar with the time left on a terminal, else a line for each point."""
    if not console.is_terminal:
        yield lambda done, total, point: console.print(f"[{done}/{total}] {escape(_line(point))}", soft_wrap=True)
        return
    with progress_bars() as progress:
        task = progress.add_task("the curve", total=None)

        def follow(done: int, total: int, point: Point) -> None:
            progress.update(task, description=escape(_line(point)), completed=done, total=total)

        yield follow


def _line(point: Point) -> str:
    accuracies = ", ".join(f"{name} {100 * found.value:.2f}" for name, found in point.validation.items())
    return f"gamma {shares(point.gamma)}: {accuracies}"


def shares(gamma: Mapping[str, float]) -> str:
    """`linf 0.8, natural 0.2`."""
    return ", ".join(f"{name} {share:.3g}" for name, share in gamma.items())


def show_curve(curve: Curve, run: Path) -> None:
    """The table with its Pareto front marked, the suggestion with the command that creates it, and notes."""
    kind = {"raw": "", "averaged": ", averaged learners", "parts": ", the learners' parts"}[curve.source]
    about = f"epoch {curve.epoch}{kind}, PGD-{curve.steps}"
    measured = [(point, point.validation) for point in curve.points]
    print_table(_table(f"Accuracy (%) along the dial on the validation images: {about}", measured))
    tested = [(point, point.test) for point in curve.points if point.test is not None]
    if tested:
        print_table(_table(f"Accuracy (%) along the dial on the test images: {about}", tested))
    console.print(
        f"{FRONT} Pareto front on the validation images: no other point is as good everywhere and better somewhere",
        soft_wrap=True,
    )
    own = "the shares that make the run's own network" if curve.source == "parts" else "the run's own gamma at the end"
    console.print(escape(f"{own} of this epoch: {shares(curve.own_gamma)}"), soft_wrap=True)
    if suggestion := curve.suggestion:
        console.print(f"[bold]Suggestion:[/bold] {escape(suggestion.text)}", soft_wrap=True)
        console.print(escape(f"make it with: {_command(curve, suggestion.gamma, run)}"), soft_wrap=True)
    for note in curve.notes:
        console.print(f"[bold]Note:[/bold] {escape(note)}", soft_wrap=True)
    console.print(escape(f"curve: {run / 'mix' / 'curve.json'}"), soft_wrap=True)


def _command(curve: Curve, gamma: Mapping[str, float], run: Path) -> str:
    # With enough digits that shares which add up to 1 still do so.
    wanted = ",".join(f"{share:.10g}" for share in list(gamma.values())[:-1])
    statistics = "" if curve.statistics == "best" else f" --statistics {curve.statistics}"
    place = f"--epoch {curve.epoch} --source {curve.source}"
    return f"generalist mix {shlex.quote(str(run))} --gamma {wanted} {place}{statistics}"


def _table(title: str, points: Sequence[tuple[Point, Mapping[str, Measured]]]) -> Table:
    """One row per point. All shares are in one column, as a terminal has no room for more."""
    table = Table(title=escape(title), title_justify="left", min_width=len(title))
    first, columns = points[0]
    table.add_column("", no_wrap=True)
    table.add_column(escape(f"gamma {', '.join(first.gamma)}"))
    for heading in columns:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    table.add_column("statistics", no_wrap=True)
    for point, found in points:
        gamma = ", ".join(f"{share:.2f}" for share in point.gamma.values())
        accuracies = (f"{100 * found[name].value:.2f}" for name in columns)
        table.add_row(FRONT if point.pareto else "", gamma, *accuracies, point.statistics)
    return table


def show_mixture(mixture: Mixture, path: Path) -> None:
    """What was created, how its statistics were chosen, and where it is."""
    if mixture.measured:
        rows = {
            f"{kind} statistics": {name: accuracy.value for name, accuracy in found.items()}
            for kind, found in mixture.measured.items()
        }
        print_table(accuracy_table("Accuracy (%) on the validation images", rows))
    console.print(
        escape(f"gamma: {shares(mixture.gammas)}; BatchNorm statistics: {mixture.statistics}"), soft_wrap=True
    )
    if isinstance(warning := mixture.about.get("warning"), str):
        console.print(f"[bold]Note:[/bold] {escape(warning)}", soft_wrap=True)
    console.print(escape(f"weights: {path}"), soft_wrap=True)


def mixture_record(mixture: Mixture, path: Path) -> dict[str, Any]:
    """The same as JSON."""
    measured = {
        kind: {name: accuracy.as_json() for name, accuracy in found.items()} for kind, found in mixture.measured.items()
    }
    return {
        "gamma": mixture.gammas,
        "statistics": mixture.statistics,
        "epoch": mixture.about.get("epoch"),
        "validation": measured,
        "file": str(path),
    }
