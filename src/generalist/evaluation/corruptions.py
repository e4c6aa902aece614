"""Out of distribution: accuracy on corrupted images, and stability over sequences of small perturbations.

On images of any set the corruptions are generated; results say so, as their numbers are not those of the official
files, which are evaluated by handing over what `generalist.data.cifar_c` loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from generalist.attacks.accuracy import correct_natural, logits_of
from generalist.attacks.base import answers
from generalist.core.errors import GeneralistError
from generalist.data.cifar_c import CifarC, CifarP
from generalist.data.corruptions import (
    COMMON,
    CORRUPTIONS,
    SEQUENCES,
    SEVERITIES,
    corrupt,
    is_noise,
    perturb_sequence,
)
from generalist.data.sets import Batch, Images, iterate
from generalist.evaluation.accuracy import Accuracy
from generalist.evaluation.classifier import AnyPrecision
from generalist.evaluation.counts import Count, Counts

STABILITY = (
    "gaussian_noise", "shot_noise", "motion_blur", "zoom_blur", "spatter", "brightness", "translate", "rotate", "tilt",
    "scale",
)  # fmt: skip
"""The ten sequences of the benchmark's mean flip rate."""

_FRAMES = 31

Listener = Callable[[int, int, int], None]
"""Told after each batch: how many images were measured in this call, of how many, and how many answers were right."""


def _source(generated: bool) -> str:
    return "generated, not the official files" if generated else "official files"


@dataclass(frozen=True)
class CorruptionResult:
    """Accuracy by corruption and severity. Means weigh every corruption alike."""

    data: str
    generated: bool
    """Whether the images were corrupted by this library; False for the official files."""
    seed: int | None
    """The key of the corruptions' draws; None for the official files, where there are none."""
    accuracies: Mapping[str, Mapping[int, Accuracy]]

    @property
    def severities(self) -> list[int]:
        return list(next(iter(self.accuracies.values())))

    def mean_of(self, name: str) -> float:
        """The mean over the severities of one corruption."""
        return fmean(accuracy.value for accuracy in self.accuracies[name].values())

    def mean_at(self, severity: int) -> float:
        """The mean over the corruptions at one severity."""
        return fmean(by_severity[severity].value for by_severity in self.accuracies.values())

    @property
    def level5(self) -> float | None:
        """The mean over the corruptions at severity 5; None where it was not asked for."""
        return self.mean_at(5) if 5 in self.severities else None

    @property
    def mean(self) -> float:
        """The mean over all corruptions and severities."""
        return fmean(self.mean_of(name) for name in self.accuracies)

    def to_dict(self) -> dict[str, Any]:
        """What corruptions.json says: shares from 0 to 1, with Wilson's 95% intervals."""
        return {
            "data": self.data,
            "source": _source(self.generated),
            "generated": self.generated,
            "seed": self.seed,
            "severities": self.severities,
            "corruptions": {
                name: {"mean": self.mean_of(name), "severities": {str(s): a.as_json() for s, a in found.items()}}
                for name, found in self.accuracies.items()
            },
            "mean_by_severity": {str(severity): self.mean_at(severity) for severity in self.severities},
            "level5_mean": self.level5,
            "mean": self.mean,
        }


@dataclass(frozen=True)
class Stability:
    """How a model bears one kind of sequence."""

    accuracy: float
    """The share of right answers over all frames of all samples."""
    flip_rate: float
    """The probability that the answer changes from one frame to the next; for noise, from the first to another one."""
    frames: int


