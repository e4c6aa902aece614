"""The options of training: the loop, and what all of a run's options have to agree on.

Defaults are those of the recipes called plain (docs/method.md). Where the papers or their published code differ, the
field says how; a recipe's `style` sets a whole column at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator

from generalist.attacks.threats import ThreatOptions
from generalist.core.options import Options, Positive
from generalist.core.run import AVERAGE
from generalist.core.schedule import MAX_BREAKPOINTS, Schedule
from generalist.data.options import DataOptions
from generalist.models import ModelOptions
from generalist.objectives.base import class_of
from generalist.tensors.optimizers import LEAD
from generalist.training.learner_options import LearnerOptions
from generalist.training.mixing_options import MixingOptions, RedistributionOptions
from generalist.training.parallel_options import ParallelOptions
from generalist.training.validation_options import ValidationOptions

_TAKEN = {"global", "best", "last"}  # what `generalist.load` and the files of a run call the global learner


class SnapshotOptions(Options):
    """Weights of the global learner and of every learner, kept for mixing and branching."""

    every: int = Field(default=0, ge=0, le=1_000_000)
    """Keep one every this many epochs; 0: only after the last epoch and the last one before any redistribution."""

    dtype: Literal["fp32", "fp16"] = "fp32"
    """fp16 halves the size; mixing and branching accept both."""


class TrainOptions(Options):
    """The loop."""

    epochs: int = Field(default=120, ge=1, le=1_000_000)
    """Passes over the training images, or parts of one where `iterations` says so."""

    iterations: int | None = Field(default=None, ge=1, le=1_000_000)
    """Iterations per epoch; default: one pass over the images. With fewer, each epoch sees a new random subset: a cheap
    probe that keeps the number of epochs and with it every schedule."""

    start_epoch: int = Field(default=0, ge=0, le=1_000_000)
    """Epochs that count as already done: with 75, a branch (`--from RUN@75`) continues with the schedules of epoch 76.
    A snapshot is taken before the redistribution of its epoch; `--from RUN@75#global` starts from after it."""

    batch_size: int = Field(default=128, ge=1, le=1_000_000)
    """Images per iteration."""

    last_batch: Literal["drop", "fill", "keep"] = "drop"
    """The last, smaller batch of an epoch: dropped, filled from the start of the epoch's order, or kept small."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """All randomness is derived from this."""

    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Arithmetic of forward and backward passes. bf16 is mixed precision: weights stay fp32. PyTorch's own flags are
    not changed, and by default they let a GPU's fp32 convolutions round their inputs to TF32."""

    engine: Literal["auto", "eager", "graph"] = "auto"
    """`eager` runs everywhere; `graph` records an iteration as a CUDA graph and replays it. `auto`: graph where
    possible, else eager, with a message that says why."""

    compile: bool | Literal["auto"] = "auto"
    """Compile the iteration with torch.compile: iterations are faster, but the start takes half a minute longer.
    `auto`: with the graph engine, for runs of 2,000 iterations or more, unless `deterministic`."""

    channels_last: bool = True
    """Store images and weights with channels last, which convolutions prefer."""

    deterministic: bool = False
    """On a GPU: bit-for-bit repeatable, slower. The CPU always is."""

    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads; 0: PyTorch's choice."""

    checkpoint_epochs: int = Field(default=5, ge=1, le=1_000_000)
    """Write a checkpoint every this many epochs."""

    checkpoint_minutes: Positive = 10.0
    """Also write one whenever the last is this old, even within an epoch."""

    snapshots: SnapshotOptions = SnapshotOptions()
    """Weights kept for mixing and branching."""

    parallel: ParallelOptions = ParallelOptions()
    """How several processes, started by torchrun, share the work."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The mixed-precision type of forward passes; None: that of the weights."""
        return torch.bfloat16 if self.precision == "bf16" else None


def lead_index(mixing: MixingOptions, learners: Sequence[LearnerOptions]) -> int:
    """The position of the lead learner."""
    if mixing.lead is not None:
        return [learner.name for learner in learners].index(mixing.lead)
    norms = [learner.threat.norm if learner.threat else None for learner in learners]
    if "linf" in norms:
        return norms.index("linf")
    return next((i for i, norm in enumerate(norms) if norm), 0)


