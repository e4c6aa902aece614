"""The suite: natural accuracy, then every step of the plan on the samples that still need it, recorded as it goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from generalist.attacks.accuracy import logits_of
from generalist.attacks.autoattack import AutoAttack
from generalist.attacks.base import Attack, Found, answers, verdict
from generalist.attacks.pgd import borrowed
from generalist.attacks.rounds import class_count
from generalist.attacks.threats import ThreatOptions
from generalist.core.distributed import current
from generalist.core.errors import DataError, GeneralistError
from generalist.core.files import write_json
from generalist.core.options import Options, first_problem
from generalist.data.sets import Batch, Images
from generalist.evaluation.accuracy import NATURAL
from generalist.evaluation.classifier import AnyPrecision, device_of
from generalist.evaluation.crew import Crew, crew_size
from generalist.evaluation.directory import check_shards, choose_folder
from generalist.evaluation.examples import Kept, make_examples, write_examples
from generalist.evaluation.identity import identify
from generalist.evaluation.masking import PROBE, model_warnings
from generalist.evaluation.packing import Feeder, check_images, default_batch_size, pack, rows_for
from generalist.evaluation.plan import Mode, Plan, Precision, Step, make_plan
from generalist.evaluation.records import SUMMARY, Header, Recorder, open_records
from generalist.evaluation.search import Searched, full_precision, half_precision, notes_of, operations
from generalist.evaluation.summary import Evaluation, accuracies, summarise
from generalist.evaluation.verdicts import Bools, Ints, Verdicts

COMPILE_FROM = 20_000
"""Samples times steps from which compiling the network for a GPU, half a minute or more, pays for itself."""


class SuiteOptions(Options):
    """How the attacks are run."""

    mode: Mode = "each"
    """`each`: every attack runs on every sample and gives a number of its own. `cascade`: later attacks skip what an
    earlier one has broken, so that each number is the accuracy under all attacks so far."""

    precision: Precision = "default"
    """`default`: the model's own, under PyTorch's default flags. `fast`: ensembles search in bfloat16; see the docs."""

    batch_size: int | None = None
    """Rows of every batch. In float32, the verdicts on a few samples in a thousand can depend on it. Default: 40% of
    all samples on the CPU, at least 64 and at most 256, but 32 for a large network (from 1e8 operations per image); on
    a GPU 1,024 where every row is computed by itself, else a quarter of the samples, at least 256 and at most 1,024.
    Never more than there are samples."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """The seed of random starts and of `samples`. A sample's random numbers depend only on it and on the sample."""

    shard: int = Field(default=1, ge=1)
    """Which part of the samples to evaluate, counted from 1."""

    shards: int = Field(default=1, ge=1, le=100_000)
    """The number of parts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        if self.shard > self.shards:
            raise ValueError(f"there is no shard {self.shard} of {self.shards}: count from 1 to {self.shards}")
        return self


def suite_options(**values: Any) -> SuiteOptions:
    """Options from a call or a command line; an error is raised in one line."""
    try:
        return SuiteOptions(**values)
    except ValidationError as error:
        raise GeneralistError(first_problem(error)) from None


@dataclass(frozen=True)
class Moment:
    """The progress of an evaluation, after a batch."""

    what: str
    """`natural`, the threat and the attack, `corruptions` or `perturbations`."""
    step: int
    steps: int
    done: int
    """Rounds of samples that are done."""
    total: int
    """`done` and the rounds that may still be needed."""
    robust: int | None
    """Samples that the step has not broken so far; for natural and corrupted images, those classified correctly; None
    where they are not counted."""


@dataclass(frozen=True)
class Place:
    """Where records are written, and under which names."""

    out: Path
    """The directory in which the evaluation gets a directory of its own."""
    subject: str
    split: str
    resume: bool = False


def evaluate_model(
    model: nn.Module,
    images: Images,
    *,
    threats: Sequence[ThreatOptions],
    attacks: Sequence[str | Attack | AutoAttack] = (NATURAL, "pgd-20"),
    index: Tensor | None = None,
    options: SuiteOptions | None = None,
    place: Place | None = None,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
    listener: Callable[[Moment], None] = lambda moment: None,
    **settings: Any,
) -> Evaluation:
    """Accuracies on the images of `index`: one named `natural`, and one named `attack/threat` for each such pair.

    A sample counts as correct under attack only if it is also correct without. Attacks and threats named twice count
    once. `settings` are fields of SuiteOptions. `notes` and `warnings` are added to those of the summary. Without a
    `place` nothing is written.
    """
    options = options or suite_options(**settings)
    plan = make_plan(attacks, threats, mode=options.mode, precision=options.precision)
    whole: Ints = np.arange(len(images)) if index is None else index.cpu().numpy().astype(np.int64)
    if options.shards > len(whole):
        raise GeneralistError(f"{len(whole)} images cannot be cut into {options.shards} parts: ask for fewer parts")
    with current(device_of(model)):
        suite = Suite(model, images, whole, plan, options, listener)
        header = suite.header(place, notes, warnings, chosen=index is not None)
        folder = choose_folder(place.out, header, resume=place.resume) if place else None
        verdicts = Verdicts(header.index(), header.rounds)
        if folder is not None:
            check_shards(folder, header)
        with open_records(folder, header, verdicts, resume=bool(place and place.resume)) as recorder:
            suite.run(verdicts, recorder)
    summary = summarise(header, verdicts)
    if folder is not None:
        summary["directory"] = str(folder)
        suite.leave(folder, summary, verdicts)
    found = accuracies(plan.columns, verdicts)
    return Evaluation({name: value for name, value in found.items() if name != NATURAL or NATURAL in attacks}, summary)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A batch that is under attack."""

    rows: Ints
    rounds: Ints
    batch: Batch
    found: Future[Found]


