"""A run's figures on corrupted images and on sequences of small perturbations (RUN/evaluation/*/corruptions.json)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from generalist.comparison_rows import (
    CORRUPTIONS,
    GENERATED,
    LEVEL5,
    LEVELS,
    MAX_BYTES,
    OFFICIAL,
    SEQUENCES,
    SEQUENCES_MEAN,
    Cell,
)
from generalist.core.errors import RunError
from generalist.core.options import Options, first_problem
from generalist.data.corruptions import COMMON, SEVERITIES
from generalist.evaluation.accuracy import Accuracy
from generalist.evaluation.corruptions import STABILITY
from generalist.evaluation.out_of_distribution import FILE


class _Read(Options):
    """The part of the file that is needed: other fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class Counted(_Read):
    """An accuracy."""

    correct: int = Field(ge=0)
    """The number of images that are right."""
    total: int = Field(ge=1, lt=2**53)
    """The number of all images."""

    @model_validator(mode="after")
    def _at_most_all(self) -> Self:
        if self.correct > self.total:
            raise ValueError(f"{self.correct} of {self.total} is no accuracy")
        return self

    @property
    def value(self) -> float:
        return self.correct / self.total


class Corrupted(_Read):
    """One corruption."""

    mean: float = Field(ge=0, le=1)
    """The mean accuracy over the severities."""
    severities: dict[Annotated[str, Field(pattern="^[1-5]$")], Counted] = Field(min_length=1)
    """Accuracy by severity."""


class Corruptions(_Read):
    """Accuracy on corrupted images."""

    source: str = ""
    """Generated or the official files, in words."""
    generated: bool
    """Whether this library corrupted the images."""
    corruptions: dict[str, Corrupted] = Field(min_length=1)
    """By name."""
    mean: float = Field(ge=0, le=1)
    """The mean over all corruptions and severities."""

    @model_validator(mode="after")
    def _of_the_same_images(self) -> Self:
        totals = {accuracy.total for found in self.corruptions.values() for accuracy in found.severities.values()}
        if len(totals) > 1:
            raise ValueError("all corruptions of an evaluation must have the same number of images")
        return self


class Sequenced(_Read):
    """One kind of perturbation sequence."""

    accuracy: float = Field(ge=0, le=1)
    """Accuracy over all frames."""
    flip_rate: float = Field(ge=0, le=1)
    """How often the prediction changes between frames."""


class Perturbations(_Read):
    """Stability over sequences of small perturbations."""

    generated: bool
    """Whether this library perturbed the images."""
    samples: int = Field(ge=1)
    """The number of images, each with a sequence of frames."""
    sequences: dict[str, Sequenced] = Field(min_length=1)
    """By name."""


class Shifted(_Read):
    """corruptions.json."""

    corruptions: Corruptions | None = None
    """Present if corruptions were requested."""
    perturbations: Perturbations | None = None
    """Present if sequences were requested."""


def read_shift(folder: Path) -> Shifted | None:
    """What an evaluation in this folder measured; None if neither was requested."""
    path = folder / FILE
    if not path.exists():
        return None
    if not path.is_file():
        raise RunError(f"{path} is not a file: remove it, or evaluate again")
    if path.stat().st_size > MAX_BYTES:
        raise RunError(f"{path} is too large for a file of corruptions; evaluate again")
    try:
        return Shifted.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RunError(f"{path} is damaged: {first_problem(error)[:200]}; evaluate again") from None


# -- figures ----------------------------------------------------------------------------------------------------------


def shift_figures(folders: Iterable[Path]) -> tuple[dict[str, Cell], dict[str, Cell]]:
    """The means of these evaluations, and all single figures.

    Figures on more images take precedence. Of equally large evaluations the first counts, so that figures stay
    together: the worse of two draws of corruptions is no stronger attack.
    """
    means: dict[str, Cell] = {}
    single: dict[str, Cell] = {}
    for shift in (shift for folder in folders if (shift := read_shift(folder)) is not None):
        for kept, found in ((means, _means(shift)), (single, _single(shift))):
            for column, cell in found:
                if column not in kept or (cell.samples or 0) > (kept[column].samples or 0):
                    kept[column] = cell
    return means, single


def _means(shift: Shifted) -> Iterator[tuple[str, Cell]]:
    """The means over the benchmark's 15 corruptions and ten sequences, if all of them were measured: a mean over others
    is another figure. They have no interval, because Wilson's assumes images that are independent of each other."""
    if shift.corruptions is not None:
        kind = _kind(shift.corruptions.generated)
        for name, severities in ((LEVEL5, SEVERITIES[-1:]), (LEVELS, SEVERITIES)):
            if found := _every(shift.corruptions, severities):
                yield f"{kind} {name}", Cell(fmean(entry.value for entry in found), samples=found[0].total)
    if shift.perturbations is not None and shift.perturbations.sequences.keys() >= set(STABILITY):
        mean = fmean(shift.perturbations.sequences[name].accuracy for name in STABILITY)
        yield (
            f"{_kind(shift.perturbations.generated)} {SEQUENCES_MEAN}",
            Cell(mean, samples=shift.perturbations.samples),
        )


def _every(found: Corruptions, severities: Sequence[int]) -> list[Counted]:
    """The 15 common corruptions at these severities; empty if one of them is missing."""
    by_name = [found.corruptions[name].severities for name in COMMON if name in found.corruptions]
    wanted = [str(severity) for severity in severities]
    if len(by_name) < len(COMMON) or not all(entry.keys() >= set(wanted) for entry in by_name):
        return []
    return [entry[severity] for entry in by_name for severity in wanted]


def _single(shift: Shifted) -> Iterator[tuple[str, Cell]]:
    if shift.corruptions is not None:
        kind = _kind(shift.corruptions.generated)
        for name, found in shift.corruptions.corruptions.items():
            for severity, entry in found.severities.items():
                low, high = Accuracy(entry.correct, entry.total).interval
                yield f"{kind} {CORRUPTIONS}/{name} {severity}", Cell(entry.value, low, high, entry.total)
    if shift.perturbations is not None:
        kind, samples = _kind(shift.perturbations.generated), shift.perturbations.samples
        for name, sequence in shift.perturbations.sequences.items():
            yield f"{kind} {SEQUENCES}/{name}", Cell(sequence.accuracy, samples=samples)


def _kind(generated: bool) -> str:
    return GENERATED if generated else OFFICIAL
