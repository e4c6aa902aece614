"""Records of an evaluation: a line per (sample, threat, attack, round), written as results come in.

`records-1-of-2.jsonl` holds the first of two shards. Its first line says what is evaluated; the lines of every batch
are flushed, so that a process that is killed only loses the batch in flight. An incomplete last line is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self, get_args

import numpy as np
from pydantic import Field, ValidationError, model_validator

from generalist.core.errors import RunError
from generalist.core.files import clear_write_errors, try_lock
from generalist.core.options import Options, first_problem
from generalist.evaluation.accuracy import NATURAL
from generalist.evaluation.plan import Column, Precision, step_key
from generalist.evaluation.verdicts import Bools, Ints, Verdicts

_NAME = re.compile(r"records-(\d{1,6})-of-(\d{1,6})\.jsonl")

SUMMARY = "summary.json"
"""The file beside the records with the results."""


class Header(Options):
    """The first line of a records file: everything that a summary needs in addition to the records."""

    identity: dict[str, Any]
    """What the verdicts depend on; records are joined and resumed only if it is equal."""
    subject: str
    """Whose weights they are: `best`, `last`, or the name of a learner, a file or a module."""
    split: str
    """The images, for example `digits-test`."""
    device: str
    """The device it was computed on."""
    classes: list[str]
    """The classes' names; a label is a position in this list."""
    images: int = Field(ge=1, le=1_000_000_000)
    """The number of images in the set."""
    indices: list[int] | None
    """The samples that were drawn from it; None if all are evaluated."""
    columns: list[tuple[str, str, list[str]]]
    """Attack, threat and the keys of its steps, for each column of the table."""
    rounds: dict[str, Annotated[int, Field(ge=1, le=100_000)]]
    """The number of rounds of each step."""
    warnings: list[str]
    """Warnings about the model, from before the attacks."""
    notes: list[str] = Field(default_factory=list)
    """Anything unusual: how the search was done, which corruptions were left out."""
    shard: int = Field(default=1, ge=1)
    """Which part of the samples this file is about, counted from 1."""
    shards: int = Field(default=1, ge=1)
    """The number of parts. Part i of n has every n-th sample, starting with the i-th."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if unknown := {key for column in self.columns for key in column[2]} - self.rounds.keys():
            raise ValueError(f"nothing is said about {min(unknown)!r}")
        indices = self.indices if self.indices is not None else [0]
        if not indices or min(indices) < 0 or max(indices) >= self.images or len(set(indices)) != len(indices):
            raise ValueError("the indices do not belong to the images")
        if self.identity.get("precision") not in get_args(Precision):
            raise ValueError("the precision is unknown")
        if self.shard > self.shards:
            raise ValueError(f"there is no shard {self.shard} of {self.shards}")
        return self

    def whole_index(self) -> Ints:
        return np.arange(self.images) if self.indices is None else np.asarray(self.indices, np.int64)

    def index(self) -> Ints:
        """The samples of this shard."""
        return self.whole_index()[self.shard - 1 :: self.shards]

    def plan(self) -> list[Column]:
        return [Column(attack, threat, tuple(steps)) for attack, threat, steps in self.columns]

    def shared(self) -> dict[str, Any]:
        """What all shards of an evaluation have in common; they may have run on different devices."""
        return self.model_dump(exclude={"shard", "device", "warnings", "notes"})


def records_file(folder: Path, shard: int, shards: int) -> Path:
    return folder / f"records-{shard}-of-{shards}.jsonl"


def shard_files(folder: Path) -> dict[tuple[int, int], Path]:
    """(shard, shards) to records file, for every one in the folder."""
    if not folder.is_dir():
        return {}
    found = {path: _NAME.fullmatch(path.name) for path in sorted(folder.iterdir())}
    return {(int(match[1]), int(match[2])): path for path, match in found.items() if match}


# -- reading ----------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> Header | None:
    """The header of a records file; None if the file was cut off within it."""
    with path.open("rb") as stream:
        line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    try:
        return Header.model_validate_json(line)
    except ValidationError as error:
        raise RunError(f"{path} does not begin like the records of an evaluation: {first_problem(error)}") from None


def read_records(path: Path, verdicts: Verdicts) -> int:
    """Fill `verdicts` from the lines of the file; returns the number of bytes in complete lines."""
    return read_lines(path, lambda line: _add_line(line, verdicts))


def read_lines(path: Path, add: Callable[[Any], None]) -> int:
    """Pass every line after the first to `add`; returns the number of bytes in complete lines."""
    with path.open("rb") as stream:
        whole = len(stream.readline())
        for number, line in enumerate(stream, 2):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it has no end")
                add(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError, RunError) as error:
                if stream.read(1):  # something follows, so this is not just a last line that was cut off
                    raise RunError(f"line {number} of {path} is damaged ({error}): remove the file and go on") from None
                break
            whole += len(line)
    return whole


def _add_line(line: Any, verdicts: Verdicts) -> None:
    if "seconds" in line:
        seconds = line["seconds"]
        if type(seconds) not in (int, float) or not 0 <= seconds < 1e12:  # false for nan, too
            raise TypeError(f"{seconds!r:.40} is not a time")
        verdicts.add_seconds(_key(line), seconds)
        return
    position = np.asarray([verdicts.position(whole_number(line["sample"]))])
    if line["attack"] == NATURAL:
        label, predicted = whole_number(line["label"]), whole_number(line["predicted"])
        verdicts.add_natural(position, np.asarray(label), np.asarray(predicted))
        return
    broken = line["broken"]
    if not isinstance(broken, bool):
        raise TypeError("broken must be true or false")
    verdicts.add(_key(line), position, np.asarray([whole_number(line["round"])]), np.asarray([broken]))


def _key(line: Any) -> str:
    return NATURAL if line["attack"] == NATURAL else step_key(str(line["threat"]), str(line["attack"]))


def whole_number(value: Any) -> int:
    """The value, refused unless it is a whole number from 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise TypeError(f"{value!r:.40} is no whole number")
    return value


