"""Accuracy of the global learner and of every learner on the validation images, and the measures of mixing."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generalist.attacks.accuracy import logits_of
from generalist.attacks.pgd import AttackOptions, pgd
from generalist.attacks.threats import Threat, ThreatOptions
from generalist.core.distributed import Group
from generalist.core.errors import DataError
from generalist.core.run import GLOBAL
from generalist.data.options import Splits
from generalist.data.sets import Batch, Images, iterate
from generalist.data.split import hold_out, subset
from generalist.tensors.flat import Flat
from generalist.tensors.folding import CannotFoldError, FoldedNetwork
from generalist.tensors.fused import fastest
from generalist.tensors.modes import computing_in
from generalist.training.global_learner import GlobalLearner, mix
from generalist.training.learner import Learner
from generalist.training.measures import drift, ensemble, mixing_gap
from generalist.training.options import Job
from generalist.training.validation_options import ValidationOptions


@dataclass
class Validation:
    """What one validation found. Accuracies are fractions, by subject and then `natural` or threat."""

    accuracy: dict[str, dict[str, float]]
    task_loss: dict[str, float]
    """Each learner's loss on its own task."""
    clipped_loss: dict[str, float]
    """The same with every image's loss clipped to [0, 1], for the regret."""
    ensemble: float
    drift: float
    gap: float
    finite: bool = True
    """Whether the global learner's loss is finite on every image."""

    def score(self, options: ValidationOptions) -> float:
        """The global learner's score by the recipe's rule; the best epoch has the highest.

        It is below zero if the natural accuracy is too low to be chosen. Such epochs rank by that accuracy, so that
        the closest is kept if no epoch reaches the minimum.
        """
        accuracy = self.accuracy[GLOBAL]
        natural = accuracy["natural"]
        robust = [value for name, value in accuracy.items() if name != "natural"]
        mean_robust = sum(robust) / len(robust) if robust else 0.0
        if natural < options.min_natural:
            return natural - 2
        return {"sum": natural + mean_robust, "natural": natural, "robust": mean_robust, "last": 0.0}[options.rule]

    def record(self) -> dict[str, Any]:
        """As metrics.jsonl keeps it."""
        return {"accuracy": self.accuracy, "ensemble": self.ensemble, "drift": self.drift, "mixing_gap": self.gap}


def validation_indices(job: Job, splits: Splits) -> tuple[Images, Tensor, Tensor]:
    """(images to validate on, their indices, the indices left to train on)."""
    options, train, test = job.validation, splits.train, splits.test
    if options.split == "held-out":
        kept, held = hold_out(train.labels, count=options.images, classes=len(train.classes), seed=job.train.seed)
        return train, held, kept
    if test is None:
        raise DataError(f"{train.name} has no test split to validate on: set validation.split to held-out")
    count = min(options.images, len(test))
    return test, subset(len(test), count, job.train.seed), torch.arange(len(train))


def validation_attack(options: ValidationOptions, threat: ThreatOptions) -> AttackOptions:
    """PGD as validation runs it."""
    return AttackOptions(steps=options.steps, step=options.step.get(threat.norm))


@dataclass
class _Tally:
    """Running totals of one subject."""

    correct: dict[str, int] = field(default_factory=dict)
    loss: float = 0.0
    clipped: float = 0.0

    def add(self, name: str, correct: Tensor) -> None:
        self.correct[name] = self.correct.get(name, 0) + int(correct.sum().item())