@dataclass(frozen=True)
class PerturbationResult:
    """Accuracy and flip rate by sequence. Means weigh every sequence alike."""

    data: str
    generated: bool
    seed: int | None
    samples: int
    sequences: Mapping[str, Stability]

    @property
    def mean_accuracy(self) -> float:
        return fmean(found.accuracy for found in self.sequences.values())

    @property
    def mean_flip_rate(self) -> float:
        return fmean(found.flip_rate for found in self.sequences.values())

    def to_dict(self) -> dict[str, Any]:
        """Shares from 0 to 1."""
        return {
            "data": self.data,
            "source": _source(self.generated),
            "generated": self.generated,
            "seed": self.seed,
            "samples": self.samples,
            "sequences": {
                name: {"accuracy": found.accuracy, "flip_rate": found.flip_rate, "frames": found.frames}
                for name, found in self.sequences.items()
            },
            "mean_accuracy": self.mean_accuracy,
            "mean_flip_rate": self.mean_flip_rate,
        }


def evaluate_corruptions(
    model: nn.Module,
    images: Images | CifarC,
    *,
    names: Sequence[str] = COMMON,
    severities: Sequence[int] = SEVERITIES,
    index: Tensor | None = None,
    seed: int = 0,
    batch_size: int = 500,
    counts: Counts | None = None,
    listener: Listener = lambda done, total, right: None,
) -> CorruptionResult:
    """Accuracy on the images of `index` (all by default) under each corruption at each severity.

    Images of any set are corrupted here, keyed by the seed and each sample's number; the official files are read as
    they are. What is named twice counts once. What `counts` has is not measured again; all else is added to them.
    """
    names, severities = _named("names", names), _named("severities", severities)
    for severity in severities:
        _check_severity(severity)
    index = _check_index(index, len(images), batch_size)
    model = AnyPrecision(model)
    generated = not isinstance(images, CifarC)
    if generated:
        for name in names:
            CORRUPTIONS.get(name)  # a wrong name is told before the first of many batches
    wanted = {f"{name}/{severity}": (name, severity) for name in names for severity in severities}
    work = _Work(list(wanted), torch.split(index, batch_size), Counts() if counts is None else counts, listener)
    for number, what, batch in _corrupted(images, work, wanted, seed):
        work.add(number, what, Count(int(correct_natural(model, batch).sum()), len(batch.y)))
    return CorruptionResult(
        data=images.name,
        generated=generated,
        seed=seed if generated else None,
        accuracies={name: {s: _accuracy(work.total(f"{name}/{s}")) for s in severities} for name in names},
    )


def _accuracy(count: Count) -> Accuracy:
    return Accuracy(count.right, count.answers)


class _Work:
    """What is to be counted in each batch, less what was counted already.

    Batches come one after the other with all that is wanted of each: images of a folder are decoded once.
    """

    def __init__(self, whats: Sequence[str], batches: Sequence[Tensor], counts: Counts, listener: Listener) -> None:
        self.batches, self._counts, self._listener = batches, counts, listener
        left = {number: [what for what in whats if (what, number) not in counts] for number in range(len(batches))}
        self.left = {number: rest for number, rest in left.items() if rest}
        """What is left, by the number of the batch; one with nothing left is not read."""
        self._done = self._right = 0
        self._total = sum(len(batches[number]) * len(rest) for number, rest in self.left.items())

    def loaded(self, images: Images) -> Iterator[tuple[int, str, Batch]]:
        """Each batch as it is, for everything that is left to count in it."""
        loaded = iterate(images, [self.batches[number] for number in self.left])
        for (number, rest), batch in zip(self.left.items(), loaded, strict=True):
            yield from ((number, what, batch) for what in rest)

    def add(self, number: int, what: str, count: Count) -> None:
        self._counts.add(what, number, count)
        self._done += len(self.batches[number])
        self._right += count.right
        self._listener(self._done, self._total, self._right)

    def total(self, what: str) -> Count:
        return self._counts.total(what, len(self.batches))


def _corrupted(
    images: Images | CifarC, work: _Work, wanted: Mapping[str, tuple[str, int]], seed: int
) -> Iterator[tuple[int, str, Batch]]:
    """Every batch under every corruption at every severity that is left."""
    if isinstance(images, CifarC):
        for number, rest in work.left.items():
            yield from ((number, what, images.batch(*wanted[what], work.batches[number])) for what in rest)
        return
    for number, what, batch in work.loaded(images):
        name, severity = wanted[what]
        x = corrupt(batch.x, name=name, severity=severity, index=batch.index, seed=seed)
        yield number, what, replace(batch, x=x)


