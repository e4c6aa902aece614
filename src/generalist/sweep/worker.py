"""A worker claims trials, trains them as ordinary runs and reports what they reached, until none is left."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from generalist import api
from generalist.core.errors import (
    DivergedError,
    GeneralistError,
    InterruptedRunError,
    RecipeError,
    RunError,
    SweepError,
)
from generalist.core.files import clear_write_errors, write_text
from generalist.core.run import RunDirectory, next_free
from generalist.recipe import Recipe
from generalist.sweep import trials
from generalist.sweep.definition import Sweep, describe
from generalist.sweep.measurements import final_measurements, measurements, train_seconds
from generalist.sweep.storage import Place, Shared, clear_storage_errors, open_shared, optuna_module
from generalist.sweep.trials import Claim
from generalist.training.checkpoint import load_newest
from generalist.training.loop import Listener
from generalist.training.signals import stop_requests

Listening = Callable[[str], AbstractContextManager[Listener]]
"""Makes the listener for the training of one trial; the text names the trial."""


class _PrunedError(Exception):
    """The current trial does worse than others did; raised inside training to end it."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"pruned after epoch {epoch}")
        self.epoch = epoch


@dataclass(frozen=True)
class Limits:
    """When a worker stops even if trials are left."""

    trials: int | None = None
    """The number of trials that it does; None: as many as there are."""
    timeout: float | None = None
    """Seconds after which it starts no further trial."""


