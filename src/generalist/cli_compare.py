"""The command `generalist compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from generalist.console import importing, print_version
from generalist.core.errors import GeneralistError

Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]


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
    with importing():
        from generalist.compare import compare as compare_runs
        from generalist.comparison_text import WRITERS
        from generalist.console_compare import show_comparison

    if form != "table" and form not in WRITERS:
        raise GeneralistError(f"--format is table, {', '.join(WRITERS)}, not {form!r}")
    comparison = compare_runs(runs, paper=paper, seeds=seeds, trust_code=trust_code)
    if form == "table":
        show_comparison(comparison)
    else:
        sys.stdout.write(WRITERS[form](comparison))