def evaluate_perturbations(
    model: nn.Module,
    images: Images | CifarP,
    *,
    names: Sequence[str] = STABILITY,
    index: Tensor | None = None,
    seed: int = 0,
    batch_size: int = 500,
    counts: Counts | None = None,
    listener: Listener = lambda done, total, right: None,
) -> PerturbationResult:
    """Accuracy and flip rate over sequences of small perturbations of the images of `index` (all by default).

    Frames of about `batch_size` go through the model at a time. What `counts` has is not measured again; all else is
    added to them.
    """
    names = _named("names", names)
    index = _check_index(index, len(images), batch_size)
    model = AnyPrecision(model)
    generated = not isinstance(images, CifarP)
    if generated:
        for name in names:
            SEQUENCES.get(name)
    work = _Work(
        names, torch.split(index, max(1, batch_size // _FRAMES)), Counts() if counts is None else counts, listener
    )
    for number, name, batch in _sequences(images, work, seed):
        every = batch.index.repeat_interleave(batch.x.shape[1])
        predictions = answers(logits_of(model, batch.x.flatten(0, 1)), every).reshape(batch.x.shape[:2])
        right = int((predictions == batch.y[:, None]).sum())
        work.add(number, name, Count(right, predictions.numel(), _flips(predictions, noise=is_noise(name))))
    return PerturbationResult(
        data=images.name,
        generated=generated,
        seed=seed if generated else None,
        samples=len(index),
        sequences={name: _stability(work.total(name), len(index)) for name in names},
    )


def _stability(count: Count, samples: int) -> Stability:
    return Stability(
        accuracy=count.right / count.answers,
        flip_rate=count.flips / (count.answers - samples),
        frames=count.answers // samples,
    )


def _sequences(images: Images | CifarP, work: _Work, seed: int) -> Iterator[tuple[int, str, Batch]]:
    if isinstance(images, CifarP):
        for number, rest in work.left.items():
            yield from ((number, name, images.sequences(name, work.batches[number])) for name in rest)
        return
    for number, name, batch in work.loaded(images):
        yield number, name, replace(batch, x=perturb_sequence(batch.x, name=name, index=batch.index, seed=seed))


def _flips(predictions: Tensor, *, noise: bool) -> int:
    """The flips of Hendrycks & Dietterich among predictions [N, frames].

    A flip is a frame whose prediction differs from that of the frame before, or for noise, whose frames have no order,
    from that of the first frame.
    """
    reference = predictions[:, :1] if noise else predictions[:, :-1]
    return int((predictions[:, 1:] != reference).sum())


def _named(what: str, values: Sequence[Any]) -> list[Any]:
    """Each value once, at least one of them."""
    if isinstance(values, str) or not values:
        raise GeneralistError(f"{what} must be a list of at least one, not {values!r}")
    return list(dict.fromkeys(values))


def _check_severity(severity: object) -> None:
    if type(severity) is not int or severity not in SEVERITIES:
        raise GeneralistError(f"severities must be whole numbers from 1 to 5, not {severity!r}")


def _check_index(index: Tensor | None, count: int, batch_size: int) -> Tensor:
    if batch_size < 1:
        raise GeneralistError(f"batch_size must be at least 1, not {batch_size}")
    if index is None:
        return torch.arange(count)
    if index.ndim != 1 or len(index) == 0 or index.is_floating_point() or index.dtype == torch.bool:
        raise GeneralistError("index must be a list of sample numbers, at least one")
    if int(index.min()) < 0 or int(index.max()) >= count:
        raise GeneralistError(f"index must hold numbers from 0 to {count - 1}")
    return index
