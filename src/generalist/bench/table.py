"""The benchmark's figures as a table."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from generalist.bench.train import PUBLISHED, Report

_LABELS = {PUBLISHED: "published code's loop", "eager": "eager engine", "graph": "graph engine"}
MISSING = "n/a"


COMPILED: dict[bool | str, str] = {True: ", compiled", False: "", "auto": ", graph engine compiled"}


def heading(report: Report) -> list[str]:
    """Lines that say what was measured, and on which machine."""
    job, environment = report.recipe, report.environment
    learners = " + ".join(learner.name for learner in job.learners)
    shape = "x".join(str(side) for side in report.data["shape"])
    lines = [
        f"{job.name}: {job.model.name}, learners {learners}, batch {job.train.batch_size}, images {shape}, "
        f"engines in {job.train.precision}{COMPILED[job.train.compile]}",
        f"{environment['device']}, torch {environment['torch']}, generalist {environment['generalist']}, "
        f"{environment['threads']} CPU threads; {report.iterations} iterations after {report.warm_up} of warm-up",
    ]
    ceiling = report.ceiling
    lines.append(f"matrix products here: at best {ceiling.tflops:.3g} TFLOP/s in {ceiling.precision}")
    if report.flops is not None:
        lines[-1] += f"; an iteration is {report.flops / 1e12:.3g} TFLOP"
    return lines


def table(report: Report, *, narrow: bool = False) -> Table:
    """One row per subject, or one column per subject on a narrow terminal; the spread is from the fastest to the
    slowest block of iterations."""
    baseline = any(result.name == PUBLISHED for result in report.results)
    columns = ["ms", "spread", "images/s", *(["speed-up"] if baseline else [])]
    lines = [["", *columns, "TFLOP/s", "of ceiling", "peak memory", "start-up", "compiling"]]
    for result in report.results:
        record, cells = result.record(report.flops, report.ceiling), []
        if baseline:
            ratio = report.ratios().get(f"{PUBLISHED}/{result.name}", 1.0)
            cells = [f"{ratio:.2f}x"]
        lines.append(
            [
                escape(_LABELS[result.name]),
                f"{record['ms_per_iteration']:.2f}",
                f"{100 * record['spread']:.1f}%",
                f"{record['images_per_second']:,.0f}",
                *cells,
                _or_missing(record["tflops"], "{:.3g}"),
                _or_missing(record["share_of_ceiling"], "{:.1%}"),
                _or_missing(result.peak_bytes and result.peak_bytes / 2**30, "{:.2f} GiB"),
                f"{result.startup_seconds:.1f} s",
                f"{result.compile_seconds:.1f} s",
            ]
        )
    if narrow:
        lines = [list(line) for line in zip(*lines, strict=True)]
    shown = Table(title="One training iteration", title_justify="left")
    shown.add_column("")
    for head in lines[0][1:]:
        shown.add_column(head, justify="right", no_wrap=True)
    for line in lines[1:]:
        shown.add_row(*line)
    return shown


def _or_missing(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)
