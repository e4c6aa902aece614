"""The command `generalist export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from generalist.console import console, importing, print_version
from generalist.core.errors import GeneralistError

Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]


def export(
    subject: Annotated[Path, typer.Argument(help="A run directory, or a weights file.", metavar="RUN|FILE")],
    to: Annotated[str, typer.Option(help="safetensors, hub-folder, onnx, robustbench.", metavar="FORMAT")],
    out: Annotated[
        Path | None, typer.Option(help="File or folder to write [default: in RUN/export, named by model and format].")
    ] = None,
    model: Annotated[str | None, typer.Option(help="best, last or a learner's NAME[@EPOCH] [default: best].")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what lies there already.")] = False,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow import paths in the recipe, which run code.")
    ] = False,
    version: Version = False,
) -> None:
    """Write a trained network in a form that other tools read.

    Example: generalist export runs/digits-t --to onnx --out digits.onnx
    """
    with importing():
        from generalist.export import export_model

    if model is not None and subject.is_file():
        raise GeneralistError("--model chooses a network of a run; a weights file is one already: leave it out")
    done = export_model(subject, to=to, which=model or "best", out=out, force=force, trust_code=trust_code)
    console.print(f"{to}: {escape(str(done.path))}", soft_wrap=True)
    for note in done.notes:
        console.print(escape(note), soft_wrap=True)
