"""`generalist bench`: how fast things run here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from generalist.console import console, errors, importing, print_version, width_of
from generalist.core.errors import GeneralistError
from generalist.core.files import write_json

bench_app = typer.Typer(help="Measure speed. Example: generalist bench train --device cpu", no_args_is_help=True)


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]
JsonFile = Annotated[
    str | None, typer.Option("--json", help="Also write everything as JSON; - is standard output.", metavar="FILE")
]


@bench_app.callback()
def _group(version: Version = False) -> None:
    pass


@bench_app.command("train")
def train(
    recipe: Annotated[
        str | None, typer.Option(help="Recipe [default: cifar10-resnet18-d-plain on a GPU, digits-d on a CPU].")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a field, as in train.batch_size=64. Repeatable.", metavar="FIELD=VALUE"),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="Iterations timed for each engine [default: 100 on a GPU, 20 on a CPU].")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    engines: Annotated[str, typer.Option(help="Which engines, with commas between.")] = "graph,eager",
    published: Annotated[
        bool, typer.Option("--published/--no-published", help="Measure the published code's loop as well.")
    ] = True,
    synthetic: Annotated[
        bool, typer.Option("--synthetic/--real", help="Random pixels of the data's shape, or the data itself.")
    ] = True,
    json_file: JsonFile = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow import paths in the recipe, which run code.")
    ] = False,
    version: Version = False,
) -> None:
    """Time a training iteration. Both engines are measured, and the published code's loop.

    Example: generalist bench train --recipe digits-d --device cpu --json -
    """
    with importing():
        from generalist.bench.table import heading, table
        from generalist.bench.train import bench_train

    shown = _listener(json_file)
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
    whole = table(report)
    shown.print(whole if width_of(whole) <= shown.width else table(report, narrow=True))
    for note in report.notes:
        shown.print(f"note: {escape(note)}", soft_wrap=True)
    _write(report.record(), json_file)


@bench_app.command("evaluate")
def evaluate(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|FILE]", help="A run or a weights file; left out, a small network is trained on digits."
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="A data set's name; its test images.")] = "digits",
    threat: Annotated[str, typer.Option(help="As in linf:8/255.")] = "linf:0.12",
    samples: Annotated[int, typer.Option(help="A seeded random subset of so many images.")] = 500,
    attacks: Annotated[
        str, typer.Option(help="Which of AutoAttack's, with commas between.")
    ] = "apgd-ce,apgd-t,fab-t,square",
    batch_size: Annotated[int | None, typer.Option(help="Rows of a batch [default: by device and samples].")] = None,
    precision: Annotated[str, typer.Option(help="default, or fast: search in bfloat16.")] = "default",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_file: JsonFile = None,
    version: Version = False,
) -> None:
    """Time AutoAttack, attack by attack.

    Example: generalist bench evaluate RUN --data cifar10 --threat linf:8/255 --samples 1000
    """
    with importing():
        from generalist.bench.evaluate import bench_evaluate, lines, load_case

    shown = _listener(json_file)
    case = load_case(
        subject,
        data=data,
        samples=samples,
        threat=threat,
        attacks=[name.strip() for name in attacks.split(",")],
        device=device,
        precision=precision,
        batch_size=batch_size,
    )
    report, _ = bench_evaluate(case)
    for line in lines(report):
        shown.print(escape(line), soft_wrap=True)
    _write(report, json_file)


def _listener(json_file: str | None) -> Console:
    """Text for people, which does not go to standard output if that must contain only JSON."""
    if json_file is not None and (not json_file or Path(json_file).is_dir()):
        raise GeneralistError(f"--json needs the name of a file, or -, not {json_file!r}")
    return errors if json_file == "-" else console


def _write(record: dict[str, Any], json_file: str | None) -> None:
    if json_file == "-":
        sys.stdout.write(json.dumps(record, indent=2, allow_nan=False) + "\n")
    elif json_file is not None:
        write_json(Path(json_file), record)
