"""The command line. Exit codes: 0 done, 2 the user's mistake (one clear line), 1 ours (a traceback)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from generalist.cli_bench import bench_app
from generalist.cli_compare import compare
from generalist.cli_evaluate import evaluate
from generalist.cli_export import export
from generalist.cli_mix import mix
from generalist.cli_report import report
from generalist.cli_sweep import sweep
from generalist.console import (
    INTERRUPTED,
    clear_endings,
    console,
    importing,
    print_version,
    show_run,
    training_listener,
)
from generalist.core import ranks
from generalist.core.errors import GeneralistError
from generalist.core.plain_yaml import load_yaml
from generalist.data.files import data_root
from generalist.shipped import shipped_names, shipped_text

# What needs PyTorch is imported in the functions that use it, here and in the other modules of the command line:
# loading it takes seconds, which must not delay help, complaints about options, or completion by TAB.

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="generalist",
    help="Train image classifiers that are accurate and robust at once. Example: generalist train digits-t",
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Data sets: list, get, check. Example: generalist data get cifar10", no_args_is_help=True)
recipes_app = typer.Typer(help="Shipped recipes. Example: generalist recipes show digits-t", no_args_is_help=True)
app.add_typer(data_app, name="data", context_settings=HELP)
app.add_typer(recipes_app, name="recipes", context_settings=HELP)
app.add_typer(bench_app, name="bench", context_settings=HELP)

Root = Annotated[Path | None, typer.Option(help="Directory with the data [default: ~/.cache/generalist].")]


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)]


@app.callback()
@data_app.callback()
@recipes_app.callback()
def _group(version: Version = False) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A shipped recipe's name, a YAML file, or a run to resume.", metavar="RECIPE")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a field, as in train.epochs=20 or learners.linf.optimizer.lr=0.1. Repeatable.",
            metavar="FIELD=VALUE",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory [default: runs/RECIPE, with a number where that is taken].")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of --out.")] = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start from a run's weights; with #global or #LEARNER all learners from that one network.",
            metavar="RUN[@EPOCH][#SUBJECT]",
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Log to tensorboard, wandb or mlflow as well. Repeatable.", metavar="TRACKER"),
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Allow import paths in the recipe, which run code.")
    ] = False,
    version: Version = False,
) -> None:
    """Train a recipe.

    Example: generalist train digits-t --set train.epochs=20 --out runs/mine
    """
    with importing():
        from generalist import api

    with training_listener(recipe) as listener:
        run = api.train(
            recipe,
            overrides=changes or [],
            out=out,
            device=device,
            resume=resume,
            start=start,
            trust_code=trust_code,
            listener=listener,
            trackers=track or [],
        )
    if ranks.tells():
        show_run(run)


app.command()(evaluate)
app.command()(mix)
app.command()(compare)
app.command()(report)
app.command()(sweep)
app.command()(export)


@data_app.command("list")
def data_list(root: Root = None, version: Version = False) -> None:
    """List the data sets that have a name. Example: generalist data list"""
    with importing():
        from generalist.data import download

    table = Table("name", "download (MB)", "fetched", "what it is")
    for entry in download.describe():
        # Whether all of it is present and intact takes reading it, which `data check` does.
        fetched = "-" if not entry.megabytes else "yes" if (data_root(root) / entry.name).is_dir() else "no"
        table.add_row(entry.name, str(entry.megabytes or "-"), fetched, entry.summary)
    console.print(table)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="The data set.", metavar="NAME")],
    root: Root = None,
    version: Version = False,
) -> None:
    """Fetch a data set and verify it. Example: generalist data get cifar10 --root ~/data"""
    with importing():
        from generalist.data import download

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {}

        def follow(file: str, here: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(escape(file))
            progress.update(tasks[file], completed=here, total=total)

        where = download.get(name, data_root(root), progress=follow)
    found = f"whole, in {escape(str(where))}" if where.exists() else "comes with the package"
    console.print(f"{escape(name)}: {found}")


@data_app.command("check")
def data_check(
    name: Annotated[str, typer.Argument(help="The data set.", metavar="NAME")],
    root: Root = None,
    version: Version = False,
) -> None:
    """Verify the files of a data set. Example: generalist data check cifar10"""
    with importing():
        from generalist.data import download

    states = download.check(name, data_root(root))
    for file in states:
        console.print(f"{file.state:8} {escape(str(file.path))}")
    if any(file.state != "ok" for file in states):
        raise GeneralistError(f"{name} is incomplete or damaged; run: generalist data get {name}")
    console.print(f"{escape(name)}: whole")


@recipes_app.command("list")
def recipes_list(
    word: Annotated[str, typer.Argument(help="Only those whose names have this in them.", metavar="[WORD]")] = "",
    version: Version = False,
) -> None:
    """List the shipped recipes. Example: generalist recipes list digits"""
    if not (names := [name for name in shipped_names() if word.lower() in name]):
        raise GeneralistError(f"no recipe has {word[:80]!r} in its name; `generalist recipes list` lists all")
    table = Table("name", "learners", "epochs", "style")
    table.columns[0].no_wrap = True
    table.columns[-1].overflow = "fold"
    for name in names:
        recipe = load_yaml(shipped_text(name), name)
        learners = " + ".join(learner["name"] for learner in recipe["learners"])
        table.add_row(name, learners, str(recipe["train"]["epochs"]), recipe.get("style", "default"))
    console.print(table)
    console.print("generalist recipes show NAME says where its settings come from", soft_wrap=True)


@recipes_app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(help="The recipe.", metavar="NAME")],
    resolved: Annotated[bool, typer.Option("--resolved", help="Print every field with its value.")] = False,
    version: Version = False,
) -> None:
    """Print a recipe. Example: generalist recipes show digits-t --resolved > mine.yaml"""
    if not resolved:
        sys.stdout.write(shipped_text(name))
        return
    with importing():
        from generalist.recipe import load_recipe, to_yaml

    sys.stdout.write(to_yaml(load_recipe(name)))


def main() -> None:
    """The entry point: mistakes end in one line and an exit code."""
    with clear_endings():
        try:
            code = app(standalone_mode=False)  # an exit code if a command ended early, as after --version
        except Exception as error:  # typer's classes for this differ between versions
            if type(error).__name__ == "Abort":  # Ctrl-C, in older ones
                sys.exit(INTERRUPTED)
            if not hasattr(error, "format_message"):
                raise
            raise_misuse(error)
        sys.exit(code or 0)


def raise_misuse(error: Any) -> NoReturn:
    """Raise typer's complaint about an option, argument or command in one line; or its help, if requested, in full."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    if "\n" in message:
        error.show()
        raise SystemExit(error.exit_code)
    said = message[:1].lower() + message[1:].rstrip(".")
    if context is not None and context.info_name in ("train", "sweep") and hasattr(error, "option_name"):
        said = said.partition(" (Possible")[0] + "; fields of a recipe are set as in --set train.epochs=20"
    help_of = f" (see {context.command_path} -h)" if context is not None else ""
    raise GeneralistError(f"{said}{help_of}")