# -- writing ----------------------------------------------------------------------------------------------------------


class Recorder:
    """Appends to one records file, or to none."""

    def __init__(self, path: Path | None, stream: BinaryIO | None) -> None:
        self.path, self._stream = path, stream

    def natural(self, samples: Ints, labels: Ints, predicted: Ints, seconds: float) -> None:
        rows = zip(samples.tolist(), labels.tolist(), predicted.tolist(), strict=True)
        lines = [{"sample": s, "attack": NATURAL, "label": y, "predicted": p} for s, y, p in rows]
        self._write([*lines, {"attack": NATURAL, "seconds": round(seconds, 4)}])

    def attacked(self, threat: str, attack: str, samples: Ints, rounds: Ints, broken: Bools, seconds: float) -> None:
        rows = zip(samples.tolist(), rounds.tolist(), broken.tolist(), strict=True)
        lines = [{"sample": s, "threat": threat, "attack": attack, "round": r, "broken": b} for s, r, b in rows]
        self._write([*lines, {"threat": threat, "attack": attack, "seconds": round(seconds, 4)}])

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        if self._stream is not None and self.path is not None:
            write_lines(self._stream, self.path, lines)


def write_lines(stream: BinaryIO, path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Append the lines and flush, so that a process killed afterwards has lost none of them."""
    data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    with clear_write_errors(path):
        stream.write(data)
        stream.flush()


@contextmanager
def open_locked(path: Path) -> Iterator[BinaryIO]:
    """A file to append to, new or existing, locked against other processes that open it like this."""
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("ab")
    with stream:
        if not try_lock(stream, path):
            raise RunError(f"{path} is in use by another process")
        yield stream


@contextmanager
def open_records(folder: Path | None, header: Header, verdicts: Verdicts, *, resume: bool) -> Iterator[Recorder]:
    """The recorder for the header's shard in `folder`; `verdicts` are filled from existing records."""
    if folder is None:
        yield Recorder(None, None)
        return
    path = records_file(folder, header.shard, header.shards)
    with open_locked(path) as stream:
        before = read_header(path)
        if before is None:
            stream.truncate(0)
            stream.write(header.model_dump_json().encode() + b"\n")
            stream.flush()
        else:
            _check_resume(path, before, header, resume=resume)
            stream.truncate(read_records(path, verdicts))
        yield Recorder(path, stream)


def _check_resume(path: Path, before: Header, header: Header, *, resume: bool) -> None:
    if not resume:
        done = (path.parent / SUMMARY).is_file() and before.shared() == header.shared()
        complete = "is already complete: --resume shows it without repeating anything"
        there = complete if done else "has records: go on with --resume"
        raise RunError(f"{path} {there}, or give another --out")
    if before.shared() != header.shared():
        raise RunError(f"{path} belongs to another evaluation ({difference(before, header)}): give another --out")


def difference(one: Header, other: Header) -> str:
    """The fields in which two evaluations differ, preferably those of the identity."""
    first, second = one.shared(), other.shared()
    names = sorted(one.identity.keys() | other.identity.keys())
    inner = [name for name in names if one.identity.get(name) != other.identity.get(name)]
    return f"other {', '.join(inner or [name for name in first if first[name] != second[name]])}"
