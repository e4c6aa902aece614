"""The output of the commands: progress while training, tables at the end; plain lines without a terminal."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

from generalist._version import __version__
from generalist.core import ranks
from generalist.core.errors import GeneralistError, RunError
from generalist.core.registry import place_in_own_code
from generalist.core.run import RunDirectory

if TYPE_CHECKING:
    from generalist.training.loop import Listener

PLAIN_WIDTH = 140  # columns without a terminal: a file or a pipe can hold wide tables

SILENCE = 60.0
"""Seconds without output after which training prints its progress, if there is no terminal to show a bar."""

INTERRUPTED = 130
"""The exit code of a command that was ended by Ctrl-C, as in typer and in shells."""

CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


class _Safe(Console):
    """A console that lets no control characters from names or files reach the terminal, only those of rich itself."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if not segment.control:
                text = segment.text.translate(CONTROLS)
                segment = segment._replace(text=text.encode("utf-8", "replace").decode())  # for lone surrogates
            yield segment


console = _Safe(highlight=False)
if not console.is_terminal and "COLUMNS" not in os.environ:
    console = _Safe(highlight=False, width=PLAIN_WIDTH)
errors = _Safe(stderr=True, highlight=False)


def width_of(table: Table) -> int:
    """The columns that the table takes if nothing is wrapped."""
    return console.measure(table, options=console.options.update(width=1000)).maximum


def print_table(table: Table) -> None:
    """Print a table of numbers in full: on a terminal that is too narrow, lines wrap, but no digit is lost."""
    needed = width_of(table)
    wide = _Safe(file=console.file, force_terminal=console.is_terminal, highlight=False, width=needed)
    (console if needed <= console.width else wide).print(table)


def _complain(problem: object) -> None:
    """Print an error in one line, whatever names or values are in the message; of several failed ranks, one does so."""
    if not ranks.complains():
        return
    text = " ".join(str(problem).split()).encode("utf-8", "backslashreplace").decode()
    errors.print(f"error: {ranks.label()}{text[:2000]}", markup=False, soft_wrap=True)


def _leave(code: int) -> NoReturn:
    """End the process; if it belongs to a job of several, at once.

    The interpreter's shutdown would close connections. With ranks that are gone, gloo was seen to hang or abort there.
    And if something keeps a finished group alive (PyTorch does after a dispatch mode was used in it, as by
    torch.compile), a thread of gloo's may wait for the interpreter that is going down, and abort a successful rank.
    """
    if ranks.failed() or ranks.joined():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_out_of_memory(error: Exception) -> bool:
    torch = sys.modules.get("torch")  # if it was never imported, this is none of its errors
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


@contextmanager
def clear_endings() -> Iterator[None]:
    """End with one line and an exit code on the user's mistakes, with a traceback and 1 on our own."""
    try:
        yield
    except SystemExit as ending:  # as typer ends every command
        if ranks.joined() and isinstance(ending.code, int | None):
            _leave(ending.code or 0)
        raise
    except KeyboardInterrupt:  # outside of a command, in which typer handles it
        _leave(INTERRUPTED)
    except GeneralistError as error:
        _complain(error)
        _leave(error.exit_code)
    except OSError as error:  # an impossible path, a directory without permission: a traceback would not help
        _complain(error)
        _leave(GeneralistError.exit_code)
    except Exception as error:
        if _is_out_of_memory(error):
            # The figures come in the first sentence; PyTorch's advice about its allocator follows and would mislead.
            figures = str(error).partition(" GPU ")[0]
            remedy = "Make train.batch_size or validation.batch_size smaller (evaluate: --batch-size), or free memory"
            _complain(f"{figures} {remedy} on the device")
            _leave(GeneralistError.exit_code)
        errors.print_exception()
        if place := place_in_own_code(error):
            errors.print(f"the error is in your own code: look at {place} first", markup=False, soft_wrap=True)
            _leave(GeneralistError.exit_code)
        errors.print("this is a bug in generalist, not your mistake: please report it with the lines above")
        _leave(1)