class Suite:
    """One model, one image set and one plan, on one device."""

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        whole: Ints,
        plan: Plan,
        options: SuiteOptions,
        listener: Callable[[Moment], None],
    ) -> None:
        self.model = AnyPrecision(model)
        if options.precision == "fast" and self.model.dtype != torch.float32:
            raise GeneralistError(f"precision fast is for float32 models, not {self.model.dtype}: use default")
        self.images, self.whole, self.plan, self.options, self.listener = images, whole, plan, options, listener
        device = device_of(model)
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        # The same images for every shard, so that warnings about the model do not depend on it.
        few = min(PROBE, options.batch_size or PROBE, len(whole))
        self.probe = Feeder(images, device, dtype, few).batch(whole[:few])
        with borrowed(self.model):
            self.num_classes = class_count(self.model, self.probe)
        self._check_labels()
        self.searched = self._networks(device)
        alone = all(searched.row_by_row for searched in self.searched.values())
        row_by_row, work = alone and bool(self.searched), self._work()
        default = default_batch_size(device, len(whole), row_by_row=row_by_row, operations=work)
        size = min(options.batch_size or default, len(whole))
        self.feeder = Feeder(images, device, dtype, size)
        self.kept = Kept()
        self.crew_size = crew_size(device, batches=-(-len(whole) // size), operations=work)

    def _networks(self, device: torch.device) -> dict[bool, Searched]:
        """The networks that the attacks search on, by whether this is done in bfloat16."""
        makers = {step.half: half_precision if step.half else full_precision for step in self.plan.steps}
        long = device.type == "cuda" and len(self.whole) * len(self.plan.steps) >= COMPILE_FROM
        return {half: make(self.model, self.probe.x, compiled=long) for half, make in makers.items()}

    def _work(self) -> float:
        """Operations per image, which decide the sizes of batches and crews on a CPU; elsewhere 0."""
        networks = self.searched.values() if self.probe.x.device.type == "cpu" else ()
        return max((operations(searched, self.probe.x[:1]) for searched in networks), default=0.0)

    def _check_labels(self) -> None:
        labels = self.images.labels.cpu()[torch.from_numpy(self.whole)]
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.num_classes:
            raise DataError(
                f"{self.images.name}: labels range over {low}..{high}, but the model has {self.num_classes} classes: "
                "renumber the labels from 0, or evaluate the model that belongs to these classes"
            )

    def header(self, place: Place | None, notes: Sequence[str], warnings: Sequence[str], *, chosen: bool) -> Header:
        """The header of the records. Checksums take a while, so they are made only where records are kept."""
        settings = {
            "mode": self.options.mode,
            "precision": self.options.precision,
            "batch_size": self.feeder.size,
            "seed": self.options.seed,
        }
        device = self.feeder.device
        return Header(
            identity=identify(self.model.model, self.images, self.whole, self.plan, **settings) if place else settings,
            subject=place.subject if place else type(self.model.model).__name__,
            split=place.split if place else self.images.name,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            classes=self._class_names(),
            images=len(self.images),
            indices=self.whole.tolist() if chosen else None,
            columns=[(column.attack, column.threat, list(column.steps)) for column in self.plan.columns],
            rounds={step.key: step.attack.rounds(self.num_classes) for step in self.plan.steps},
            warnings=[*warnings, *self._warnings()],
            notes=[*notes_of(list(self.searched.values())), *notes],
            shard=self.options.shard,
            shards=self.options.shards,
        )

    def _warnings(self) -> list[str]:
        return model_warnings(self.model, self.probe, self.plan, seed=self.options.seed) if self.plan.steps else []

    def _class_names(self) -> list[str]:
        names = self.images.classes
        return [*names, *(str(number) for number in range(len(names), self.num_classes))]

    def run(self, verdicts: Verdicts, recorder: Recorder) -> None:
        """Do everything that is not done yet."""
        self._natural(verdicts, recorder)
        for number, step in enumerate(self.plan.steps, 1):
            self._step(step, number, verdicts, recorder)

    def _natural(self, verdicts: Verdicts, recorder: Recorder) -> None:
        missing, size = np.flatnonzero(~verdicts.answered), self.feeder.size
        for start in range(0, len(missing), size):
            started = time.perf_counter()
            rows = missing[start : start + size]
            batch = self.feeder.batch(verdicts.index[rows])
            check_images(batch, self.images.name)
            count = len(rows)
            predicted = answers(logits_of(self.model, batch.x)[:count], batch.index[:count]).cpu().numpy()
            labels = batch.y[:count].cpu().numpy()
            verdicts.add_natural(rows, labels, predicted)
            seconds = time.perf_counter() - started
            verdicts.add_seconds(NATURAL, seconds)
            recorder.natural(verdicts.index[rows], labels, predicted, seconds)
            done, right = int(verdicts.answered.sum()), int(verdicts.right.sum())
            self.listener(Moment(NATURAL, 0, len(self.plan.steps), done, len(verdicts.index), right))

    def _step(self, step: Step, number: int, verdicts: Verdicts, recorder: Recorder) -> None:
        wanted = verdicts.needed(step.key, self.plan.columns)
        done, clock = 0, time.perf_counter()
        flights: deque[_Flight] = deque()
        with self._crew(step) as crew:
            while True:
                self._launch(step, crew, flights, verdicts.pending(step.key, wanted), verdicts.index)
                if not flights:
                    return
                flight = flights.popleft()
                found = self._judged(step, flight.batch, flight.found.result())
                rows, rounds, count = flight.rows, flight.rounds, len(flight.rows)
                broken = found.broken[:count].cpu().numpy()
                verdicts.add(step.key, rows, rounds, broken)
                self.kept.add(step.key, rows, rounds, broken, found.x)
                clock, seconds = time.perf_counter(), time.perf_counter() - clock
                verdicts.add_seconds(step.key, seconds)
                recorder.attacked(str(step.threat), step.label, verdicts.index[rows], rounds, broken, seconds)
                done += count
                left = int(verdicts.pending(step.key, wanted).sum())
                robust = int((wanted & ~verdicts.broken[step.key].any(0)).sum())
                self.listener(Moment(step.key, number, len(self.plan.steps), done, done + left, robust))

    def _launch(self, step: Step, crew: Crew, flights: deque[_Flight], pending: Bools, index: Ints) -> None:
        """Give every idle thread of the crew a batch, while there is work that none has begun."""
        for flight in flights:
            pending[flight.rounds, flight.rows] = False
        while len(flights) < crew.size:
            rows, rounds = pack(pending, self.feeder.size)
            if len(rows) == 0:
                return
            pending[rounds, rows] = False
            batch = self.feeder.batch(index[rows])
            found = self._search(step, crew, batch, self.feeder.rounds(rounds), len(rows))
            flights.append(_Flight(rows, rounds, batch, found))

    def _crew(self, step: Step) -> Crew:
        """Threads may share a folded network, but never the user's own model."""
        return Crew(self.crew_size if self.searched[step.half].folded else 1)

    def _search(self, step: Step, crew: Crew, batch: Batch, rounds: Tensor, count: int) -> Future[Found]:
        """Attack the first `count` rows; the others are padding."""
        searched, threat = self.searched[step.half], step.threat.build()
        x, rows = batch.x, self.feeder.size
        if searched.row_by_row:
            rows = rows_for(count, rows)
            x = x.contiguous(memory_format=torch.channels_last)  # the layout of our kernels, for images and gradients
        part = Batch(x=x[:rows], y=batch.y[:rows], index=batch.index[:rows])
        network, seed = crew.hire(searched.network), self.options.seed
        return crew.submit(lambda: step.attack.run_round(network, part, rounds[:rows], threat=threat, seed=seed))

    def _judged(self, step: Step, batch: Batch, found: Found) -> Found:
        """Judge an attack's images by the user's own model, which sees a whole batch.

        A success counts only if the image lies in ball and box and this model misclassifies it, whichever network was
        searched, and whatever a custom attack claims.
        """
        with borrowed(self.model):
            x = torch.cat([found.x, batch.x[len(found.x) :]])
            return verdict(self.model, batch, x, threat=step.threat.build())

    def attack(self, step: Step, batch: Batch, rounds: Tensor, count: int) -> Found:
        """The first `count` rows of one batch of one step."""
        with self._crew(step) as crew:
            return self._judged(step, batch, self._search(step, crew, batch, rounds, count).result())

    def leave(self, folder: Path, summary: dict[str, Any], verdicts: Verdicts) -> None:
        """Write the summary, unless this is only a shard, and a few examples, if this is the first shard."""
        if self.options.shard == 1 and not (folder / "examples.npz").exists():
            with borrowed(self.model):
                examples = make_examples(self.plan, verdicts, self.feeder, self.kept, self.attack, self._predict)
            write_examples(folder / "examples.npz", examples)
        if self.options.shards == 1:
            write_json(folder / SUMMARY, {name: value for name, value in summary.items() if name != "directory"})

    def _predict(self, x: Tensor) -> Tensor:
        return logits_of(self.model, x).argmax(1)
