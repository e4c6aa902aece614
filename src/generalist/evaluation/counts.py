"""Counts of right answers, kept as they come: a line per batch of corrupted images or of sequences.

As in the records of the attacks, the first line says what is measured, every line is flushed, and one that was cut off
is dropped: a process that is killed at any point loses the batch in flight and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from generalist.core.errors import RunError
from generalist.evaluation.records import open_locked, read_lines, whole_number, write_lines


@dataclass(frozen=True)
class Count:
    """What a model answered."""

    right: int
    answers: int
    flips: int = 0
    """How often the answer changed between frames of a sequence."""

    def __add__(self, other: Self) -> Self:
        return type(self)(self.right + other.right, self.answers + other.answers, self.flips + other.flips)


class Counts:
    """Counts by what was measured and the number of the batch; appended to one file, or to none."""

    def __init__(self, path: Path | None = None, stream: BinaryIO | None = None) -> None:
        self._path, self._stream = path, stream
        self._found: dict[tuple[str, int], Count] = {}

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._found

    def add(self, what: str, batch: int, count: Count) -> None:
        self._found[what, batch] = count
        if self._stream is not None and self._path is not None:
            write_lines(self._stream, self._path, [{"what": what, "batch": batch, **asdict(count)}])

    def add_line(self, line: Any) -> None:
        """What an earlier process has written."""
        right, answers, flips = (whole_number(line[name]) for name in ("right", "answers", "flips"))
        if answers < 1 or max(right, flips) > answers:
            raise ValueError(f"only {answers} answers can be right or flip")
        self._found[str(line["what"]), whole_number(line["batch"])] = Count(right, answers, flips)

    def total(self, what: str, batches: int) -> Count:
        """Over all batches, which must be there."""
        return sum((self._found[what, batch] for batch in range(batches)), Count(0, 0))


@contextmanager
def open_counts(path: Path, identity: Mapping[str, Any], *, resume: bool) -> Iterator[Counts]:
    """The counts of that file, to go on with; without `resume` there are none yet, whatever it holds."""
    with open_locked(path) as stream:
        counts = Counts(path, stream)
        if resume and _begins_with(path, identity):
            stream.truncate(read_lines(path, counts.add_line))
        else:
            stream.truncate(0)
            write_lines(stream, path, [dict(identity)])
        yield counts


def _begins_with(path: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the file says what it is about; False where it was cut off before."""
    with path.open("rb") as stream:
        line = stream.readline()
    if not line.endswith(b"\n"):
        return False
    try:
        before = json.loads(line)
    except (ValueError, RecursionError):
        before = None
    if before != identity:
        raise RunError(f"{path} belongs to another evaluation: remove it and continue")
    return True
