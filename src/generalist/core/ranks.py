"""Which process of a job this is, as torchrun's environment says, and whether it is the one that talks to the user."""

from __future__ import annotations

import os
from dataclasses import dataclass

from generalist.core.errors import GeneralistError


@dataclass
class Telling:
    """Who tells the user of a failure."""

    joined: bool = False
    """Whether this process has met the others of a job."""
    teller: bool | None = None
    """Whether this process does; None: no group has failed."""
    label: str = ""
    """What its message begins with."""


telling = Telling()


def launched() -> tuple[int, int]:
    """(rank, world size) by the environment that torchrun sets; (0, 1) where there is none."""
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
    except GeneralistError:  # an environment that names no rank: this is what there is to tell
        return True


def complains() -> bool:
    """Whether this process is the one that tells the user of a failure: of several that fail together, one does.

    Before they have met, one on each node: what is wrong there may be so on that node alone.
    """
    if telling.teller is not None:
        return telling.teller
    try:
        rank, world = launched()
        return world == 1 or variable("LOCAL_RANK", rank) == 0
    except GeneralistError:
        return True


def joined() -> bool:
    """Whether this process has been part of a job of several: such a one is not taken down by the interpreter."""
    return telling.joined


def failed() -> bool:
    """Whether the job that this process belongs to has."""
    return telling.teller is not None


def label() -> str:
    """`rank N: ` where a failure is that rank's, else nothing."""
    return telling.label


def variable(name: str, default: int) -> int:
    """A number that torchrun sets in the environment."""
    text = os.environ.get(name, str(default))
    if not text.isascii() or not text.isdecimal():
        raise GeneralistError(f"the environment variable {name} is {text!r}, not a number; start with torchrun")
    return int(text)
