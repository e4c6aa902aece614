"""Values that change during training: piecewise linear, in fractions of training or in epochs."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import Discriminator, Tag, model_validator

from generalist.core.options import Decay, Number, Options

MAX_BREAKPOINTS = 1000
"""More than anybody writes by hand, and few enough to check quickly."""


def whole_epochs(epochs: float) -> int:
    """Rounded to the nearest integer; a half is rounded up, where Python's `round` would round to even."""
    return int(epochs + 0.5)


class Schedule(Options):
    """A piecewise-linear value. A recipe may write a bare number for a constant.

    Two equal positions make a jump, from which on the later value holds.
    """

    fractions: list[Number] | None = None
    """Breakpoints as fractions of training, from 0 to 1. Give these or `epochs`, not both."""

    epochs: list[Number] | None = None
    """Breakpoints in epochs, counted from 0, the start of training."""

    values: list[Number]
    """The value at each breakpoint; it is constant before the first and after the last."""

    @model_validator(mode="before")
    @classmethod
    def _accept_constant(cls, value: Any) -> Any:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return {"fractions": [0.0], "values": [value]}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.fractions is None) == (self.epochs is None):
            raise ValueError("give the breakpoints as `fractions` of training or as `epochs`: one of the two")
        positions = self.positions
        if not positions or len(positions) != len(self.values):
            raise ValueError(
                f"{len(positions)} breakpoints and {len(self.values)} values: give one value per breakpoint"
            )
        if len(positions) > MAX_BREAKPOINTS:
            raise ValueError(
                f"at most {MAX_BREAKPOINTS} breakpoints, not {len(positions)}; leave out those on straight lines"
            )
        if any(b < a for a, b in pairwise(positions)):
            raise ValueError(f"breakpoints must not decrease: {positions}")
        if positions[0] < 0:
            raise ValueError(f"breakpoints start at 0 or later, not at {positions[0]}")
        if self.fractions is not None and positions[-1] > 1:
            raise ValueError(f"fractions of training end at 1, not at {positions[-1]}; or use `epochs`")
        return self

    @property
    def positions(self) -> list[float]:
        return self.fractions if self.fractions is not None else (self.epochs or [])

    def at(self, epoch: float, epochs: int) -> float:
        """The value after `epoch` (fractional, from 0) of `epochs` epochs."""
        position = epoch if self.epochs is not None else epoch / epochs
        positions, values = self.positions, self.values
        if position < positions[0]:
            return values[0]
        # The last breakpoint at or before the position; at a jump, the later of the two.
        left = bisect_right(positions, position) - 1
        if left + 1 == len(positions):
            return values[left]
        if values[left] == values[left + 1]:
            return values[left]  # exactly: the sum below may round
        width = positions[left + 1] - positions[left]
        share = (position - positions[left]) / width
        return values[left] * (1 - share) + values[left + 1] * share

    def breakpoints(self, epochs: int) -> list[float]:
        """The breakpoints in epochs."""
        return [p if self.epochs is not None else p * epochs for p in self.positions]


def _form(value: Any) -> str:
    """The tag of a `DecaySchedule`. In parentheses, so that it is not taken for a field's name in an error's path."""
    return "(schedule)" if isinstance(value, dict | Schedule) else "(number)"


DecaySchedule = Annotated[
    Annotated[Decay, Tag("(number)")] | Annotated[Schedule, Tag("(schedule)")], Discriminator(_form)
]
"""The share of the old value that an average keeps: a number, or one that changes during training."""
