"""What is known about every sample: its natural prediction, and the results of each step's rounds on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from generalist.core.errors import RunError
from generalist.evaluation.plan import Column

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Verdicts:
    """Verdicts on the samples `index` (numbers in their image set), filled in as they come or as records are read.

    Samples are addressed by position in `index`. All of it is a few bytes for each sample and round.
    """

    def __init__(self, index: Ints, rounds: Mapping[str, int]) -> None:
        self.index = index
        self.rounds = dict(rounds)
        self.label = np.full(len(index), -1)
        self.predicted = np.full(len(index), -1)
        self.done: dict[str, Bools] = {key: np.zeros((count, len(index)), bool) for key, count in rounds.items()}
        self.broken: dict[str, Bools] = {key: np.zeros((count, len(index)), bool) for key, count in rounds.items()}
        self.seconds: dict[str, float] = {}
        self._position = {int(sample): position for position, sample in enumerate(index)}

    def position(self, sample: int) -> int:
        if sample not in self._position:
            raise RunError(f"sample {sample} is not among those of this evaluation")
        return self._position[sample]

    def add_natural(self, positions: Ints, labels: Ints, predicted: Ints) -> None:
        self.label[positions] = labels
        self.predicted[positions] = predicted

    def add(self, key: str, positions: Ints, rounds: Ints, broken: Bools) -> None:
        if key not in self.rounds or (rounds < 0).any() or (rounds >= self.rounds[key]).any():
            raise RunError(f"{key!r} in that round is not a part of this evaluation")
        self.done[key][rounds, positions] = True
        self.broken[key][rounds, positions] = broken

    def add_seconds(self, key: str, seconds: float) -> None:
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds

    @property
    def answered(self) -> Bools:
        """The samples whose natural prediction is known."""
        return np.asarray(self.predicted >= 0)

    @property
    def right(self) -> Bools:
        return np.asarray(self.answered & (self.predicted == self.label))

    def surviving(self, keys: Sequence[str]) -> Bools:
        """The samples that are classified correctly and that none of these steps has broken so far."""
        alive = self.right
        for key in keys:
            alive = alive & ~self.broken[key].any(0)
        return alive

    def needed(self, key: str, columns: Sequence[Column]) -> Bools:
        """The samples for which any column needs this step: those that its earlier steps have not broken."""
        wanted = np.zeros(len(self.index), bool)
        for column in columns:
            if key in column.steps:
                wanted |= self.surviving(column.steps[: column.steps.index(key)])
        return wanted

    def pending(self, key: str, wanted: Bools) -> Bools:
        """The rounds that are still to be run, [rounds, samples]; a sample that one round broke needs no other."""
        return ~self.done[key] & (wanted & ~self.broken[key].any(0))

    def first_broken(self, key: str) -> Ints:
        """The first round that broke each sample; -1 if none did."""
        broken = self.broken[key]
        return np.where(broken.any(0), broken.argmax(0), -1).astype(np.int64)

    def unfinished(self, columns: Sequence[Column]) -> int:
        """How many samples are not finished."""
        lacking = ~self.answered
        for key in self.rounds:
            lacking |= self.pending(key, self.needed(key, columns)).any(0)
        return int(lacking.sum())
