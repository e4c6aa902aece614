"""The eager engine: one iteration of every learner and of the global learner, operation by operation.

It runs everywhere and is the reference. Nothing in an iteration waits for the device, and everything that changes
from one iteration to the next is a device scalar.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from generalist.core.errors import DivergedError
from generalist.core.random import host_seed
from generalist.data.augment import AugmentOptions
from generalist.data.sets import Batch, Images, iterate
from generalist.objectives.base import Progress
from generalist.training.global_learner import GlobalLearner
from generalist.training.learner import Learner
from generalist.training.options import Job


class EagerEngine:
    """Steps the learners. `sums` collects what they report, as (sum, count), until `take_means`."""

    def __init__(self, job: Job, learners: Sequence[Learner], global_learner: GlobalLearner) -> None:
        self.job = job
        self.learners = learners
        self.global_learner = global_learner
        vector = global_learner.vector
        self.device, self.dtype = vector.device, vector.dtype
        self.channels_last = job.train.channels_last
        count = len(learners)
        self.lr = torch.zeros(count, dtype=self.dtype, device=self.device)
        self.gammas = torch.zeros(count, dtype=torch.float64, device=self.device)
        self.step = torch.zeros((), dtype=torch.int64, device=self.device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=self.device)
        self.first_bad = torch.full((count,), -1, dtype=torch.int64, device=self.device)
        self.scalars = [
            {name: torch.zeros((), dtype=self.dtype, device=self.device) for name in learner.objective.schedules()}
            for learner in learners
        ]
        self.variants = tuple(learner.objective.variants[0] for learner in learners)
        self.sums: dict[str, Tensor] = {}

    def feed(
        self, images: Images, batches: Sequence[Tensor], *, epoch: int, seed: int, options: AugmentOptions
    ) -> Iterator[Batch]:
        """What `iteration` takes, one after the other."""
        return iterate(images, batches, epoch=epoch, seed=seed, options=options)

    def set_progress(self, *, step: int, epoch: int, position: float) -> None:
        """Put learning rates, gammas and the objectives' own schedules where iteration `step` wants them.

        `position` is the number of epochs done, fractional.
        """
        epochs = self.job.train.epochs
        rates = [
            self.job.learning_rate(learner.options) * learner.options.schedule.at(position, epochs)
            for learner in self.learners
        ]
        self.lr.copy_(torch.tensor(rates, dtype=self.dtype))
        self.gammas.copy_(torch.tensor(self.job.gammas_at(position), dtype=torch.float64))
        self.variants = tuple(learner.objective.variant(step, epoch) for learner in self.learners)
        # Dropout and its like draw from torch's generators: seeded by the step, they need no checkpoint either.
        generator_seed = host_seed(self.job.train.seed, "generator", step)
        torch.default_generator.manual_seed(generator_seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(generator_seed)
        self.step.fill_(step)
        self.epoch.fill_(epoch)
        for learner, scalars in zip(self.learners, self.scalars, strict=True):
            for name, schedule in learner.objective.schedules().items():
                scalars[name].fill_(schedule.at(position, epochs))

    def iteration(self, batch: Batch) -> None:
        """One step of every learner, then of the global learner."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        batch = replace(batch, x=batch.x.to(self.dtype).contiguous(memory_format=layout))
        for a, learner in enumerate(self.learners):
            progress = Progress(self.step, self.epoch, self.lr[a], self.variants[a], self.scalars[a])
            metrics = learner.step(batch, progress)
            fresh = ~torch.isfinite(metrics["loss"]) & (self.first_bad[a] < 0)
            self.first_bad[a] = torch.where(fresh, self.step, self.first_bad[a])
            for name, value in metrics.items():
                key = f"{learner.name}.{name}"
                if key not in self.sums:
                    self.sums[key] = torch.zeros(2, dtype=torch.float64, device=self.device)
                self.sums[key].add_(torch.stack([value.double(), torch.ones_like(value, dtype=torch.float64)]))
        self.global_learner.update(self.learners, self.gammas)

    def take_means(self) -> dict[str, dict[str, float]]:
        """Means of the reported metrics since the last call, by learner."""
        means: dict[str, dict[str, float]] = {learner.name: {} for learner in self.learners}
        for key, total in self.sums.items():
            name, _, metric = key.partition(".")
            value, count = total.tolist()
            if count:
                means[name][metric] = value / count
            total.zero_()
        return means

    def check_finite(self, *, weights: bool = False) -> None:
        """Raise where a learner's loss, or one of its weights, has stopped being finite. Waits for the device.

        A finite loss can have a gradient that is not; the weights tell before the next loss does.
        """
        for learner, step in zip(self.learners, self.first_bad.tolist(), strict=True):
            if step >= 0:
                raise diverged(learner.name, f"the loss is not finite at step {step}")
            if weights and not bool(torch.isfinite(learner.flat.vector).all()):
                raise diverged(learner.name, f"the weights are not finite after step {int(self.step)}")


def diverged(name: str, what: str) -> DivergedError:
    """The error that says which learner diverged, and what to try."""
    return DivergedError(
        f"learner {name!r}: {what}; the last good checkpoint is kept. Try a smaller optimizer.lr, "
        "train.precision fp32, or fewer attack steps"
    )