@dataclass(frozen=True)
class Worker:
    """One process that works on a sweep."""

    shared: Shared
    device: str
    say: Callable[[str], None]
    listening: Listening

    def work(self, limits: Limits) -> int:
        """Do trials until none is left; returns how many this worker did."""
        started, done, told = time.monotonic(), 0, False
        while (limits.trials is None or done < limits.trials) and not _late(started, limits):
            claimed = self._claim()
            if claimed is not None:
                self._do(claimed)
                done, told = done + 1, False
                continue
            others = [row for row in trials.rows(self.shared) if row.state in {"running", "waiting"}]
            if not others:
                break
            if not told:
                self.say(f"waiting for {len(others)} trial(s) of other workers, to take over if one dies")
                told = True
            self._rest()
        return done

    def _claim(self) -> Claim | None:
        with self._telling():
            return trials.claim(self.shared)

    def _rest(self) -> None:
        with stop_requests() as request:
            time.sleep(min(self.shared.sweep.options.heartbeat, 5))
        if request.received is not None:
            raise InterruptedRunError(
                "stopped while waiting for other workers; start it again to join", request.received
            )

    def _do(self, claimed: Claim) -> None:
        """Train one trial; whatever happens, the database knows whether another attempt is needed."""
        self.say(f"trial {claimed.number}: {describe(claimed.choice)}")
        with claimed.hold, self._alive(claimed):
            try:
                self._attempt(claimed)
            except trials.TakenOverError:
                self.say(f"trial {claimed.number} is another worker's now: this worker was considered dead")

    def _attempt(self, claimed: Claim) -> None:
        try:
            self._train(claimed)
        except (DivergedError, RecipeError, torch.OutOfMemoryError) as error:
            self._fail(claimed, str(error))
        except _PrunedError as ending:
            self.say(f"trial {claimed.number}: {ending}")
            with self._telling():
                trials.prune(self.shared, claimed, epoch=ending.epoch)
        except BaseException as error:
            # What the user can fix or has asked for is no death; anything else may be caused by the trial itself.
            crashed = isinstance(error, Exception) and not isinstance(error, GeneralistError | OSError)
            with self._telling():
                trials.free(self.shared, claimed, lost=crashed)
            if isinstance(error, InterruptedRunError):  # a sweep has no --resume: it always continues
                text = f"stopped in trial {claimed.number}, whose checkpoint is kept: start the sweep again to go on"
                raise InterruptedRunError(text, error.exit_code - 128) from error
            raise

    def _fail(self, claimed: Claim, reason: str) -> None:
        self.say(f"trial {claimed.number} failed: {reason}")
        with self._telling():
            trials.fail(self.shared, claimed, reason)

    def _train(self, claimed: Claim) -> None:
        sweep, folder = self.shared.sweep, trial_folder(self.shared.place.folder, claimed.number)
        recipe = sweep.recipe(claimed.choice)
        resume = _resumable(folder, self.say)
        with self.listening(f"trial {claimed.number}") as listener:
            run = api.train(
                recipe,
                out=folder,
                device=self.device,
                resume=resume,
                trust_code=sweep.trust_code,
                listener=self._watched(listener, claimed, recipe, folder),
            )
        found = final_measurements(run, recipe, epoch=sweep.options.epoch, trust_code=sweep.trust_code)
        values = [expression.value(found) for expression in sweep.objectives]
        for expression, value in zip(sweep.objectives, values, strict=True):
            if not math.isfinite(value):
                self._fail(claimed, f"the objective {expression.text} is not finite")
                return
        measures = {name: expression.value(found) for name, expression in sweep.measures.items()}
        finite = {name: value for name, value in measures.items() if math.isfinite(value)}
        with self._telling():
            trials.finish(self.shared, claimed, values, measures=finite, epoch=int(found["epoch"]))
        shown = ", ".join(f"{e.text} = {value:.4f}" for e, value in zip(sweep.objectives, values, strict=True))
        self.say(f"trial {claimed.number}: {shown}")

    def _watched(self, listener: Listener, claimed: Claim, recipe: Recipe, folder: Path) -> Listener:
        """The listener, extended to report validations if trials are pruned."""
        if self.shared.sweep.options.pruning.kind == "none":
            return listener

        def epoch(record: dict[str, Any]) -> None:
            listener.epoch(record)
            if "validation" in record and record["epoch"] < recipe.train.epochs:
                self._report(claimed, record, recipe, folder)

        return Listener(say=listener.say, iteration=listener.iteration, epoch=epoch)

    def _report(self, claimed: Claim, record: dict[str, Any], recipe: Recipe, folder: Path) -> None:
        epoch = int(record["epoch"])
        seconds = train_seconds(RunDirectory(folder).read_metrics(), batch_size=recipe.train.batch_size)
        value = self.shared.sweep.objectives[0].value(measurements(record, train_seconds=seconds))
        if not math.isfinite(value):
            return
        try:
            with self._telling():
                worse = trials.report(claimed, value, epoch=epoch)
        except SweepError as error:  # a database that is unavailable for a moment must not end a training
            self.say(f"warning: {error}")
            return
        if worse:
            raise _PrunedError(epoch)

    def _telling(self) -> AbstractContextManager[None]:
        return clear_storage_errors(self.shared.place)

    @contextmanager
    def _alive(self, claimed: Claim) -> Iterator[None]:
        """Send signs of life from a separate thread while the trial runs."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self.shared.sweep.options.heartbeat):
                try:
                    self.shared.storage.record_heartbeat(claimed.attempt)
                except Exception as error:  # a database that is unavailable for a moment must not end a training
                    self.say(f"warning: could not record a sign of life: {' '.join(str(error).split())[:200]}")

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def run_sweep(
    sweep: Sweep, place: Place, *, device: str, limits: Limits, say: Callable[[str], None], listening: Listening
) -> Shared:
    """Work on a sweep, together with any other workers, until nothing is left or a limit is reached."""
    _check_folder(sweep, place.folder)
    shared = open_shared(sweep, place)
    shared.study.pruner = _pruner(sweep)
    write_text(place.folder / "fingerprint", sweep.fingerprint() + "\n")  # written first: it marks the folder
    write_text(place.folder / "sweep.yaml", sweep.to_yaml())
    with clear_storage_errors(place):
        Worker(shared, device, say, listening).work(limits)
    return shared


def trial_folder(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number:04}"


def _check_folder(sweep: Sweep, folder: Path) -> None:
    """Refuse the folder of another sweep, whose runs would be taken for this one's."""
    mark = folder / "fingerprint"
    if mark.is_file() and mark.read_text(errors="replace").strip() != sweep.fingerprint():
        raise SweepError(f"{folder} holds the runs of another sweep; choose another --out, or another `name`")
    for name in ("trials", "sweep.yaml"):
        if not mark.is_file() and (folder / name).exists():
            raise SweepError(f"{folder} has a {name!r} that was not made by a sweep; choose another --out")


def _resumable(folder: Path, say: Callable[[str], None]) -> bool:
    """Whether there is a run to continue. Remains of a worker that died before its run began are removed.

    A run whose checkpoints are all damaged or gone is set aside: every worker would refuse it, and so none could go on.
    """
    run = RunDirectory(folder)
    if run.exists():
        try:
            for part in (run, *map(RunDirectory, sorted(folder.glob("stages/*")))):
                load_newest(part, warn=lambda text: None)
        except RunError as error:
            aside = next_free(folder.parent, f"{folder.name}-damaged")
            say(f"warning: {error}: started again from scratch, and the old files are now in {aside}")
            with clear_write_errors(aside):
                folder.rename(aside)
            return False
        return True
    if folder.is_dir() and not any(folder.rglob("*.safetensors")) and not any(folder.rglob("checkpoints/*")):
        shutil.rmtree(folder)
    return False


def _late(started: float, limits: Limits) -> bool:
    return limits.timeout is not None and time.monotonic() - started >= limits.timeout


def _pruner(sweep: Sweep) -> Any:
    pruners, options = optuna_module().pruners, sweep.options.pruning
    if options.kind == "median":
        return pruners.MedianPruner(n_startup_trials=options.startup, n_warmup_steps=options.warmup)
    if options.kind == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=options.warmup, reduction_factor=3)
    return pruners.NopPruner()
