"""From a run, an exported folder or a weights file to the network that the file's header describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from generalist.core.errors import GeneralistError, RunError
from generalist.core.options import first_problem
from generalist.core.run import RunDirectory
from generalist.evaluation.identity import weights_checksum
from generalist.models import ModelOptions, build_model, check_size
from generalist.tensors.flat import Flat
from generalist.training.artefacts import FOREIGN, files_of, load_weights, trained

GLOBALS = ("best", "last")
"""Names that `which` may have for the global learner, besides the subjects of snapshots."""
MAX_SIDE = 4096
"""More channels or pixels per side than any network here is made for: a weights file that claims more is damaged."""


def weights_file(path: Path, which: str = "best") -> Path:
    """The file with the weights: those named by `which` in a run, the only ones in an exported folder, or `path`."""
    if not path.is_dir():
        return path
    run = RunDirectory(path)
    if not run.exists() and run.model.is_file():
        if which != "best":
            raise RunError(f"{path} is an exported model and holds one network: leave {which!r} out")
        return run.model
    if which in GLOBALS:
        return run.require().model if which == "best" else run.require().last
    name, at, epoch = which.partition("@")
    if not name or "/" in name or (at and (name in GLOBALS or not re.fullmatch(r"[1-9]\d{0,8}", epoch, re.ASCII))):
        raise RunError(f"{which!r} names no network: write best, last, NAME or NAME@EPOCH, as in global@90")
    files = files_of(run.require(), int(epoch) if at else None, [name])
    if name not in files:
        raise RunError(f"{run.path} keeps no learner {name!r}; choose {', '.join([*GLOBALS, *_kept(run, epoch)])}")
    return trained(files[name])


def _kept(run: RunDirectory, epoch: str) -> list[str]:
    """The networks in the run's snapshot of that epoch, or in its last one."""
    epochs = [epoch] if epoch else [str(epoch) for epoch in run.snapshot_epochs()]
    files = (run.snapshots / epochs[-1]).glob("*.safetensors") if epochs else []
    return sorted(path.stem for path in files)


def run_of(path: Path) -> RunDirectory | None:
    """The run at `path`, or the one that a weights file lies in; None for an exported folder and other files."""
    if not path.exists():
        raise RunError(f"there is no run and no weights file {path}")
    if path.is_dir():
        run = RunDirectory(path)
        return None if run.model.is_file() and not run.exists() else run.require()
    places = map(RunDirectory, list(path.absolute().parents)[:3])
    return next((run for run in places if run.keeps(path)), None)


def network_of(state: Mapping[str, Tensor], about: Mapping[str, Any], path: Path, *, trust_code: bool) -> nn.Module:
    """Build what the file's header describes and fill in its weights."""
    if not about:
        raise RunError(f"{path} does not say which network it belongs to: it has no header of ours{FOREIGN}")
    try:
        options = ModelOptions.model_validate(about["model"])
        classes, shape = about["classes"], [int(size) for size in about["shape"]]
        if not isinstance(classes, list) or len(shape) != 3 or not all(0 < size <= MAX_SIDE for size in shape):
            raise ValueError(f"images of shape {shape}")  # believing it would allocate a network of that size
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = f"model: {first_problem(error)}" if isinstance(error, ValidationError) else repr(error)
        raise RunError(f"{path} does not say which network it belongs to: {why:.200}") from error
    check_size(options, state, num_classes=len(classes), shape=shape)
    model = build_model(options, num_classes=len(classes), shape=shape, seed=0, trust_code=trust_code)
    Flat(model).become(state)
    return model


def checksum_of(run: Path, which: str, *, trust_code: bool) -> str | None:
    """The checksum of a run's weights, as evaluations record it; None if there are none or they cannot be read."""
    try:
        file = weights_file(run, which)
        return weights_checksum(network_of(*load_weights(file), file, trust_code=trust_code))
    except GeneralistError:
        return None
