"""A sweep: which fields of a recipe to vary, how, and what to look for. Read from YAML and checked as a whole."""

from __future__ import annotations

import json
import math
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from generalist.core.errors import SweepError
from generalist.core.options import Number, Options
from generalist.sweep.expression import parse_expression
from generalist.training.mixing_options import Name

MAX_COMBINATIONS = 100_000
MAX_TRIALS = 1_000_000


class SearchOptions(Options):
    """The values that one field may take: `values`, a range from `low` to `high`, or `variants`."""

    values: list[Any] | None = Field(default=None, min_length=1, max_length=10_000)
    """The values to choose from, each as a recipe would write it."""

    low: Number | None = None
    """The lower end of a range, inclusive. A range goes with `random` and `tpe`; a grid needs its `step`."""

    high: Number | None = None
    """The upper end of a range, inclusive."""

    log: bool = False
    """Draw evenly on a logarithmic scale, as is usual for learning rates; both ends must be above 0."""

    step: Number | None = Field(default=None, gt=0)
    """Only low, low + step, low + 2 step, ... up to `high`; by default any number in the range."""

    integer: bool = False
    """Only whole numbers, for fields such as `train.epochs`."""

    variants: dict[Name, dict[str, Any]] | None = Field(default=None, min_length=1, max_length=1000)
    """Several fields that change together: a name for each variant, and the fields that it sets. The key in `search`
    is then a label of your choice instead of a field."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ranged = self.low is not None or self.high is not None
        if (self.values is not None) + ranged + (self.variants is not None) != 1:
            raise ValueError("give `values`, or `low` and `high`, or `variants`: one of the three")
        if not ranged and (self.log or self.step is not None or self.integer):
            raise ValueError("`log`, `step` and `integer` go with `low` and `high`: leave them out")
        if self.values is not None:
            texts = [as_text(value) for value in self.values]
            if len(set(texts)) != len(texts):
                raise ValueError("a value is given twice; leave one out")
        for fields in (self.variants or {}).values():
            for value in fields.values():
                as_text(value)
        if ranged:
            self._check_range()
        return self

    def _check_range(self) -> None:
        if self.low is None or self.high is None or self.low >= self.high:
            raise ValueError("a range needs `low` and `high`, `low` below `high`")
        if not math.isfinite((self.high - self.low) / (self.step or 1.0)):
            raise ValueError(f"a range from {self.low:g} to {self.high:g} is too wide, or its `step` too small")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range begins above 0, not at {self.low:g}")
        if self.log and self.step is not None:
            raise ValueError("`log` and `step` exclude each other: leave one out")
        numbers = [self.low, self.high, *([self.step] if self.step is not None else [])]
        if self.integer and any(number != int(number) for number in numbers):
            raise ValueError("`integer` needs whole numbers as `low`, `high` and `step`")

    def choices(self) -> list[str] | None:
        """The texts to choose from: values as JSON (which is YAML), or names of variants; or None for a whole range."""
        if self.values is not None:
            return [as_text(value) for value in self.values]
        if self.variants is not None:
            return list(self.variants)
        step = self.step if self.step is not None else (1.0 if self.integer and not self.log else None)
        if step is None:
            return None
        assert self.low is not None and self.high is not None, "checked above"
        if (self.high - self.low) / step + 1e-9 >= MAX_COMBINATIONS:
            return None
        points = [round(self.low + number * step, 12) for number in range(self.points(step))]
        return [as_text(int(point) if self.integer else point) for point in points]

    def points(self, step: float) -> int:
        """The number of points low, low + step, low + 2 step, ... in the range."""
        assert self.low is not None and self.high is not None, "only a range has steps"
        return math.floor((self.high - self.low) / step + 1e-9) + 1

    def last(self) -> float:
        """The highest number of the range: `high`, or the last step before it."""
        assert self.low is not None and self.high is not None, "only a range has one"
        return self.high if self.step is None else round(self.low + (self.points(self.step) - 1) * self.step, 12)

    def ends(self) -> list[str]:
        """The choices whose recipes are checked before anything runs: all of them, or both ends of a range."""
        found = self.choices()
        if found is not None and (self.low is None or len(found) <= 1000):
            return found
        assert self.low is not None and self.high is not None, "only a range is too long to list"
        return [as_text(int(end) if self.integer else end) for end in (self.low, self.last())]

    def fields(self, key: str) -> list[str]:
        """The recipe fields that it changes."""
        return (
            [key] if self.variants is None else sorted({field for fields in self.variants.values() for field in fields})
        )

    def changes(self, key: str, text: str) -> list[str]:
        """The overrides of a recipe for a choice."""
        if self.variants is not None:
            return [f"{field}={as_text(value)}" for field, value in self.variants[text].items()]
        return [f"{key}={text}"]


class ObjectiveOptions(Options):
    """A measure by which trials are judged."""

    value: str
    """An expression of validation measurements: names as in metrics.jsonl (`validation.drift`), or short: `natural`,
    `robust`, `worst`, `linf`, `l2`, `drift`, `train_seconds`, ... with + - * /, min and max."""

    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether larger or smaller values are better."""

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, value: Any) -> Any:
        return {"value": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        _checked(self.value)
        return self


class PruningOptions(Options):
    """Early stopping of trials that validate worse than others at the same epoch."""

    kind: Literal["none", "median", "halving"] = "none"
    """`median`: stop a trial whose best value so far is below the median of the others' at that epoch. `halving`: of
    the trials that reach a rung (epochs `warmup`, 3 x `warmup`, 9 x `warmup`, ...) only the best third continues."""

    warmup: int = Field(default=5, ge=1, le=1_000_000)
    """No trial is stopped before this epoch."""

    startup: int = Field(default=5, ge=1, le=1_000_000)
    """`median` stops no trial before this many trials have finished."""


class SweepOptions(Options):
    """A whole sweep."""

    name: Name = "sweep"
    """Its name in the database and of its output folder; by default that of its file."""

    source: str = Field(default="", max_length=2000)
    """Where its question comes from."""

    recipe: str
    """A shipped recipe's name, or a YAML file (looked up next to the sweep's own file first)."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Fields set in every trial, by their dotted paths, as with `--set`: {train.epochs: 20}."""

    search: dict[str, SearchOptions] = Field(min_length=1, max_length=100)
    """The fields to vary, by their dotted paths, each with its values."""

    method: Literal["grid", "random", "tpe"] = "grid"
    """`grid`: every combination. `random`: drawn anew for each trial. `tpe`: drawn where earlier trials were good."""

    trials: int | None = Field(default=None, ge=1, le=MAX_TRIALS)
    """The number of trials of all workers together. Required by `random` and `tpe`; a grid has as many as combinations.
    It may be raised later to continue the sweep."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """The seed for the draws of `random` and `tpe`. The trials' own seed is their recipe's `train.seed`."""

    objectives: list[ObjectiveOptions] = Field(
        default_factory=lambda: [ObjectiveOptions(value="natural + robust")], min_length=1, max_length=4
    )
    """What trials are judged by; with two or more objectives, the result is the Pareto front."""

    epoch: Literal["best", "last"] = "best"
    """Which epoch of a trial counts: the one whose model its run keeps as the best, or the last."""

    measures: dict[Name, str] = Field(default_factory=dict)
    """Further expressions that are shown and exported for each trial, by column name."""

    pruning: PruningOptions = PruningOptions()
    """Whether trials are stopped early."""

    heartbeat: int = Field(default=30, ge=1, le=3600)
    """Seconds between signs of life of a worker. A worker without one for four times as long is considered dead, and
    another worker continues its trial."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_overlaps()
        for text in self.measures.values():
            _checked(text)
        for value in self.set.values():
            as_text(value)
        self._check_method()
        self._check_pruning()
        return self

    def _check_overlaps(self) -> None:
        """Refuse a field that overrides an earlier one, because trials would then differ in name only. Variants may
        override fields of `set`."""
        earlier = dict.fromkeys(self.set, "set")
        for key, space in self.search.items():
            for field in space.fields(key):
                for other, where in earlier.items():
                    changed = where == "set" and space.variants is not None and field == other
                    if f"{other}.".startswith(f"{field}.") and not changed:
                        raise ValueError(f"search.{key}: {other} is in `{where}`, too; leave it out of one")
            earlier |= dict.fromkeys(space.fields(key), f"search.{key}")

    def _check_method(self) -> None:
        if self.method != "grid":
            if self.trials is None:
                raise ValueError(f"trials: {self.method!r} needs their number; add `trials: 20`")
            return
        if self.trials is not None:
            raise ValueError("trials: a grid has as many as it has combinations; leave `trials` out")
        for key, space in self.search.items():
            if space.choices() is None:
                raise ValueError(f"search.{key}: a grid needs `values`, or a `step` for its range")
        if (count := self.combinations()) > MAX_COMBINATIONS:
            raise ValueError(f"search: {count} combinations, more than {MAX_COMBINATIONS}; use `random`")

    def _check_pruning(self) -> None:
        if self.pruning.kind == "none":
            return
        if len(self.objectives) > 1:
            raise ValueError("pruning: needs one objective: with several there is no telling which trial is worse")
        if self.method == "grid" and self.pruning.kind == "halving":
            raise ValueError(
                "pruning: `halving` stops two trials of three, but a grid is there to measure every combination; "
                "use `median`, or the method random or tpe"
            )

    def combinations(self) -> int:
        """The number of points of a grid."""
        return math.prod(len(space.choices() or []) for space in self.search.values())

    @property
    def total(self) -> int:
        """The number of trials, all workers together."""
        return self.combinations() if self.trials is None else self.trials


def as_text(value: Any) -> str:
    """A value as one line of JSON, which YAML reads as the same value."""
    try:
        text = json.dumps(value, allow_nan=False, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"{str(value)[:40]!r} is not a plain value of a recipe") from None
    # Beyond 16 bits, JSON escapes a character as two halves, which YAML does not join, so it is left unescaped.
    return "".join(c if " " <= c <= "~" or c > "\uffff" else f"\\u{ord(c):04x}" for c in text)


def _checked(text: str) -> None:
    try:
        parse_expression(text)
    except SweepError as error:
        raise ValueError(str(error)) from None