@contextmanager
def importing() -> Iterator[None]:
    """Around imports that take seconds: Ctrl-C ends the process at once, as nothing has begun yet. As an exception it
    would leave half-imported modules, which would raise errors of their own."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as under nohup
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def print_version(wanted: bool) -> None:
    """The callback of --version."""
    if wanted:
        console.print(f"generalist {__version__}")
        raise typer.Exit


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _say(text: str) -> None:
    """Print on one line, however long: logs are searched by line."""
    console.print(escape(text), soft_wrap=True)


def progress_bars() -> Progress:
    """Bars with a count, the time so far and the time left; they are gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True)


@contextmanager
def training_listener(label: str) -> Iterator[Listener]:
    """A listener that shows the progress with the time left, and a line for each validation."""
    from generalist.training.loop import Listener

    if not ranks.tells():
        yield Listener()
        return
    if not console.is_terminal:
        pulse = _Pulse()
        yield Listener(say=_say, iteration=pulse.iteration, epoch=pulse.epoch)
        return
    with progress_bars() as progress:
        task = progress.add_task(escape(label), total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield Listener(say=_say, iteration=advance, epoch=_print_epoch)


class _Pulse:
    """Without a progress bar: a line for each validation, and one for every minute without output."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None
        self.told = time.monotonic()

    def iteration(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self.first is None:  # the time before it, such as for compiling, says nothing about later iterations
            self.first, self.told = (done, now), now
        start, began = self.first
        if now - self.told > SILENCE and done > start:
            left = (now - began) / (done - start) * (total - done)
            _say(f"iteration {done} of {total}, {minutes(left)} left")
            self.told = now

    def epoch(self, record: dict[str, Any]) -> None:
        if "validation" in record:
            _print_epoch(record)
            self.told = time.monotonic()


def _print_epoch(record: dict[str, Any]) -> None:
    validation = record.get("validation")
    if validation is None:
        return
    accuracy = validation["accuracy"]["global"]
    parts = [f"{name} {percent(value)}" for name, value in accuracy.items()]
    gamma = " ".join(f"{name} {value:.2f}" for name, value in record["gamma"].items())
    console.print(
        f"epoch {record['epoch']:>4}  global: {', '.join(parts)}  gamma: {gamma}  "
        f"{record['images_per_second']:.0f} images/s",
        soft_wrap=True,
    )


def accuracy_table(title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Accuracies in percent, one row per subject."""
    columns: Sequence[str] = list(next(iter(rows.values()))) if rows else []
    table = Table(title=escape(title), title_justify="left", min_width=len(title))
    table.add_column("")
    for column in columns:
        table.add_column(escape(column), justify="right")
    for name, row in rows.items():
        table.add_row(escape(name), *(percent(row[column]) if column in row else "" for column in columns))
    return table


def _check_validated(record: dict[str, Any], run: RunDirectory) -> None:
    found = record["validation"]
    accuracy = found.get("accuracy") if isinstance(found, dict) else None
    rows = list(accuracy.values()) if isinstance(accuracy, dict) else []
    numbers = [value for row in rows if isinstance(row, dict) for value in row.values()]
    whole = rows and all(isinstance(row, dict) for row in rows) and all(isinstance(n, int | float) for n in numbers)
    if not whole or not isinstance(record.get("best_epoch"), int):
        raise RunError(f"{run.metrics} is damaged: epoch {record['epoch']} has no whole validation")


def show_run(run: RunDirectory) -> None:
    """Show the last validation of a finished run, and where its files are."""
    validated = [record for record in run.read_metrics() if "validation" in record]
    if validated:
        last = validated[-1]
        _check_validated(last, run)
        title = f"Accuracy (%) on the validation images, epoch {last['epoch']}"
        print_table(accuracy_table(title, last["validation"]["accuracy"]))
        console.print(f"best epoch by the recipe's rule, kept in model.safetensors: {last['best_epoch']}")
        if "warning" in last:
            console.print(f"[bold]Note:[/bold] {escape(last['warning'])}", soft_wrap=True)
    console.print(f"run: {escape(str(run.path))}  (model.safetensors, metrics.jsonl, snapshots/)", soft_wrap=True)