class Job(Options):
    """Everything that determines one training run."""

    data: DataOptions
    """The images."""

    model: ModelOptions
    """The architecture that all learners share."""

    learners: list[LearnerOptions] = Field(min_length=1, max_length=64)
    """The base learners. One learner is plain training of a baseline."""

    mixing: MixingOptions = MixingOptions()
    """How the global learner follows the learners."""

    train: TrainOptions = TrainOptions()
    """Epochs, batches, seed, precision, checkpoints."""

    validation: ValidationOptions = ValidationOptions()
    """What is measured during training and which epoch is the best."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [learner.name for learner in self.learners]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if taken := [*repeated, *(name for name in names if name in _TAKEN)]:
            raise ValueError(f"learners: the name {taken[0]!r} is taken; choose another")
        self._check_mixing(names)
        self._check_companions(names)
        self._check_loop()
        return self

    def _check_companions(self, names: list[str]) -> None:
        for i, learner in enumerate(self.learners):
            others = [name for name in names if name != learner.name]
            for subject in learner.companions():
                name = subject.removesuffix(AVERAGE)
                if name not in others:
                    known = ", ".join(others) or "there are none"
                    raise ValueError(f"learners.{i}.objective: there is no other learner {name!r} (others: {known})")
                other = names.index(name)
                if name != subject and self.learners[other].averaging is None:
                    raise ValueError(
                        f"learners.{other}.averaging: learners.{i}.objective asks for it; add `averaging: {{}}`"
                    )

    def _check_mixing(self, names: list[str]) -> None:
        mixing = self.mixing
        mentioned = [*([mixing.lead] if mixing.lead else []), *mixing.shares, *(mixing.gammas or {})]
        for name in mentioned:
            if name not in names:
                raise ValueError(f"mixing: there is no learner {name!r}; the learners are {', '.join(names)}")
        lead = lead_index(mixing, self.learners)
        if self.learners[lead].optimizer.lr == LEAD:
            raise ValueError(
                f"learners.{lead}.optimizer.lr: {names[lead]!r} is the lead learner and needs a number, e.g. 0.01"
            )
        if mixing.shares:
            self._check_shares(names, lead)
        if mixing.parts and len(names) == 1:
            raise ValueError("mixing.parts: one learner has nothing to mix; leave it out")
        if mixing.source == "averaged" and any(learner.averaging is None for learner in self.learners):
            raise ValueError("mixing.source: `averaged` needs `averaging` in every learner; add it or mix `raw`")
        self._check_simplex(names, lead)

    def _check_shares(self, names: list[str], lead: int) -> None:
        shares = self.mixing.shares
        if names[lead] in shares:
            raise ValueError(f"mixing.shares: {names[lead]!r} is the lead learner, its weight is `mixing.gamma`")
        if abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError(f"mixing.shares add up to {sum(shares.values()):g}; make it 1")

    def _check_simplex(self, names: list[str], lead: int) -> None:
        """Mixing weights are shares that add up to 1 throughout training.

        A sum of piecewise-linear schedules is largest and smallest at their breakpoints, so checking there is enough
        (on both sides of a jump).
        """
        schedules = {names[lead]: self.mixing.gamma} if self.mixing.gammas is None else self.mixing.gammas
        field = "mixing.gamma" if self.mixing.gammas is None else "mixing.gammas"
        if self.mixing.gammas is not None and (missing := sorted(set(names) - set(schedules))):
            raise ValueError(f"mixing.gammas: learner {missing[0]!r} has no schedule; give one to every learner")
        for name, schedule in schedules.items():
            _check_within(field, schedule, self.train.epochs)
            outside = [value for value in schedule.values if not 0 <= value <= 1]
            if outside:
                raise ValueError(f"{field}: {outside[0]:g} ({name}) lies outside [0, 1]; mixing weights are shares")
        if self.mixing.gammas is None:
            return
        epochs = self.train.epochs
        points = {0.0, float(epochs)}.union(*(schedule.breakpoints(epochs) for schedule in schedules.values()))
        if len(points) > MAX_BREAKPOINTS:
            raise ValueError(
                f"mixing.gammas: at most {MAX_BREAKPOINTS} different breakpoints in all, not {len(points)}; "
                "give the learners the same ones"
            )
        for point in sorted(points | {p - 1e-9 for p in points if p > 0}):
            total = sum(schedule.at(point, epochs) for schedule in schedules.values())
            if abs(total - 1) > 1e-6:
                raise ValueError(f"mixing.gammas add up to {total:g} at epoch {point:g}; make it 1 at all times")

    def _check_loop(self) -> None:
        epochs, redistribution = self.train.epochs, self.mixing.redistribution
        first = self.learners[0].objective
        restarts = len(self.learners) == 1 and self.redistribution().last_apart(epochs) is not None
        if restarts and class_of(first).chooses_network(first):
            raise ValueError(
                f"mixing.redistribution.every: {first.kind!r} alone would restart from the one network that it has "
                "chosen among many; leave it out, or set it to 0"
            )
        never = redistribution.every == 0
        if redistribution.start_epoch is not None and redistribution.start_epoch > epochs and not never:
            raise ValueError(
                f"mixing.redistribution.start_epoch: {redistribution.start_epoch} lies beyond the end "
                f"({epochs} epochs); lower it, or set mixing.redistribution.every to 0"
            )
        if self.train.start_epoch >= epochs:
            raise ValueError(
                f"train.start_epoch: {self.train.start_epoch} leaves nothing to do of {epochs} epochs; lower it"
            )
        if isinstance(self.mixing.decay, Schedule):
            _check_within("mixing.decay", self.mixing.decay, epochs)
        for i, learner in enumerate(self.learners):
            if any(value < 0 for value in learner.schedule.values):
                raise ValueError(f"learners.{i}.schedule: a negative learning rate; make every value >= 0")
            for field, schedule in _schedules_in(learner, f"learners.{i}"):
                _check_within(field, schedule, epochs)
        if self.validation.rule == "robust" and not self.threats():
            raise ValueError("validation.rule: robust, but there is no threat to be robust against; choose natural")

    def threats(self) -> list[ThreatOptions]:
        """The threat models that validation measures: those asked for, or the learners' own, each once."""
        if self.validation.threats is not None:
            return list(dict.fromkeys(self.validation.threats))
        own = [threat for learner in self.learners for threat in learner.threats()]
        return list(dict.fromkeys(own))

    def keeps_snapshot(self, epoch: int) -> bool:
        """Whether a run leaves a snapshot of `epoch`: see `train.snapshots.every`."""
        train, every = self.train, self.train.snapshots.every
        apart = self.redistribution().last_apart(train.epochs)
        regular = every > 0 and epoch % every == 0
        return train.start_epoch < epoch <= train.epochs and (regular or epoch in (apart, train.epochs))

    def redistribution(self) -> RedistributionOptions:
        """When the learners restart. A single learner, which would restart from its own average, does so only on
        request."""
        options = self.mixing.redistribution
        alone = options.every is None and len(self.learners) == 1
        return options.model_copy(update={"every": 0}) if alone else options

    def learning_rate(self, learner: LearnerOptions) -> float:
        """A learner's initial learning rate, where `lead` means the lead learner's."""
        lr = learner.optimizer.lr
        if lr == LEAD:
            lr = self.learners[lead_index(self.mixing, self.learners)].optimizer.lr
        return float(lr)

    def gammas_at(self, epoch: float) -> list[float]:
        """The learners' mixing weights after `epoch` epochs (fractional, from 0)."""
        mixing, names, epochs = self.mixing, [learner.name for learner in self.learners], self.train.epochs
        if mixing.gammas is not None:
            return [mixing.gammas[name].at(epoch, epochs) for name in names]
        if len(names) == 1:
            return [1.0]
        lead = lead_index(mixing, self.learners)
        gamma = mixing.gamma.at(epoch, epochs)
        even = 1 / (len(names) - 1)
        shares = mixing.shares or dict.fromkeys(names, even)
        return [gamma if i == lead else (1 - gamma) * shares.get(name, 0.0) for i, name in enumerate(names)]


def _schedules_in(options: Options, field: str) -> Iterator[tuple[str, Schedule]]:
    """Every schedule in these options and in those nested in them, with its field."""
    for name, value in options:
        if isinstance(value, Schedule):
            yield f"{field}.{name}", value
        elif isinstance(value, Options):
            yield from _schedules_in(value, f"{field}.{name}")


def _check_within(field: str, schedule: Schedule, epochs: int) -> None:
    last = schedule.breakpoints(epochs)[-1]
    if last > epochs:
        raise ValueError(f"{field}: breakpoint {last:g} lies beyond the end ({epochs} epochs); use `fractions`")
