"""The layout of a run directory: the contract between the commands."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generalist.core.errors import RunError
from generalist.core.files import clear_write_errors, try_lock

GLOBAL = "global"
"""The global learner's name in snapshots and records, beside the learners' names."""
AVERAGE = ".average"
"""Suffix of a learner's name: the average of its own weights."""
PART = ".part"
"""Suffix of a learner's name: its part of the global learner."""

_WRITTEN_FIRST = r"environment\.json|\.(environment\.json|recipe\.yaml)\.\d+\.tmp"
_BEGINNING = re.compile(rf"\.lock|{_WRITTEN_FIRST}|stages|stages/[^/]+|stages/[^/]+/({_WRITTEN_FIRST}|recipe\.yaml)")


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run directory."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def last(self) -> Path:
        return self.path / "last.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    def stage(self, name: str) -> RunDirectory:
        """An earlier stage's run; the last stage is the run itself."""
        return RunDirectory(self.path / "stages" / name)

    def snapshot_epochs(self) -> list[int]:
        """Epochs that have a snapshot here, oldest first."""
        if not self.snapshots.is_dir():
            return []
        return sorted(int(p.name) for p in self.snapshots.iterdir() if p.name.isdecimal())

    def exists(self) -> bool:
        return self.recipe.is_file()

    def require(self) -> RunDirectory:
        """Itself; raises an error if there is no run here."""
        if not self.exists():
            what = (
                "a file"
                if self.path.is_file()
                else "it has no recipe.yaml"
                if self.path.is_dir()
                else "nothing is there"
            )
            raise RunError(f"{self.path} is not a run directory ({what})")
        return self

    def barely_begun(self) -> bool:
        """Whether this holds only the remains of a run that was killed before its recipe was written."""
        for path in self.path.rglob("*"):
            if not _BEGINNING.fullmatch(path.relative_to(self.path).as_posix()):
                return False
            if path.name == "environment.json":
                found = RunDirectory(path.parent).read_environment()
                if found is None or "generalist" not in found:  # another program's file of the same name
                    return False
            if path.name == "recipe.yaml" and not (path.parent / "environment.json").is_file():  # written before it
                return False
            if path.name == ".lock" and path.stat().st_size > 0:
                return False
        return True

    def keeps(self, path: Path) -> bool:
        """Whether a weights file belongs to this run: it lies beside the run's own files, or in one of its folders for
        weights. The run needs more than a recipe, which any folder may have."""
        try:
            parts = path.absolute().relative_to(self.path.absolute()).parts
        except ValueError:
            return False
        placed = len(parts) == 1 or parts[0] in (self.snapshots.name, "mix", "export")
        return placed and self.exists() and self.environment.is_file()

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every complete line of metrics.jsonl."""
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_bytes().split(b"\n")[:-1]
        try:
            records = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise RunError(f"{self.metrics} is damaged: {error}") from error
        for number, record in enumerate(records, 1):
            if not isinstance(record, dict) or not isinstance(record.get("epoch"), int):
                raise RunError(f"{self.metrics} is damaged: line {number}: epoch is not a whole number")
        return records

    def append_metrics(self, line: bytes) -> None:
        """Append a line, and force it to the disk before anything else is written."""
        with clear_write_errors(self.metrics), self.metrics.open("ab") as stream:
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())

    def cut_metrics(self, size: int) -> int:
        """Cut the log to at most `size` bytes, and to complete lines; returns its new size."""
        if not self.metrics.exists():
            return 0
        with clear_write_errors(self.metrics), self.metrics.open("rb+") as stream:
            # A power cut may have lost the end of the log, from the middle of a line, and kept the checkpoint.
            whole = stream.read(min(size, self.metrics.stat().st_size)).rfind(b"\n") + 1
            stream.truncate(whole)
        return whole

    def read_environment(self) -> dict[str, Any] | None:
        """The contents of environment.json; None if there is none."""
        if not self.environment.is_file():
            return None
        try:
            found = json.loads(self.environment.read_bytes(), parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{self.environment} is damaged: {error}") from error
        if not isinstance(found, dict) or not isinstance(found.get("resumed", []), list):
            raise RunError(f"{self.environment} is damaged: it must be a mapping, and `resumed` in it a list")
        return found

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while training: two processes that write to the same run would destroy it."""
        lock = self.path / ".lock"
        for path in (lock, self.metrics):  # the files that are written in place; all others are replaced as a whole
            if path.is_symlink():
                raise RunError(f"{path} is a link, and writing to it would change another file: remove it")
        with clear_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            stream = lock.open("a")  # not "w", which would empty somebody's own file of that name
        with stream:
            if not try_lock(stream, self.path):
                raise RunError(f"{self.path} is in use by another process")
            yield


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse(text)


def next_free(parent: Path, name: str) -> Path:
    """`parent/name`, or `parent/name-2`, `-3`, ... if that is taken."""
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path
