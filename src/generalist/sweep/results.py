"""The results of a sweep: the best trial, or the Pareto front; and every trial as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from generalist.sweep.definition import Sweep
from generalist.sweep.trials import Row


def front(rows: Sequence[Row], directions: Sequence[str]) -> list[Row]:
    """The complete trials that no other trial dominates by being as good in every objective and better in one.

    With one objective these are the best trial and those equal to it.
    """
    signs = [1.0 if direction == "maximize" else -1.0 for direction in directions]
    scored = [(row, [s * v for s, v in zip(signs, row.values, strict=True)]) for row in rows if row.values]

    def beaten(mine: list[float]) -> bool:
        return any(all(a >= b for a, b in zip(other, mine, strict=True)) and other != mine for _, other in scored)

    return [row for row, mine in scored if not beaten(mine)]


def directions_of(sweep: Sweep) -> list[str]:
    return [objective.direction for objective in sweep.options.objectives]


def ranked(rows: Sequence[Row], sweep: Sweep) -> list[Row]:
    """With one objective, the best first; trials without a value come last, by number."""
    directions = directions_of(sweep)
    if len(directions) > 1:
        return sorted(rows, key=lambda row: row.number)
    sign = -1.0 if directions[0] == "maximize" else 1.0
    return sorted(rows, key=lambda row: (row.values is None, sign * row.values[0] if row.values else 0.0, row.number))


def shown_choice(sweep: Sweep, row: Row, *, digits: int = 6) -> dict[str, str]:
    """A trial's parameters as a person would write them, without JSON's quotes around texts."""
    return {key: _plain(row.choice[key], digits) for key in sweep.options.search if key in row.choice}


def _plain(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    text = str(value)
    return str(json.loads(text)) if text.startswith('"') else text


def to_csv(rows: Sequence[Row], sweep: Sweep) -> str:
    """One line per trial: number, state, parameters, objectives, measures, epoch, run directory, worker, error."""
    options = sweep.options
    expressions = [objective.value for objective in options.objectives]
    header = ["trial", "state", *options.search, *expressions, *options.measures, "epoch", "run", "worker", "error"]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for row in sorted(rows, key=lambda row: row.number):
        choice = shown_choice(sweep, row, digits=17)
        values: Sequence[Any] = row.values or [""] * len(expressions)
        writer.writerow(
            [
                row.number,
                row.state,
                *(choice.get(key, "") for key in options.search),
                *values,
                *(row.measures.get(name, "") for name in options.measures),
                "" if row.epoch is None else row.epoch,
                f"trials/{row.number:04}",
                row.worker,
                row.error,
            ]
        )
    return stream.getvalue()
