"""The output of `generalist evaluate`: progress with time left for attacks and corruptions, and tables at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table

from generalist.console import console, minutes, print_table, progress_bars
from generalist.evaluation.suite import Moment

PLAIN_EVERY = 30.0
"""Seconds between two lines about one attack if the output is no terminal."""


@contextmanager
def evaluation_listener() -> Iterator[Callable[[Moment], None]]:
    """A bar for each attack on a terminal, else a line when an attack is done, and now and then before that."""
    if not console.is_terminal:
        yield _plain_listener()
        return
    with progress_bars() as progress:
        tasks: dict[str, TaskID] = {}

        def follow(moment: Moment) -> None:
            if moment.what not in tasks:
                tasks[moment.what] = progress.add_task("", total=moment.total)
            text = _place(moment) if moment.robust is None else f"{_place(moment)}: {moment.robust} right"
            progress.update(tasks[moment.what], description=escape(text), completed=moment.done, total=moment.total)

        yield follow


def _plain_listener() -> Callable[[Moment], None]:
    began: dict[str, float] = {}
    said = time.monotonic()

    def follow(moment: Moment) -> None:
        nonlocal said
        now = time.monotonic()
        start = began.setdefault(moment.what, now)
        finished = moment.done == moment.total
        if not finished and now - said < PLAIN_EVERY:
            return
        said = now
        left = "" if finished else f", {minutes((now - start) / moment.done * (moment.total - moment.done))} left"
        right = "" if moment.robust is None else f", {moment.robust} right"
        text = f"{_place(moment)}: {moment.done} of {moment.total}{right}{left}"
        console.print(escape(text), soft_wrap=True)

    return follow


def _place(moment: Moment) -> str:
    """Natural images are step 0, before the attacks; `cw-20.cw`, the name in records, is shown as cw-20."""
    what = re.sub(r"\b(\w+-\d+)\.\w+$", r"\1", moment.what)
    return f"[{moment.step + 1}/{moment.steps + 1}] {what}"


def across_threats(summary: Mapping[str, Any]) -> str:
    """Both unions in one line. The papers' union is under AutoAttack; a mean under weaker attacks is higher."""
    mean = summary["mean_over_threats"]
    whose = "the papers' union" if mean["of"] == "aa" else "of these attacks; the papers' union is of AutoAttack"
    worst = _percent(summary["union_worst_case"])
    return (
        f"right under every threat (union, worst case per sample): {worst}; "
        f"mean over the threats ({whose}): {100 * mean['value']:.2f}"
    )


def show_evaluation(summary: Mapping[str, Any]) -> None:
    """Show a summary: its table, the unions, warnings, and where the files are."""
    part = f", shard {summary['shard']}" if "shard" in summary else ""
    title = f"Accuracy (%) of {summary['subject']} on {summary['samples']} images of {summary['split']}{part}"
    print_table(_table(title, summary))
    if "union_worst_case" in summary:
        console.print(across_threats(summary), soft_wrap=True)
    console.print(escape(f"precision: {summary['precision']}; {summary['seconds']['total']:.0f} s"), soft_wrap=True)
    if "out_of_distribution" in summary:
        _show_shift(summary["out_of_distribution"])
    for warning in summary["warnings"]:
        console.print(f"[bold]Warning:[/bold] {escape(warning)}", soft_wrap=True)
    if "directory" in summary:
        console.print(f"evaluation: {escape(summary['directory'])}", soft_wrap=True)


def _show_shift(found: Mapping[str, Any]) -> None:
    """Accuracy by corruption and severity, then accuracy and flip rate by sequence; and what was left out."""
    if "corruptions" in found:
        result = found["corruptions"]
        title = f"Accuracy (%) on corrupted images by severity ({result['source']})"
        table = Table(title=escape(title), title_justify="left", min_width=len(title))
        table.add_column("corruption", no_wrap=True)
        for heading in (*(str(severity) for severity in result["severities"]), "mean"):
            table.add_column(heading, justify="right")
        for name, row in result["corruptions"].items():
            shares = [*(accuracy["value"] for accuracy in row["severities"].values()), row["mean"]]
            table.add_row(escape(name), *(f"{100 * share:.2f}" for share in shares))
        means = [*result["mean_by_severity"].values(), result["mean"]]
        table.add_row("mean", *(f"{100 * share:.2f}" for share in means))
        print_table(table)
    if "perturbations" in found:
        result = found["perturbations"]
        table = Table(title=escape(f"Sequences of perturbations ({result['source']})"), title_justify="left")
        table.add_column("sequence", no_wrap=True)
        for heading in ("accuracy (%)", "flip rate (%)"):
            table.add_column(heading, justify="right")
        rows = {name: (row["accuracy"], row["flip_rate"]) for name, row in result["sequences"].items()}
        rows["mean"] = (result["mean_accuracy"], result["mean_flip_rate"])
        for name, pair in rows.items():
            table.add_row(escape(name), *(f"{100 * share:.2f}" for share in pair))
        print_table(table)
    for note in found["notes"]:
        console.print(escape(note), soft_wrap=True)


def _table(title: str, summary: Mapping[str, Any]) -> Table:
    table = Table(title=escape(title), title_justify="left", min_width=len(title))
    for heading in ("attack", "threat"):
        table.add_column(heading, no_wrap=True)
    for heading in ("accuracy", "95% interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, accuracy in summary["accuracy"].items():
        attack, _, threat = name.partition("/")
        table.add_row(escape(attack), escape(threat), _percent(accuracy), _interval(accuracy))
    for threat, accuracy in summary["worst_case"].items():
        if sum(name.endswith(f"/{threat}") for name in summary["accuracy"]) > 1:
            table.add_row("all of these", escape(threat), _percent(accuracy), _interval(accuracy))
    return table


def _percent(accuracy: Mapping[str, Any]) -> str:
    return f"{100 * accuracy['value']:.2f}"


def _interval(accuracy: Mapping[str, Any]) -> str:
    low, high = accuracy["interval"]
    return f"{100 * low:.2f} to {100 * high:.2f}"
