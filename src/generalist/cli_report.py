"""The command `generalist report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from generalist.console import console, importing, print_version

Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN")],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Directory for every figure as files.")] = None,
    formats: Annotated[str, typer.Option(help="Of --figures, by commas: svg, pdf, png.")] = "svg,pdf,png",
    images: Annotated[
        int, typer.Option(help="Example images of each network and threat, and disagreements of each kind; 0: none.")
    ] = 6,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where networks look at images.")] = "auto",
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow import paths in the recipes, which run code.")
    ] = False,
    version: Version = False,
) -> None:
    """Write one page about one run or many. It loads nothing and can be sent as it is.

    Example: generalist report runs/digits-t runs/digits-at --out report.html --figures figures
    """
    with importing():
        from generalist.report import write_report

    words = [word.strip() for word in formats.split(",") if word.strip()]
    written = write_report(
        runs, out, figures=figures, formats=words, images=images, device=device, trust_code=trust_code
    )
    size = f"{written.size / 1e6:.2f} MB"
    count = "1 run" if written.runs == 1 else f"{written.runs} runs"
    console.print(escape(f"page: {written.page}  ({count}, {size})"), soft_wrap=True)
    if figures is not None:
        console.print(escape(f"figures: {len(written.figures)} files in {figures}"), soft_wrap=True)
    if written.lacking:
        text = f"warning: the font of PDF and PNG figures lacks {written.lacking[:40]}: use the SVG files"
        console.print(escape(text), soft_wrap=True)
