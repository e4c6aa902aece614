"""What is measured: an engine as the training loop runs it, or the published code's loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path

import torch
from torch import Tensor, nn

from generalist.bench.published import PublishedLoop
from generalist.core.errors import DataError
from generalist.core.run import RunDirectory
from generalist.data.options import Splits
from generalist.data.sampler import epoch_batches
from generalist.models import build_model
from generalist.training.build import with_extra
from generalist.training.loop import Listener, Trainer
from generalist.training.options import Job
from generalist.training.validation import validation_indices

BATCHES = 8
"""The number of different batches; they repeat, so that every subject sees the same ones."""


@dataclass(frozen=True)
class Subject:
    """Something that can be iterated."""

    step: Callable[[], None]
    losses: Callable[[], dict[str, float]]
    """Each learner's mean loss over the iterations so far, to show that subjects do the same work."""


@dataclass(frozen=True)
class Setting:
    """What all subjects of a benchmark share."""

    job: Job
    splits: Splits
    device: torch.device
    total: int
    """The most iterations of a subject, including the warm-up."""
    trust_code: bool = False

    def network(self) -> nn.Module:
        """A fresh network of the recipe, on the device."""
        images, job = self.splits.train, self.job
        model = build_model(
            job.model,
            num_classes=len(images.classes),
            shape=images.shape,
            seed=job.train.seed,
            trust_code=self.trust_code,
        )
        return model.to(self.device)


def engine_subject(setting: Setting, engine: str, say: Callable[[str], None]) -> Subject:
    """A real trainer; its engine is fed and stepped as in `Trainer`, without validation and checkpoints."""
    # `auto` depends on the length of the run, and a benchmark stands for a long one.
    compiled = engine == "graph" if setting.job.train.compile == "auto" else setting.job.train.compile
    train = setting.job.train.model_copy(update={"engine": engine, "compile": compiled})
    job = setting.job.model_copy(update={"train": train})
    with tempfile.TemporaryDirectory() as folder:  # a trainer needs a directory, but writes nothing before it runs
        trainer = Trainer(
            job,
            RunDirectory(Path(folder)),
            setting.splits,
            device=setting.device,
            trust_code=setting.trust_code,
            listener=Listener(say=say),
        )
    epoch = train.epochs  # the last, in which no objective is within its warm-up
    for learner in trainer.learners:
        learner.objective.epoch_start(epoch)
    batches = list(islice(cycle(_batches(job, trainer.train_index, trainer.extra_index)), setting.total))
    feed = trainer.engine.feed(
        trainer.train_images, batches, epoch=epoch, seed=train.seed, options=job.data.augmentation
    )
    numbers = count()

    def step() -> None:
        trainer.engine.set_progress(step=next(numbers), epoch=epoch, position=0.0)
        trainer.engine.iteration(next(feed))

    return Subject(step, lambda: {name: means["loss"] for name, means in trainer.engine.take_means().items()})


def published_subject(setting: Setting) -> Subject:
    """The published code's loop. Its batches are already on the device, so loading and augmentation cost it nothing."""
    job, device = setting.job, setting.device
    _, _, train_index = validation_indices(job, setting.splits)
    together, extra_index = with_extra(setting.splits)
    images = together.to(device)
    batches = [
        images.augmented(index, epoch=job.train.epochs, seed=job.train.seed, options=job.data.augmentation)
        for index in _batches(job, train_index, extra_index)
    ]
    loop = PublishedLoop(job, setting.network())
    feed = cycle(batches)
    seen: list[list[float]] = []

    def losses() -> dict[str, float]:
        means = torch.tensor(seen).mean(0).tolist()
        return dict(zip([learner.name for learner in job.learners], means, strict=True))

    return Subject(lambda: seen.append(loop.iteration(next(feed))), losses)


def _batches(job: Job, train_index: Tensor, extra_index: Tensor | None) -> list[Tensor]:
    extra = job.data.extra
    whole = epoch_batches(
        train_index,
        extra_index=extra_index,
        ratio=extra.ratio if extra else 0.0,
        batch_size=job.train.batch_size,
        seed=job.train.seed,
        epoch=1,
        last=job.train.last_batch,
    )
    full = [batch for batch in whole if len(batch) == job.train.batch_size]
    if not full:
        raise DataError(f"{len(train_index)} images do not fill one batch: make train.batch_size smaller")
    return full[:BATCHES]
