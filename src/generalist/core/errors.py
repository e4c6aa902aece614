"""Errors that are shown to the user in one or two clear lines, never as a traceback."""

import traceback
from pathlib import Path


class GeneralistError(Exception):
    """Something the user can fix: the command line prints it and exits with `exit_code`."""

    exit_code = 2


class RecipeError(GeneralistError):
    """A recipe field that is wrong, with its path and the remedy."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"recipe: {path}: {problem}" if path else f"recipe: {problem}")
        self.path = path
        self.problem = problem


class DataError(GeneralistError):
    """A data set that is missing, damaged or not what it should be."""


class RunError(GeneralistError):
    """A run directory, checkpoint or weights file that cannot be used as asked."""


class DivergedError(GeneralistError):
    """A learner's loss is no longer finite."""


class SweepError(GeneralistError):
    """A sweep, its storage or one of its expressions cannot be used as asked."""


class InterruptedRunError(GeneralistError):
    """Training was stopped by a signal and left a checkpoint."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number  # the shell's convention: not done, and nobody's mistake


class LostRankError(GeneralistError):
    """Another process of a distributed job has died, or has not answered in time."""


def with_place(error: Exception) -> str:
    """An error of somebody's own code for one line: its kind, what it says, and where it was raised."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) or not (frames := traceback.extract_tb(error.__traceback__)):
        return text  # which says where, or was never raised
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
