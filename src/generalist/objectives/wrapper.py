"""The base of objectives that wrap another one: what a wrapper does not override is passed on to that one."""

from __future__ import annotations

from typing import Self

from pydantic import field_validator, model_validator
from torch import Tensor

from generalist.attacks.pgd import AttackOptions, Start
from generalist.attacks.threats import Threat, ThreatOptions
from generalist.core.schedule import Schedule
from generalist.data.sets import Batch
from generalist.objectives.base import (
    Inputs,
    LearnerView,
    Objective,
    ObjectiveChoice,
    ObjectiveOptions,
    Progress,
    build_objective,
    class_of,
)


class WrapperOptions(ObjectiveOptions):
    """Options of an objective around another."""

    around: ObjectiveChoice
    """The wrapped objective, written as a learner's own would be."""

    @field_validator("around")
    @classmethod
    def _can_be_wrapped(cls, around: ObjectiveOptions) -> ObjectiveOptions:
        if class_of(around).gradients is not Objective.gradients:
            raise ValueError(
                f"{around.kind!r} has a `gradients` of its own, which nothing around it would call; "
                "let it override `prepare`, `loss` or `gradients_of` instead"
            )
        return around

    @model_validator(mode="after")
    def _once(self) -> Self:
        """Refuse a wrapper around itself, at any depth: every level multiplies the cost."""
        inner: ObjectiveOptions = self
        while isinstance(inner, WrapperOptions):
            inner = inner.around
            if inner.kind == self.kind:
                raise ValueError(f"{self.kind!r} is around itself; once is enough")
        return self


class Wrapper(Objective):
    """Base class; `inner` is the wrapped objective. Each wrapper decides for itself how to keep the state of both."""

    def __init__(self, options: WrapperOptions) -> None:
        super().__init__(options)
        self.inner = build_objective(options.around)
        self.capturable, self.separable = self.inner.capturable, self.inner.separable

    @classmethod
    def needs_threat(cls, options: ObjectiveOptions) -> bool:
        return class_of(_around(options)).needs_threat(_around(options))

    @classmethod
    def usual_start(cls, options: ObjectiveOptions) -> Start:
        return class_of(_around(options)).usual_start(_around(options))

    @classmethod
    def chooses_network(cls, options: ObjectiveOptions) -> bool:
        return class_of(_around(options)).chooses_network(_around(options))

    @classmethod
    def threats(cls, options: ObjectiveOptions) -> list[ThreatOptions]:
        return class_of(_around(options)).threats(_around(options))

    @classmethod
    def attack_on(cls, options: ObjectiveOptions, threat: Threat, attack: AttackOptions, *, own: bool) -> AttackOptions:
        return class_of(_around(options)).attack_on(_around(options), threat, attack, own=own)

    @classmethod
    def sources(cls, options: ObjectiveOptions) -> list[str]:
        return class_of(_around(options)).sources(_around(options))

    @classmethod
    def companions(cls, options: ObjectiveOptions) -> list[str]:
        return class_of(_around(options)).companions(_around(options))

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.inner.setup(learner)
        self.variants = self.inner.variants  # known only after its setup

    def schedules(self) -> dict[str, Schedule]:
        return self.inner.schedules()

    def variant(self, step: int, epoch: int) -> str:
        return self.inner.variant(step, epoch)

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        return self.inner.prepare(batch, progress)

    def epoch_start(self, epoch: int) -> None:
        self.inner.epoch_start(epoch)

    def epoch_end(self, epoch: int) -> None:
        self.inner.epoch_end(epoch)

    def redistributed(self, *, reset: bool) -> None:
        self.inner.redistributed(reset=reset)

    def best_network(self) -> dict[str, Tensor] | None:
        return self.inner.best_network()


def _around(options: ObjectiveOptions) -> ObjectiveOptions:
    assert isinstance(options, WrapperOptions)
    return options.around


def innermost(options: ObjectiveOptions) -> ObjectiveOptions:
    """The objective inside all wrappers."""
    while isinstance(options, WrapperOptions):
        options = options.around
    return options
