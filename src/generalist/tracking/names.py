"""Trackers by name, with a clear error if a package is missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import cast

from generalist.core.errors import GeneralistError
from generalist.core.registry import unknown_name
from generalist.tracking.base import Tracker
from generalist.tracking.services import MLflow, WandB
from generalist.tracking.tensorboard import TensorBoard

TRACKERS: dict[str, tuple[Callable[[], Tracker], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboard", "pip install 'generalist-at[tensorboard]'"),
    "wandb": (WandB, "wandb", "pip install wandb"),
    "mlflow": (MLflow, "mlflow", "pip install mlflow"),
}
"""By name: how it is made, the package it needs, and how to install that."""


def make_trackers(wanted: str | Tracker | Sequence[str | Tracker]) -> list[Tracker]:
    """Trackers as given, and those that names stand for; a missing package is an error before anything runs."""
    listed = list(wanted) if isinstance(wanted, list | tuple) else [cast(str | Tracker, wanted)]
    # A name that is given twice means one tracker.
    return [_made(one) for i, one in enumerate(listed) if not isinstance(one, str) or one not in listed[:i]]


def _made(one: str | Tracker) -> Tracker:
    if not isinstance(one, str):
        if not isinstance(one, Tracker):
            raise GeneralistError(
                f"a tracker is a name or an object with name, start, epoch, images and end, not {type(one).__name__}"
            )
        return one
    if one not in TRACKERS:
        raise GeneralistError(unknown_name("tracker", one, list(TRACKERS)))
    make, package, remedy = TRACKERS[one]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise GeneralistError(f"the tracker {one!r} needs the package {package}: {remedy} ({error})") from error
    return make()