class Validator:
    """Validates a set of learners on fixed images, which the ranks of a group share."""

    def __init__(self, job: Job, images: Images, index: Tensor, group: Group | None = None) -> None:
        self.job, self.images, self.group = job, images, group or Group()
        own = index[self.group.rank :: self.group.world]
        self.batches = list(torch.split(own, job.validation.batch_size)) if len(own) else []
        self.count = len(index)
        self.threats = [(options.build(), validation_attack(job.validation, options)) for options in job.threats()]

    def __call__(
        self, learners: Sequence[Learner], global_learner: GlobalLearner, gammas: Sequence[float]
    ) -> Validation:
        """Measure every subject on every image; one network at a time, so memory does not grow with N."""
        flat = Flat(copy.deepcopy(learners[0].model))
        self.constant = self._folded(flat)
        subjects = {learner.name: learner.flat.vector for learner in learners}
        kinds = ["natural", *(str(threat) for threat, _ in self.threats)]
        tallies = {name: _Tally(dict.fromkeys(kinds, 0)) for name in (GLOBAL, *subjects)}
        mixed = mix(list(subjects.values()), gammas)
        gap, ensemble_correct = 0.0, 0
        for batch in self._batches(flat.vector.dtype):
            self._put(flat, global_learner.vector)
            self._measure(flat, batch, tallies[GLOBAL], own=None)
            logits = []
            for learner in learners:
                self._put(flat, learner.flat.vector)
                logits.append(self._measure(flat, batch, tallies[learner.name], own=learner))
            self._put(flat, mixed)
            gap += mixing_gap(self._logits(flat, batch.x), logits, gammas).sum().item()
            ensemble_correct += int((ensemble(logits, gammas).argmax(1) == batch.y).sum().item())
        gap, ensemble_correct = self._together(tallies, gap, ensemble_correct)
        size = learners[0].flat.parameter_size
        return Validation(
            accuracy={
                name: {kind: correct / self.count for kind, correct in tally.correct.items()}
                for name, tally in tallies.items()
            },
            task_loss={learner.name: tallies[learner.name].loss / self.count for learner in learners},
            finite=math.isfinite(tallies[GLOBAL].loss),
            clipped_loss={learner.name: tallies[learner.name].clipped / self.count for learner in learners},
            ensemble=ensemble_correct / self.count,
            drift=drift([learner.flat.parameters for learner in learners], global_learner.vector[:size], gammas),
            gap=gap / self.count,
        )

    def _together(self, tallies: dict[str, _Tally], gap: float, ensemble_correct: int) -> tuple[float, int]:
        """Add up the counts of all ranks, so that all continue with the same figures."""
        if self.group.world == 1:
            return gap, ensemble_correct
        figures = [gap, ensemble_correct]
        for tally in tallies.values():
            figures += [tally.loss, tally.clipped, *tally.correct.values()]
        numbers = iter(self.group.sum(torch.tensor(figures, dtype=torch.float64)).tolist())
        gap, ensemble_correct = next(numbers), int(next(numbers))
        for tally in tallies.values():
            tally.loss, tally.clipped = next(numbers), next(numbers)
            tally.correct = {kind: int(next(numbers)) for kind in tally.correct}
        return gap, ensemble_correct

    def _folded(self, flat: Flat) -> FoldedNetwork | None:
        """On a GPU, the network in its fastest form, if it has one."""
        if flat.vector.device.type != "cuda" or self.job.train.engine == "eager":
            return None
        try:
            return fastest(flat.module, self.job.train.autocast or flat.vector.dtype, shape=self.images.shape)
        except CannotFoldError:  # training has said so already
            return None

    def _put(self, flat: Flat, vector: Tensor) -> None:
        flat.vector.copy_(vector)
        if self.constant is not None:
            self.constant.refresh()

    def _batches(self, dtype: torch.dtype) -> Iterator[Batch]:
        for batch in iterate(self.images, self.batches):
            yield replace(batch, x=batch.x.to(dtype))

    def _measure(self, flat: Flat, batch: Batch, tally: _Tally, *, own: Learner | None) -> Tensor:
        """Count one batch for the weights now in `flat`; returns the natural logits."""
        natural = self._logits(flat, batch.x)
        right = natural.argmax(1) == batch.y
        tally.add("natural", right)
        task_logits = natural
        for threat, options in self.threats:
            logits = self._attacked(flat, batch, threat, options)
            tally.add(str(threat), right & (logits.argmax(1) == batch.y))
            if own is not None and own.threat == threat:
                task_logits = logits
        if own is not None and own.threat is not None and own.threat not in [threat for threat, _ in self.threats]:
            attack = own.view.attack.model_copy(update={"batchnorm": "eval"})  # no matter which images share a batch
            task_logits = self._attacked(flat, batch, own.threat, attack)
        losses = F.cross_entropy(task_logits, batch.y, reduction="none")
        tally.loss += losses.sum().item()
        tally.clipped += losses.clamp(0, 1).sum().item()
        return natural

    def examples(self, learner: Learner, global_learner: GlobalLearner, count: int) -> dict[str, Tensor]:
        """The first `count` validation images, natural and attacked by PGD in each threat against the global learner.

        For display: float32 on the CPU. `learner` only provides the architecture, so any will do.
        """
        flat = Flat(copy.deepcopy(learner.model))
        flat.vector.copy_(global_learner.vector)
        batch = self.images.batch(self.batches[0][:count])
        batch = replace(batch, x=batch.x.to(flat.vector.dtype))
        found = {"validation images": batch.x}
        for threat, options in self.threats:
            found[f"attacked, {threat}"] = self._adversarial(flat.module, batch, threat, options)
        return {name: x.float().cpu() for name, x in found.items()}

    def _attacked(self, flat: Flat, batch: Batch, threat: Threat, options: AttackOptions) -> Tensor:
        """Logits of the images after PGD."""
        return self._logits(flat, self._adversarial(self.constant or flat.module, batch, threat, options))

    def _adversarial(
        self, network: FoldedNetwork | nn.Module, batch: Batch, threat: Threat, options: AttackOptions
    ) -> Tensor:
        with computing_in(self.job.train.autocast, batch.x.device):
            return pgd(
                network,
                batch.x,
                batch.y,
                threat=threat,
                options=options,
                seed=self.job.train.seed,
                purpose=f"validation/{threat}",
                index=batch.index,
            )

    def _logits(self, flat: Flat, x: Tensor) -> Tensor:
        # A context of its own for each network: autocast may remember casts of weights that change below it.
        with computing_in(self.job.train.autocast, x.device):
            return logits_of(flat.module, x)
