"""The contents of a page: everything in the run directories, read once and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from generalist.compare import named, rows_of, run_names
from generalist.comparison_rows import MAX_BYTES, Row
from generalist.core.errors import GeneralistError, RunError
from generalist.core.options import Options, first_problem
from generalist.core.run import RunDirectory
from generalist.dial import Curve, Measured, read_curve
from generalist.evaluation.records import SUMMARY
from generalist.method_names import method_of
from generalist.recipe import Recipe, load_recipe, stage_recipes
from generalist.shift_figures import Shifted, read_shift

MOST_RUNS = 100


class _Read(Options):
    """A file of this library, as far as the page needs it: other fields are ignored."""

    model_config = ConfigDict(extra="ignore")


Drawable = Annotated[float, Field(ge=-1e300, le=1e300)]
"""A number whose distance to any other such number is finite as well."""


class Validated(_Read):
    """The validation of an epoch."""

    accuracy: dict[str, dict[str, Drawable | None]] = Field(default_factory=dict)
    """By subject, then `natural` or threat, from 0 to 1."""
    drift: Drawable | None = None
    """sum_a gamma_a ||theta_a - theta||^2."""
    mixing_gap: Drawable | None = None
    """The mean distance of the mixed network's logits from the mixture of logits."""
    ensemble: Drawable | None = None
    """The accuracy of the mixture of logits, from 0 to 1."""


class Epoch(_Read):
    """A line of metrics.jsonl."""

    epoch: int = Field(ge=0, lt=2**53)
    """From 1."""
    train: dict[str, dict[str, Drawable | None]] = Field(default_factory=dict)
    """Loss and accuracy of each learner on its training batches."""
    gamma: dict[str, Drawable | None] = Field(default_factory=dict)
    """Every learner's share of the global learner."""
    redistributed: bool = False
    """Whether the learners restarted from the global one after it."""
    validation: Validated | None = None
    """Where this epoch was validated."""
    best_epoch: int | None = None
    """The best one so far."""
    warning: str = ""
    """A warning that must accompany these numbers."""


