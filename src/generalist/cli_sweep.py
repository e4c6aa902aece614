"""The command `generalist sweep`: many trials of one recipe, by as many workers as you start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from generalist.console import console, importing, print_version, training_listener
from generalist.core import ranks
from generalist.core.errors import SweepError
from generalist.core.files import check_target, write_text
from generalist.core.run import RunDirectory

if TYPE_CHECKING:
    from generalist.sweep.storage import Shared

Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]


def sweep(
    definition: Annotated[
        str | None, typer.Argument(help="A shipped sweep's name, or a YAML file.", metavar="SWEEP", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a field of every trial, as in model.name=wrn-10-1. Repeatable.",
            metavar="FIELD=VALUE",
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Database: postgresql://USER@HOST/NAME or sqlite:///FILE [default: OUT/sweep.db].", metavar="URL"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs [default: sweeps/NAME].")] = None,
    limit: Annotated[
        int | None, typer.Option("--trials", help="Stop this worker after so many trials [default: when none is left].")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Begin no further trial after so many seconds.", metavar="SECONDS")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the trials and the best; nothing is run.")] = False,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write every trial to this file.")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the objectives over the fields to this file.")] = None,
    shipped: Annotated[bool, typer.Option("--list", help="List the shipped sweeps.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow import paths in the recipe, which run code.")
    ] = False,
    version: Version = False,
) -> None:
    """Search over fields of a recipe. Start it again, here or elsewhere with the same --storage, to add a worker.

    Example: generalist sweep digits-gamma-end --out sweeps/gamma
    """
    with importing():
        from generalist.console_sweep import list_sweeps
        from generalist.sweep.definition import load_sweep
        from generalist.sweep.storage import choose_place, open_shared
        from generalist.sweep.worker import Limits, run_sweep
        from generalist.sweep_plots import check_drawable
        from generalist.training.environment import choose_device

    if shipped:
        if definition is not None:
            raise SweepError(f"--list lists the shipped sweeps: leave {definition!r} out")
        list_sweeps()
        return
    if definition is None:
        raise SweepError("name a sweep, or see `generalist sweep --list`")
    for name, value in (("--trials", limit), ("--timeout", timeout)):
        if value is not None and not value > 0:
            raise SweepError(f"{name} must be above 0, not {value:g}")
    if ranks.launched()[1] > 1:
        raise SweepError(
            "a sweep's workers do not run under torchrun: start `generalist sweep` once for each GPU, "
            "as in CUDA_VISIBLE_DEVICES=1 generalist sweep SWEEP"
        )
    read = load_sweep(definition, overrides=changes or (), trust_code=trust_code)
    folder = out or Path("sweeps") / read.name
    if RunDirectory(folder).exists():
        raise SweepError(f"{folder} is a run, and a sweep needs a folder of its own: choose another --out")
    place = choose_place(storage, folder)
    if svg is not None:
        check_drawable(read)
    for path, suffix in ((csv, ".csv"), (svg, ".svg")):
        if path is not None:
            check_target(path, suffix)
    if show:
        shared = open_shared(read, place, create=False)
    else:
        choose_device(device)  # refuse a missing device before anything is written
        limits = Limits(limit, timeout)
        shared = run_sweep(
            read,
            place,
            device=device,
            limits=limits,
            say=lambda text: console.print(escape(text), soft_wrap=True),
            listening=training_listener,
        )
    _tell(shared, folder, csv, svg)


def _tell(shared: Shared, folder: Path, csv: Path | None, svg: Path | None) -> None:
    from generalist.console_sweep import show_sweep
    from generalist.report.svg import file_text
    from generalist.sweep import trials
    from generalist.sweep.results import to_csv
    from generalist.sweep.storage import clear_storage_errors
    from generalist.sweep_plots import picture

    with clear_storage_errors(shared.place):
        rows = trials.rows(shared)
    show_sweep(shared.sweep, rows, folder)
    if csv is not None:
        write_text(csv, to_csv(rows, shared.sweep))
        console.print(f"trials: {escape(str(csv))}", soft_wrap=True)
    if svg is not None:
        write_text(svg, file_text(picture(shared.sweep, rows)))
        console.print(f"picture: {escape(str(svg))}", soft_wrap=True)
