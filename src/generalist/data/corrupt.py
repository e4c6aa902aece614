"""Which files of a folder are not intact images, remembered from one run to the next.

Reading a million images takes minutes, so the result is stored under a hash of all names, sizes and times. Of several
processes that start together, one reads the files and the others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from generalist.core.errors import RunError
from generalist.core.files import alone, write_json

RULES = 2
"""Increased when more kinds of files become acceptable, so that results stored before are ignored."""


def find_problems(
    names: Sequence[str],
    files: Sequence[Path],
    check: Callable[[Sequence[Path]], list[str | None]],
    *,
    cache: Path | None,
) -> dict[str, str]:
    """What is wrong with each file that `check` complains about, by name."""
    memory = cache / f"{_fingerprint(names, files)}.json" if cache is not None else None
    with _alone(memory):
        remembered = _read(memory, names)
        if remembered is not None:
            return remembered
        problems = {name: problem for name, problem in zip(names, check(files), strict=True) if problem is not None}
        if memory is not None:
            with contextlib.suppress(RunError):  # an unwritable place only costs time at the next start
                write_json(memory, problems)
    return problems


def _fingerprint(names: Sequence[str], files: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{RULES}\n".encode())
    for name, path in zip(names, files, strict=True):
        about = path.stat()
        digest.update(f"{name} {about.st_size} {about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _alone(memory: Path | None) -> AbstractContextManager[None]:
    """Admits one process at a time, if the memory can be written."""
    if memory is None:
        return contextlib.nullcontext()
    lock = memory.with_suffix(".lock")
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    return alone(lock)


def _read(memory: Path | None, names: Sequence[str]) -> dict[str, str] | None:
    """What was found before; None if there is nothing stored, or nothing that fits."""
    if memory is None or not memory.is_file():
        return None
    try:
        found = json.loads(memory.read_text())
    except (OSError, ValueError):
        return None
    known = set(names)
    fits = isinstance(found, dict) and all(name in known and isinstance(text, str) for name, text in found.items())
    return found if fits else None
