"""The training loop: epochs, what happens at their ends, checkpoints and resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from generalist._version import __version__
from generalist.core.distributed import Group
from generalist.core.errors import DivergedError, InterruptedRunError, RunError
from generalist.core.run import GLOBAL, RunDirectory
from generalist.data.options import Splits
from generalist.data.sampler import epoch_batches
from generalist.tensors.state import restore, under
from generalist.training import checkpoint as checkpoints
from generalist.training.artefacts import read_weights, save_global, save_snapshot, start_from, unseen, weights_of
from generalist.training.build import build_engine, build_learners, with_extra
from generalist.training.engine import diverged
from generalist.training.global_learner import GlobalLearner
from generalist.training.global_share import GlobalShare
from generalist.training.measures import Regret, without_nan
from generalist.training.options import Job
from generalist.training.parallel import parallel_for
from generalist.training.selection import LEAKED, TEST_SELECTION, as_warning, is_best, said_of
from generalist.training.signals import StopRequest, stop_requests
from generalist.training.validation import Validation, Validator, validation_indices


@dataclass
class Listener:
    """Callbacks for the caller: messages for the user, each iteration, each epoch's record."""

    say: Callable[[str], None] = lambda text: None
    iteration: Callable[[int, int], None] = lambda done, total: None
    epoch: Callable[[dict[str, Any]], None] = lambda record: None


