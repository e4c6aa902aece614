"""The eager engine: one iteration of every learner and of the global learner, operation by operation.

It runs everywhere and is the reference. Nothing in an iteration waits for the device, and everything that changes
from one iteration to the next is a device scalar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from generalist.core.compiling import compiled
from generalist.core.errors import DivergedError
from generalist.core.random import host_seed
from generalist.data.augment import AugmentOptions
from generalist.data.sets import Batch, Images, iterate
from generalist.objectives.base import Metrics, Progress
from generalist.training.global_learner import GlobalLearner
from generalist.training.learner import Learner
from generalist.training.options import Job
from generalist.training.parallel import Parallel, parallel_for


class EagerEngine:
    """Steps the learners. `sums` collects the metrics they report, as (sum, count), until `take_means`."""

    def __init__(
        self, job: Job, learners: Sequence[Learner], global_learner: GlobalLearner, parallel: Parallel | None = None
    ) -> None:
        self.job = job
        self.parallel = parallel or parallel_for(job)
        self.learners = learners
        self.own = [learners[a] for a in self.parallel.own]
        self.global_learner = global_learner
        vector = global_learner.vector
        self.device, self.dtype = vector.device, vector.dtype
        self.layout = torch.channels_last if job.train.channels_last else torch.contiguous_format
        count = len(learners)
        self.lr = torch.zeros(count, dtype=self.dtype, device=self.device)
        self.gammas = torch.zeros(count, dtype=torch.float64, device=self.device)
        self.step = torch.zeros((), dtype=torch.int64, device=self.device)
        self.epoch = torch.zeros((), dtype=torch.int64, device=self.device)
        self.first_bad = torch.full((len(self.own),), -1, dtype=torch.int64, device=self.device)
        self.scalars = [
            {name: torch.zeros((), dtype=self.dtype, device=self.device) for name in learner.schedules()}
            for learner in learners
        ]
        self.variants = tuple(learner.objective.variants[0] for learner in learners)
        self.sums: dict[str, Tensor] = {}
        self._collect = collect

    def compile(self) -> None:
        """Compile the parts of an iteration that belong to no learner."""
        self._collect = compiled(collect)
        self.global_learner.compile()

    def feed(
        self, images: Images, batches: Sequence[Tensor], *, epoch: int, seed: int, options: AugmentOptions
    ) -> Iterator[Batch]:
        """The batches to pass to `iteration`, in order: this rank's part of each."""
        return iterate(
            images, [self.parallel.part_of(batch) for batch in batches], epoch=epoch, seed=seed, options=options
        )

    def set_progress(self, *, step: int, epoch: int, position: float) -> None:
        """Set learning rates, mixing weights and the objectives' own schedules for iteration `step`.

        `position` is the number of epochs done, fractional.
        """
        epochs = self.job.train.epochs
        rates = [
            self.job.learning_rate(learner.options) * learner.options.schedule.at(position, epochs)
            for learner in self.learners
        ]
        fill(self.lr, rates)
        fill(self.gammas, self.job.gammas_at(position))
        self.global_learner.decay.fill_(self.job.mixing.decay_at(position, epochs))
        self.variants = tuple(
            learner.objective.variant(step, epoch) if a in self.parallel.own else self.variants[a]
            for a, learner in enumerate(self.learners)
        )
        # Dropout and the like draw from torch's generators. Seeded by the step, these need no place in a checkpoint
        # either. Ranks that share a batch have different samples of it, so each draws its own numbers.
        purpose = f"generator/{self.parallel.column}" if self.parallel.column else "generator"
        generator_seed = host_seed(self.job.train.seed, purpose, step)
        torch.default_generator.manual_seed(generator_seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(generator_seed)
        self.step.fill_(step)
        self.epoch.fill_(epoch)
        for learner, scalars in zip(self.learners, self.scalars, strict=True):
            for name, schedule in learner.schedules().items():
                scalars[name].fill_(schedule.at(position, epochs))

    def iteration(self, batch: Batch) -> None:
        """One step of every learner, then of the global learner."""
        self.conclude(self.step_learners(self.prepared(batch), self.parallel.own))

    def prepared(self, batch: Batch) -> Batch:
        """The batch with its images in the networks' own type and memory layout."""
        return replace(batch, x=batch.x.to(self.dtype).contiguous(memory_format=self.layout))

    def conclude(self, found: Mapping[int, Metrics]) -> None:
        """Add up the metrics that the learners reported, by learner number, and step the global learner."""
        metrics = [found[a] for a in self.parallel.own]
        losses = [each["loss"] for each in metrics]
        self._collect(self.first_bad, self.step, losses, *self._totals(metrics), self.parallel.share)
        self.global_learner.update(self.learners, self.gammas)

    def _totals(self, metrics: Sequence[Metrics]) -> tuple[list[Tensor], list[Tensor]]:
        """For every reported metric its running sum, and its new value."""
        values = {
            f"{learner.name}.{name}": value
            for learner, found in zip(self.own, metrics, strict=True)
            for name, value in found.items()
        }
        for key in values:  # in this order, which metrics.jsonl keeps
            if key not in self.sums:
                self.sums[key] = torch.zeros(2, dtype=torch.float64, device=self.device)
        return [self.sums[key] for key in values], list(values.values())

    def step_learners(self, batch: Batch, among: Sequence[int]) -> dict[int, Metrics]:
        """One step of each of these learners, by learner number; none depends on another."""
        return {a: self.step_learner(a, batch) for a in among}

    def step_learner(self, a: int, batch: Batch) -> Metrics:
        progress = Progress(self.step, self.epoch, self.lr[a], self.variants[a], self.scalars[a])
        return self.learners[a].step(batch, progress)

    def take_means(self) -> dict[str, dict[str, float]]:
        """Means of the reported metrics since the last call, by learner."""
        means: dict[str, dict[str, float]] = {learner.name: {} for learner in self.learners}
        for key, total in self.gathered_sums().items():
            name, _, metric = key.partition(".")
            value, count = total.tolist()
            if count:
                means[name][metric] = value / count
        for total in self.sums.values():
            total.zero_()
        return means

    def gathered_sums(self) -> dict[str, Tensor]:
        """The sums over all ranks, on the host, in the order of the learners."""
        parts = self.parallel.group.gather_objects({key: total.cpu() for key, total in self.sums.items()})
        keys = list(dict.fromkeys(key for part in parts for key in part))
        names = [learner.name for learner in self.learners]
        keys.sort(key=lambda key: names.index(key.partition(".")[0]))
        return {key: torch.stack([part[key] for part in parts if key in part]).sum(0) for key in keys}

    def check_finite(self, *, weights: bool = False) -> None:
        """Raise if a learner's loss, or with `weights` any of its weights, is no longer finite. Waits for the device.

        A finite loss can have an infinite gradient, which shows in the weights before it shows in the next loss.
        """
        for learner, step in zip(self.own, self.first_bad.tolist(), strict=True):
            if step >= 0:
                raise diverged(learner.name, f"the loss is not finite at step {step}")
            if weights and not bool(torch.isfinite(learner.flat.vector).all()):
                raise diverged(learner.name, f"the weights are not finite after step {int(self.step)}")


def fill(places: Tensor, values: Sequence[float]) -> None:
    """Set the places one by one: copying a tensor from the host would wait for all the device's pending work."""
    for place, value in zip(places, values, strict=True):
        place.fill_(value)


@torch.no_grad()
def collect(
    first_bad: Tensor,
    step: Tensor,
    losses: Sequence[Tensor],
    sums: Sequence[Tensor],
    values: Sequence[Tensor],
    share: float = 1.0,
) -> None:
    """Note the first step at which a loss is not finite, and add the values up, with their count.

    `share` is this rank's part of the batch, over which the values are means.
    """
    fresh = ~torch.isfinite(torch.stack(list(losses))) & (first_bad < 0)
    first_bad.copy_(torch.where(fresh, step, first_bad))
    for total, value in zip(sums, values, strict=True):
        total.add_(torch.stack([value.double(), torch.ones_like(value, dtype=torch.float64)]), alpha=share)


def diverged(name: str, what: str) -> DivergedError:
    """The error that says which learner diverged, and what to try."""
    return DivergedError(
        f"learner {name!r}: {what}; the last checkpoint before that, if there is one, is kept. Try a smaller "
        "optimizer.lr, train.precision fp32, or fewer attack steps, with another --out"
    )
