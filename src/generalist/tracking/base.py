"""The interface of trackers, the guard around those of a run, and helpers that all of them need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from generalist.core.errors import InterruptedRunError
from generalist.core.run import GLOBAL, RunDirectory
from generalist.recipe import Recipe
from generalist.training.loop import Trainer

SHOWN = 16
"""Images in a grid."""


@runtime_checkable
class Tracker(Protocol):
    """Logs a run. The methods are called in this order; with stages, `start` and `end` once for each stage."""

    name: str

    def start(self, recipe: Recipe, run: RunDirectory, epochs_done: int) -> None:
        """Before the first iteration. A resumed run has done some epochs; any later ones already seen are repeated."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        """After each epoch: the line of metrics.jsonl."""

    def images(self, epoch: int, images: Mapping[str, Tensor]) -> None:
        """Batches [N, C, H, W] in [0, 1] by name: training images at the start, attacked ones after validations."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """At the end: `status` is finished, stopped or failed; with the last epoch's numbers, if there are any."""


class Tracking:
    """The trackers of one run. One that fails is left out from then on, with a warning."""

    def __init__(self, trackers: Sequence[Tracker], say: Callable[[str], None]) -> None:
        self.trackers, self.say = list(trackers), say
        self.last: dict[str, Any] = {}
        self.showing = True

    @contextmanager
    def following(self, recipe: Recipe, trainer: Trainer) -> Iterator[None]:
        """While training, pass on to the trackers what the trainer's listener is told, and at the end the outcome."""
        if not self.trackers:
            yield
            return
        done, before = trainer.step // trainer.steps_per_epoch, trainer.listener
        self._tell("start", recipe, trainer.directory, done)
        self._show(done, lambda: {"training images": first_images(trainer)})

        def epoch(record: dict[str, Any]) -> None:
            before.epoch(record)
            self._epoch(record, trainer)

        self.last = {}
        trainer.listener = replace(before, epoch=epoch)
        try:
            yield
        except BaseException as error:
            stopped = isinstance(error, InterruptedRunError | KeyboardInterrupt)
            self._end("stopped" if stopped else "failed")
            raise
        self._end("finished")

    def _epoch(self, record: dict[str, Any], trainer: Trainer) -> None:
        self.last = record
        self._tell("epoch", record)
        if self.trackers and "validation" in record:
            first, validator = trainer.learners[0], trainer.validator
            self._show(record["epoch"], lambda: validator.examples(first, trainer.global_learner, SHOWN))

    def _end(self, status: str) -> None:
        self._tell("end", {"status": status, **outcome(self.last)})

    def _show(self, epoch: int, make: Callable[[], dict[str, Tensor]]) -> None:
        """Show images to the trackers, or none if making them fails: they take memory that the run does not need."""
        if not self.showing or not self.trackers:
            return
        try:
            images = make()
        except Exception as error:
            self.showing = False
            self.say(f"warning: no images are shown to the trackers; training goes on ({_reason(error)})")
            return
        self._tell("images", epoch, images)

    def _tell(self, what: str, *arguments: Any) -> None:
        for tracker in list(self.trackers):
            try:
                getattr(tracker, what)(*arguments)
            except Exception as error:  # a network that is down, a full disk, a fault in a user's tracker
                self.trackers.remove(tracker)
                self.say(
                    f"warning: the tracker {tracker.name!r} failed and is left out; training goes on ({_reason(error)})"
                )


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def outcome(record: Mapping[str, Any]) -> dict[str, Any]:
    """A summary of the whole run from the last epoch's record."""
    found = {name: record[name] for name in ("epoch", "best_epoch") if name in record}
    if "validation" in record:
        found["accuracy"] = dict(record["validation"]["accuracy"][GLOBAL])
    return found


def first_images(trainer: Trainer) -> Tensor:
    """The first training images as in the first epoch, augmented."""
    job = trainer.job
    index = trainer.train_index[:SHOWN]
    batch = trainer.train_images.augmented(index, epoch=1, seed=job.train.seed, options=job.data.augmentation)
    return batch.x.float().cpu()


# -- what trackers need -----------------------------------------------------------------------------------------------


def flat_numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """`{"validation": {"ensemble": 0.5}}` as `{"validation/ensemble": 0.5}`; only finite numbers are kept."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{key}"] = float(value)
    return found


def flat_settings(value: Any, prefix: str = "") -> dict[str, bool | int | float | str]:
    """A recipe's fields by their paths, as in `--set`; learners are numbered. Fields that are null are left out."""
    if isinstance(value, Mapping):
        entries = [(str(key), entry) for key, entry in value.items()]
    elif isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value):
        entries = [(str(number), entry) for number, entry in enumerate(value)]
    else:
        return {} if value is None else {prefix: value if isinstance(value, bool | int | float | str) else str(value)}
    found: dict[str, bool | int | float | str] = {}
    for key, entry in entries:
        found |= flat_settings(entry, f"{prefix}.{key}" if prefix else key)
    return found


def grid(images: Tensor, *, columns: int = 8) -> Tensor:
    """A batch in [0, 1] as one picture of bytes, [C, H, W] with 1 or 3 channels: rows of images, dark lines between."""
    shown = images.detach().float().cpu().clamp(0, 1)
    shown = shown if shown.shape[1] in (1, 3) else shown[:, :1]
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    padded = F.pad(shown, (1, 1, 1, 1))
    count, channels, height, width = padded.shape
    whole = torch.zeros(rows * columns, channels, height, width)
    whole[:count] = padded
    picture = whole.reshape(rows, columns, channels, height, width).permute(2, 0, 3, 1, 4)
    return (picture.reshape(channels, rows * height, columns * width) * 255).round().to(torch.uint8)