class Trainer:
    """One training run. `resume` or `start_from` may come first; `run` then trains to the end.

    `locate` finds the weights file of a source that the recipe names. Each process of a `group` has a trainer of its
    own; they run in step, and only the first one writes files.
    """

    def __init__(
        self,
        job: Job,
        directory: RunDirectory,
        splits: Splits,
        *,
        device: torch.device,
        trust_code: bool = False,
        listener: Listener | None = None,
        locate: Callable[[str], str] = str,
        group: Group | None = None,
    ) -> None:
        self.job, self.directory, self.device = job, directory, device
        self.listener = listener or Listener()
        self.parallel = parallel_for(job, group)
        self.group = self.parallel.group
        images, held, self.train_index = validation_indices(job, splits)
        together, self.extra_index = with_extra(splits)
        self.train_images = together.to(device)
        held_out = images is splits.train
        self.validator = Validator(job, self.train_images if held_out else images.to(device), held, self.group)
        self.warnings = [TEST_SELECTION] if job.validation.split == "test" else []
        self.data = splits.train.checksum()
        self.extra = splits.extra.checksum() if splits.extra is not None else None
        self.held_out = self.unseen = set(held.tolist()) if held_out else set()
        self.learners = build_learners(
            job,
            self.train_images,
            self.train_index,
            device=device,
            artefact=lambda source: weights_of(source, self.learners, locate),
            validation=(self.validator.images, held),
            trust_code=trust_code,
            parallel=self.parallel,
        )
        self.own = [self.learners[a] for a in self.parallel.own]
        self.global_learner = (
            GlobalShare(self.learners, job.mixing, self.parallel)
            if self.parallel.groups > 1
            else GlobalLearner(self.learners, job.mixing)
        )
        batches = self._batches(1)
        self.parallel.check_batches(batches)
        self.steps_per_epoch = len(batches)
        self.engine = build_engine(
            job,
            self.train_images,
            self.learners,
            self.global_learner,
            device=device,
            iterations=(job.train.epochs - job.train.start_epoch) * self.steps_per_epoch,
            say=self.listener.say,
            parallel=self.parallel,
        )
        self.step = job.train.start_epoch * self.steps_per_epoch
        self.regret = Regret()
        self.best: checkpoints.Best | None = None
        self._saved_step = self._gathered_step = -1
        self.metrics_bytes = 0

    def start_from(self, files: dict[str, Path]) -> None:
        """Begin from given weights instead of fresh ones."""
        gammas = self.job.gammas_at(self.job.train.start_epoch)
        self._note_leaks(start_from(files, self.learners, self.global_learner, gammas, self.job.model))
        self.global_learner.divide()

    def check_source(self, file: Path) -> None:
        """Check that weights an objective will ask for fit, and note whether they have seen images held out here."""
        self._note_leaks([read_weights(file, self.learners[0].flat)[2]])

    def _note_leaks(self, abouts: Sequence[dict[str, Any]]) -> None:
        self.unseen = self.unseen.intersection(*(unseen(about, self.data, self.held_out) for about in abouts))
        if self.unseen != self.held_out and LEAKED not in self.warnings:
            self.warnings.append(LEAKED)
            self.listener.say(f"warning: {LEAKED}")

    def _batches(self, epoch: int) -> list[Tensor]:
        train, extra = self.job.train, self.job.data.extra
        return epoch_batches(
            self.train_index,
            extra_index=self.extra_index,
            ratio=extra.ratio if extra else 0.0,
            batch_size=train.batch_size,
            seed=train.seed,
            epoch=epoch,
            last=train.last_batch,
            iterations=train.iterations,
        )

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self, request: StopRequest | None = None) -> None:
        """Train to the last epoch. A caller with several runs to do passes in its own `request` to stop."""
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            nullcontext(request) if request else stop_requests(patient=self.group.world > 1) as request,
            torch.random.fork_rng(devices),
        ):
            self._saved_at, before = time.monotonic(), self.step
            while self.step < self.job.train.epochs * self.steps_per_epoch:
                self._epoch(self.step // self.steps_per_epoch + 1, request)
        if self.step > before or not self.directory.last.is_file():  # rewritten, it would look newer than its results
            self._save_model(self.directory.last, epoch=self.job.train.epochs)

    def _epoch(self, epoch: int, request: StopRequest) -> None:
        train, redistribution = self.job.train, self.job.redistribution()
        done = self.step % self.steps_per_epoch
        if done == 0:
            if any(options.companions() for options in self.job.learners):
                self._gather()  # an objective may ask for a learner that another process steps
            for learner in self.own:
                learner.objective.epoch_start(epoch)
        batches = self._batches(epoch)[done:]
        every_iteration = redistribution.when == "every-iteration" and redistribution.due(epoch, train.epochs)
        started = time.monotonic()
        feed = self.engine.feed(
            self.train_images, batches, epoch=epoch, seed=train.seed, options=self.job.data.augmentation
        )
        for batch, item in zip(batches, feed, strict=True):
            self.parallel.begin(batch)
            self.engine.set_progress(step=self.step, epoch=epoch, position=self.step / self.steps_per_epoch)
            self.engine.iteration(item)
            if every_iteration:
                self.global_learner.gather()
                self.global_learner.redistribute(self.learners)
            self.step += 1
            self.listener.iteration(self.step, train.epochs * self.steps_per_epoch)
            self._between_iterations(request, epoch)
        self._end_epoch(epoch, images=sum(map(len, batches)), seconds=time.monotonic() - started)
        if epoch < train.epochs:  # after the last epoch, stopping would only leave the last file unwritten
            received, old = self._agree(request)
            self._answer(received, epoch)
            if old:
                self.checkpoint()

    def _between_iterations(self, request: StopRequest, epoch: int) -> None:
        """Check the losses (on a GPU rarely, because that waits for the device), the clock and signals."""
        ended = self.step % self.steps_per_epoch == 0
        if self.device.type == "cpu" or self.step % 50 == 0 or ended:  # at the end, so that the epoch's time is right
            self.engine.check_finite()
        if ended:
            return  # a checkpoint here would resume after the end of the epoch, and skip what is done there
        received, old = self._agree(request)
        self._answer(received, epoch)
        if old:
            self.checkpoint()

    def _agree(self, request: StopRequest) -> tuple[int, bool]:
        """What all ranks agree on: a signal that one of them has received, and whether a checkpoint is due."""
        old = self.group.first and time.monotonic() - self._saved_at > 60 * self.job.train.checkpoint_minutes
        received, agreed = self.group.agree([request.received or 0, int(old)])
        return received, bool(agreed)

    def _answer(self, received: int, epoch: int) -> None:
        """Stop, with a checkpoint, if a signal was received."""
        if not received:
            return
        if self._saved_step != self.step:
            self.checkpoint()
        raise InterruptedRunError(
            f"stopped in epoch {epoch} at step {self.step}; a checkpoint is kept, go on with --resume", received
        )

    def _end_epoch(self, epoch: int, *, images: int, seconds: float) -> None:
        """Validate, measure, snapshot, redistribute, in this order; then log and checkpoint."""
        train, last = self.job.train, epoch == self.job.train.epochs
        self.engine.check_finite(weights=True)
        moved = {a: self.learners[a].end_epoch(epoch, steps=self.steps_per_epoch) for a in self.parallel.own}
        self.global_learner.follow(self.learners, moved, self.engine.gammas, steps=self.steps_per_epoch)
        gammas = self.engine.gammas.tolist()
        record = self._record(epoch, gammas, images=images, seconds=seconds)
        measured, kept = last or epoch % self.job.validation.every == 0, self.job.keeps_snapshot(epoch)
        if measured or kept:
            self._gather()
            self.global_learner.settle(self.learners)
        if measured:
            record |= self._validate(epoch, gammas)
        if kept:
            self._snapshot(epoch)
        redistribution = self.job.redistribution()
        record["redistributed"] = redistribution.due(epoch, train.epochs)
        if record["redistributed"] and redistribution.when == "epoch-end":
            self._gather()
            self.global_learner.redistribute(self.learners)
        self._log(record)
        # A new best model is already on the disk, so a resumed run must not go back to an epoch before it. Under the
        # rule `last` every epoch writes one, and a resumed run simply writes it again.
        best = self.best is not None and self.best.epoch == epoch and self.job.validation.rule != "last"
        if last or best or epoch % train.checkpoint_epochs == 0:
            self.checkpoint()

    # -- what is measured and kept ----------------------------------------------------------------------------------

    def _record(self, epoch: int, gammas: list[float], *, images: int, seconds: float) -> dict[str, Any]:
        names = [learner.name for learner in self.learners]
        return {
            "epoch": epoch,
            "step": self.step,
            "train": self.engine.take_means(),
            "lr": dict(zip(names, self.engine.lr.tolist(), strict=True)),
            "gamma": dict(zip(names, gammas, strict=True)),
            "images_per_second": round(images / max(seconds, 1e-9), 1),
        }

    def _gather(self) -> None:
        """Bring every learner and the global learner up to date on every rank."""
        if self._gathered_step == self.step:
            return
        for a, learner in enumerate(self.learners):
            self.parallel.send(a, [*learner.state().values(), *learner.objective.state_dict().values()])
        self.global_learner.gather()
        self._gathered_step = self.step

    def _validate(self, epoch: int, gammas: list[float]) -> dict[str, Any]:
        self.parallel.as_first([self.global_learner.vector, self.global_learner.counters])
        found: Validation = self.validator(self.learners, self.global_learner, gammas)
        for name, loss in found.task_loss.items():
            if not math.isfinite(loss):  # finite weights can still be too large for finite logits
                raise diverged(name, f"the loss on the validation images is not finite after epoch {epoch}")
        if not found.finite:
            raise DivergedError(
                f"the global learner, the learners' mix, outputs nan or inf after epoch {epoch}; the last checkpoint "
                "before that is kept. Redistribute more often (mixing.redistribution), or mix less of the others "
                "(mixing.gamma)"
            )
        self.regret.add(found.clipped_loss)
        score = found.score(self.job.validation)
        if self.best is None or is_best(score, self.best, self.job):
            self.best = checkpoints.Best(epoch=epoch, score=score, accuracy=found.accuracy[GLOBAL])
            self._save_model(self.directory.model, epoch=epoch, best=True)
        record = {
            "validation": found.record(),
            "task_loss": found.task_loss,
            "clipped_loss": found.clipped_loss,
            "regret": self.regret.value(),
            "regret_rounds": self.regret.rounds(),
            "best_epoch": self.best.epoch,
        }
        return record | as_warning([*self.warnings, *said_of(self.best, self.job)])

    def _about(self, epoch: int, *, best: bool = False) -> dict[str, Any]:
        """The header of a weights file: enough to build the network again."""
        images = self.train_images
        return {
            "version": __version__,
            "epoch": epoch,
            "model": self.job.model.model_dump(mode="json"),
            "classes": images.classes,
            "shape": list(images.shape),
            "data": self.data,
            "unseen": sorted(self.unseen),
            **as_warning([*self.warnings, *(said_of(self.best, self.job) if best else [])]),
        }

    def _save_model(self, path: Path, *, epoch: int, best: bool = False) -> None:
        if self.group.first:
            save_global(path, self.learners, self.global_learner, self._about(epoch, best=best))

    def _snapshot(self, epoch: int) -> None:
        if not self.group.first:
            return
        half = self.job.train.snapshots.dtype == "fp16"
        save_snapshot(self.directory, epoch, self.learners, self.global_learner, self._about(epoch), half=half)

    def _log(self, record: dict[str, Any]) -> None:
        if not self.group.first:
            return
        line = (json.dumps(without_nan(record), allow_nan=False) + "\n").encode()
        self.directory.append_metrics(line)
        self.metrics_bytes += len(line)
        self.listener.epoch(record)

    # -- checkpoint and resume --------------------------------------------------------------------------------------

    def live_tensors(self) -> dict[str, Tensor]:
        """Every tensor that determines the rest of the run, by name."""
        live = {f"global.{name}": tensor for name, tensor in self.global_learner.state().items()}
        for learner in self.learners:
            live |= {f"learner.{learner.name}.{name}": tensor for name, tensor in learner.state().items()}
        return live

    def checkpoint(self) -> None:
        """Write one, unless a loss or a weight has stopped being finite."""
        self.engine.check_finite(weights=True)
        self._gather()
        sums = self.engine.gathered_sums()
        self._saved_at, self._saved_step = time.monotonic(), self.step
        if not self.group.first:
            return
        tensors = {f"live.{name}": tensor.cpu() for name, tensor in self.live_tensors().items()}
        tensors |= {f"sums.{name}": tensor.cpu() for name, tensor in sums.items()}
        for learner in self.learners:
            state = learner.objective.state_dict()
            tensors |= {f"objective.{learner.name}.{name}": tensor.cpu() for name, tensor in state.items()}
        values = checkpoints.Values(
            step=self.step,
            data=self.data,
            extra=self.extra,
            unseen=sorted(self.unseen),
            best=self.best,
            regret=self.regret.history,
            metrics_bytes=self.metrics_bytes,
            warnings=self.warnings,
        )
        checkpoints.save(self.directory, checkpoints.Checkpoint(tensors, values.model_dump()), step=self.step)

    def resume(self) -> bool:
        """Continue from the newest intact checkpoint; False if there is none yet."""
        found = checkpoints.load_newest(self.directory, warn=self.listener.say) if self.group.first else None
        found = self.group.from_first(found)
        if found is None:
            return False
        values = self._checked(checkpoints.Values.parse(found.values))
        sums, live = under("sums.", found.tensors), under("live.", found.tensors)
        for name, tensor in live.items():
            if not bool(torch.isfinite(tensor).all()):  # `checkpoint` writes no such tensor
                raise RunError(f"the checkpoint is damaged: {name!r} is not finite")
        restore(self.live_tensors(), live)
        self.global_learner.restored()
        for learner in self.learners:
            learner.objective.load_state_dict(under(f"objective.{learner.name}.", found.tensors))
        for name, total in sums.items():
            if total.shape != (2,) or name.partition(".")[0] not in {learner.name for learner in self.learners}:
                raise RunError(f"the checkpoint is damaged: {name!r} is no sum of a learner")
            if self.group.first:  # on one rank only, as they are added up over ranks
                self.engine.sums[name] = total.to(self.device, torch.float64)
        self.step, self.best, self.regret = values.step, values.best, Regret(values.regret)
        self.metrics_bytes, self.warnings, self.unseen = values.metrics_bytes, values.warnings, set(values.unseen)
        self._truncate_metrics()
        return True

    def _checked(self, values: checkpoints.Values) -> checkpoints.Values:
        """The values, if they can belong to this run."""
        if values.data != self.data or values.extra != self.extra:
            raise RunError(f"{self.directory.path} was trained on other images than these; give it its original data")
        names = {learner.name for learner in self.learners}
        if values.step > self.job.train.epochs * self.steps_per_epoch or not values.regret.keys() <= names:
            raise RunError("the checkpoint is damaged: it does not fit the recipe")
        return values

    def _truncate_metrics(self) -> None:
        """Drop the lines that were logged after the checkpoint: their epochs are run again."""
        if self.group.first:
            self.metrics_bytes = self.directory.cut_metrics(self.metrics_bytes)
