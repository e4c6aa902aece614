"""`generalist bench`: how fast things run here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from generalist.bench.table import heading, table
from generalist.bench.train import ENGINES, bench_train
from generalist.console import console, errors, print_version
from generalist.core.errors import GeneralistError
from generalist.core.files import write_json

bench_app = typer.Typer(help="Measure speed. Example: generalist bench train --device cpu", no_args_is_help=True)


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]


@bench_app.callback()
def _group(version: Version = False) -> None:
    pass


@bench_app.command("train")
def train(
    recipe: Annotated[
        str | None, typer.Option(help="Recipe [default: cifar10-resnet18-d on a GPU, digits-d on a CPU].")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a field, as in train.batch_size=64. Repeatable.", metavar="FIELD=VALUE"),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Iterations timed for each engine [default: 100 on a GPU, 20 on a CPU].")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    engines: Annotated[str, typer.Option(help="Which engines, with commas between.")] = ",".join(ENGINES),
    published: Annotated[
        bool, typer.Option("--published/--no-published", help="Measure the published code's loop as well.")
    ] = True,
    synthetic: Annotated[
        bool, typer.Option("--synthetic/--real", help="Random pixels of the data's shape, or the data itself.")
    ] = True,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Also write everything as JSON; - is standard output.", metavar="FILE")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow import paths in the recipe, which run code.")
    ] = False,
    version: Version = False,
) -> None:
    """Time a training iteration. Both engines are measured, and the published code's loop.

    Example: generalist bench train --recipe digits-d --device cpu --json -
    """
    if json_file is not None and (not json_file or Path(json_file).is_dir()):
        raise GeneralistError(f"--json needs the name of a file, or -, not {json_file!r}")
    shown = errors if json_file == "-" else console  # standard output is then JSON and nothing else
    report = bench_train(
        recipe,
        overrides=changes or [],
        iterations=iterations,
        device=device,
        engines=[name.strip() for name in engines.split(",")],
        published=published,
        synthetic=synthetic,
        trust_code=trust_code,
        say=lambda text: shown.print(escape(text)),
    )
    for line in heading(report):
        shown.print(escape(line), soft_wrap=True)
    shown.print(table(report))
    for note in report.notes:
        shown.print(f"note: {escape(note)}", soft_wrap=True)
    if json_file == "-":
        sys.stdout.write(json.dumps(report.record(), indent=2, allow_nan=False) + "\n")
    elif json_file is not None:
        write_json(Path(json_file), report.record())
