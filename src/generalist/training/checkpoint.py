"""Checkpoints that survive a crash: atomic, checksummed, plain tensors, the last two kept.

A checkpoint is a torch file of tensors and plain values (`weights_only=True` loads it) with its SHA-256 in a file
beside it. The checksum is written first; the checkpoint exists once its data file is renamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from generalist.core.errors import RunError
from generalist.core.files import atomic_write, clear_write_errors, rename, sha256, write_text
from generalist.core.options import Options
from generalist.core.run import RunDirectory
from generalist.tensors.flat import ORDINARY

FORMAT = 1
_NAME = re.compile(r"step-\d{9}\.pt")
_PART = re.compile(r"\.?step-\d{9}\.(pt|sha256|new)(\.\d+\.tmp)?")


class Best(Options):
    """The best epoch so far."""

    epoch: int = Field(ge=0)
    """Counted from 1."""

    score: float
    """By the recipe's rule."""

    accuracy: dict[str, float]
    """Of the global learner."""


class Values(Options):
    """What a checkpoint keeps beside tensors."""

    step: int = Field(ge=0)
    """Iterations done."""

    data: str
    """Checksum of the training images: a run goes on with the data that it began with."""

    extra: str | None = None
    """Checksum of the extra images, where there are any."""

    unseen: list[int]
    """Training images that neither this run nor one that it descends from was trained on."""

    best: Best | None
    """None before the first validation."""

    regret: dict[str, Annotated[list[float], Field(min_length=1)]]
    """Each learner's clipped task losses, one a validation."""

    metrics_bytes: int = Field(ge=0)
    """Length of metrics.jsonl."""

    warnings: list[str]
    """What every output of the run must say."""

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise RunError(
                f"the checkpoint is damaged: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}"
            ) from None


@dataclass(frozen=True)
class Checkpoint:
    """Named tensors, and plain values that JSON can hold."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save(run: RunDirectory, checkpoint: Checkpoint, *, step: int, keep: int = 2) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`."""
    path = run.checkpoints / f"step-{step:09d}.pt"
    content = {"format": FORMAT, "tensors": checkpoint.tensors, "values": json.dumps(checkpoint.values)}
    hidden = path.with_suffix(".new")

    def write(stream: BinaryIO) -> None:
        torch.save(content, stream)

    try:
        digest = atomic_write(hidden, write)
        write_text(path.with_suffix(".sha256"), digest + "\n")
        with clear_write_errors(path):
            rename(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)
    _tidy(run, keep)
    return path


def _tidy(run: RunDirectory, keep: int) -> None:
    """Remove all but the newest, and the remains of one that was being written when a process was killed."""
    kept = {path.stem for path in _found(run)[:keep]}
    for file in run.checkpoints.iterdir():
        if _PART.fullmatch(file.name) and not (file.stem in kept and file.suffix in (".pt", ".sha256")):
            file.unlink(missing_ok=True)


def exist(run: RunDirectory) -> bool:
    """Whether any checkpoint was finished; a killed run may have left an empty folder."""
    return bool(_found(run))


def check_kept(run: RunDirectory) -> None:
    """Refuse a run that has results but no checkpoint: it could only start over and replace them.

    A run writes a checkpoint before any result, so somebody has removed its checkpoints.
    """
    if exist(run):
        return
    results = [path.name for path in (run.model, run.last) if path.is_file()]
    results += [run.metrics.name] if run.metrics.is_file() and run.metrics.stat().st_size else []
    results += [f"{run.snapshots.name}/"] if run.snapshot_epochs() else []
    if results:
        raise RunError(
            f"{run.path} has no checkpoint to continue from, and starting again would replace its {', '.join(results)}"
            ": restore its checkpoints, or train again with another --out"
        )


def load_newest(run: RunDirectory, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint; damaged ones are skipped with a warning. None if the run has none yet."""
    check_kept(run)
    paths = _found(run)
    for path in paths:
        try:
            return _read(path)
        except RunError as error:
            warn(f"{error}; falling back to the checkpoint before it")
    if paths:
        raise RunError(f"no checkpoint in {run.checkpoints} is intact; train again with another --out")
    return None


def _found(run: RunDirectory) -> list[Path]:
    """Newest first."""
    if not run.checkpoints.is_dir():
        return []
    return sorted((p for p in run.checkpoints.iterdir() if _NAME.fullmatch(p.name)), reverse=True)


def _read(path: Path) -> Checkpoint:
    checksum = path.with_suffix(".sha256")
    if not checksum.is_file() or checksum.read_text(errors="replace").strip() != sha256(path):
        raise RunError(f"{path} is damaged: its checksum does not match")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise RunError(f"{path} has format {content['format']!r}; this version reads {FORMAT}")
        tensors, values = content["tensors"], json.loads(content["values"])
    except RunError:
        raise
    except Exception as error:  # a crafted file can fail in any way; none of them may end in a traceback
        raise RunError(f"{path} cannot be read: {type(error).__name__}") from error
    if not isinstance(values, dict) or not isinstance(tensors, dict):
        raise RunError(f"{path} cannot be read: not a checkpoint")
    if not all(isinstance(name, str) and _is_plain(tensor) for name, tensor in tensors.items()):
        raise RunError(f"{path} cannot be read: not a checkpoint")
    return Checkpoint(tensors=tensors, values=values)


def _is_plain(tensor: object) -> bool:
    """Whether it is an ordinary dense tensor on the CPU; others cannot be copied into a run's tensors."""
    return (
        isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype in ORDINARY
    )