class Summary(_Read):
    """summary.json, except for the accuracies, which `generalist.compare` reads."""

    subject: str = "model"
    """Whose weights were evaluated."""
    split: str = ""
    """Which images."""
    samples: int = Field(default=0, ge=0)
    """How many were evaluated."""
    device: str = ""
    """The device that computed it."""
    identity: dict[str, Any] = Field(default_factory=dict)
    """Everything that its verdicts depend on."""
    indices: list[int] | None = None
    """The samples, unless all were evaluated."""
    classes: dict[str, dict[str, Measured]] = Field(default_factory=dict)
    """Accuracies by class, then `natural`, threat or `union`."""
    worst_case: dict[str, Measured] = Field(default_factory=dict)
    """By threat: the share that is right under everything that was tried."""
    warnings: list[str] = Field(default_factory=list)
    """What looks suspicious about the model."""
    notes: list[str] = Field(default_factory=list)
    """What was unusual in the search, or was left out."""


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of a network."""

    folder: Path
    summary: Summary
    shift: Shifted | None


@dataclass(frozen=True)
class Run:
    """One run directory."""

    directory: RunDirectory
    name: str
    """Short, and different from that of every other run on the page."""
    method: str
    recipe: Recipe
    environment: Mapping[str, Any]
    epochs: Sequence[Epoch]
    curve: Curve | None
    snapshots: bool

    @property
    def path(self) -> Path:
        return self.directory.path


@dataclass(frozen=True)
class Network:
    """An evaluated network of a run."""

    run: Run
    name: str
    series: int
    """Its number on the page, which determines its colour."""
    row: Row
    evaluations: Sequence[Evaluated]
    """The largest evaluation comes first."""

    @property
    def main(self) -> Evaluated:
        return self.evaluations[0]

    def said(self, what: Literal["warnings", "notes"]) -> list[str]:
        """The warnings or notes of all evaluations, without repeats: figures on the page may come from any of them."""
        return list(dict.fromkeys(text for found in self.evaluations for text in getattr(found.summary, what)))

    @property
    def mixture(self) -> Path | None:
        """The file of a mixture of the dial, if it is one."""
        path = self.run.path / "mix" / f"{self.row.subject}.safetensors"
        return path if path.is_file() else None

    @property
    def shift(self) -> Shifted:
        """The corruptions of the largest evaluation that has any, and the sequences of the largest that has those."""
        shifts = [found.shift for found in self.evaluations if found.shift is not None]
        return Shifted(
            corruptions=next((shift.corruptions for shift in shifts if shift.corruptions is not None), None),
            perturbations=next((shift.perturbations for shift in shifts if shift.perturbations is not None), None),
        )


@dataclass(frozen=True)
class Collection:
    """All runs of a page."""

    runs: Sequence[Run]
    networks: Sequence[Network]

    def without_evaluation(self) -> list[Run]:
        evaluated = {id(network.run) for network in self.networks}
        return [run for run in self.runs if id(run) not in evaluated]

    def network_of(self, run: Run) -> Network | None:
        """The network that stands for a run: that of its best epoch, if it was evaluated."""
        own = [network for network in self.networks if network.run is run]
        return next((n for n in own if n.row.subject == "best"), own[0] if own else None)


def collect(paths: Sequence[Path], *, trust_code: bool = False) -> Collection:
    """Read the runs. Damaged files are refused, missing ones left out."""
    if not paths:
        raise GeneralistError("name at least one run to report on")
    if len(paths) > MOST_RUNS:
        raise GeneralistError(f"a page holds at most {MOST_RUNS} runs, not {len(paths)}")
    runs = [_run(path, name, trust_code=trust_code) for path, name in zip(paths, run_names(paths), strict=True)]
    networks: list[Network] = []
    for run in runs:
        networks += _networks(run, first=len(networks), trust_code=trust_code)
    return Collection(runs, networks)


def _run(path: Path, name: str, *, trust_code: bool) -> Run:
    directory = RunDirectory(path).require()
    recipe = load_recipe(directory.recipe, trust_code=trust_code)
    curve = read_curve(directory) if (path / "mix" / "curve.json").exists() else None
    epochs = _epochs(directory)
    snapshots = bool(directory.snapshot_epochs())
    method = method_of(stage_recipes(recipe, trust_code=trust_code)[-1].learners)
    return Run(directory, name, method, recipe, _environment(directory), epochs, curve, snapshots)


def _epochs(directory: RunDirectory) -> list[Epoch]:
    if directory.metrics.is_file() and directory.metrics.stat().st_size > MAX_BYTES:
        raise RunError(f"{directory.metrics} is larger than {MAX_BYTES} bytes: that is too much for metrics")
    found: dict[int, Epoch] = {}
    for number, record in enumerate(directory.read_metrics(), 1):
        epoch = _checked(Epoch, json.dumps(record).encode(), directory.metrics, f"line {number}: ")
        found[epoch.epoch] = epoch  # a resumed run may have written an epoch twice
    return [found[epoch] for epoch in sorted(found)]


def _environment(directory: RunDirectory) -> dict[str, Any]:
    if directory.environment.exists():
        _check_size(directory.environment)
    return directory.read_environment() or {}


def _networks(run: Run, *, first: int, trust_code: bool) -> list[Network]:
    files = sorted(run.path.glob(f"evaluation/*/{SUMMARY}"))
    if not files:
        return []
    evaluations = [_evaluated(path) for path in files]
    networks: list[Network] = []
    for row in rows_of(run.path, trust_code=trust_code):
        own = [found for found in evaluations if found.folder / SUMMARY in row.files]
        own.sort(key=lambda found: (-found.summary.samples, found.folder.name))
        networks.append(Network(run, named(run.name, row.apart), first + len(networks), row, own))
    return networks


def _evaluated(path: Path) -> Evaluated:
    summary = _checked(Summary, _bytes(path), path)
    return Evaluated(path.parent, summary, read_shift(path.parent))


M = TypeVar("M", bound=_Read)


def _checked(kind: type[M], text: bytes, path: Path, place: str = "") -> M:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise RunError(f"{path} is damaged: {place}{first_problem(error)}"[:400]) from None


def _bytes(path: Path) -> bytes:
    _check_size(path)
    return path.read_bytes()


def _check_size(path: Path) -> None:
    if path.stat().st_size > MAX_BYTES:
        raise RunError(f"{path} is larger than {MAX_BYTES} bytes: that is too much for such a file")
