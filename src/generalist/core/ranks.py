"""Which process of a torchrun job this is, and whether it is the one that talks to the user."""

from __future__ import annotations

import os
from dataclasses import dataclass

from generalist.core.errors import GeneralistError


@dataclass
class Telling:
    """Which process tells the user of a failure."""

    joined: bool = False
    """Whether this process has joined the others of a job."""
    teller: bool | None = None
    """Whether it is this process; None: no group has failed."""
    label: str = ""
    """The beginning of its message."""


telling = Telling()


def launched() -> tuple[int, int]:
    """(rank, world size) from the environment that torchrun sets; (0, 1) without it."""
    return (variable("RANK", 0), variable("WORLD_SIZE", 1)) if "WORLD_SIZE" in os.environ else (0, 1)


def restartable() -> bool:
    """Whether torchrun would start this job's processes anew."""
    return variable("TORCHELASTIC_MAX_RESTARTS", 0) > 0


def tells() -> bool:
    """Whether this process is the one that talks to the user."""
    if telling.teller is not None:
        return telling.teller
    try:
        return launched()[0] == 0
    except GeneralistError:  # the environment is broken, which is just what has to be told
        return True


def complains() -> bool:
    """Whether this process is the one that tells the user of a failure: only one of several that fail together is.

    Before they have joined, it is one on each node, as something may be wrong on that node alone.
    """
    if telling.teller is not None:
        return telling.teller
    try:
        rank, world = launched()
        return world == 1 or variable("LOCAL_RANK", rank) == 0
    except GeneralistError:
        return True


def joined() -> bool:
    """Whether this process has been part of a job of several, so that it must end without the interpreter's cleanup."""
    return telling.joined


def failed() -> bool:
    """Whether the job that this process belongs to has failed."""
    return telling.teller is not None


def label() -> str:
    """`rank N: ` if the failure is that of one rank, else nothing."""
    return telling.label


def variable(name: str, default: int) -> int:
    """A number that torchrun sets in the environment."""
    text = os.environ.get(name, str(default))
    if not text.isascii() or not text.isdecimal():
        raise GeneralistError(f"the environment variable {name} is {text!r}, not a number; start with torchrun")
    return int(text)
