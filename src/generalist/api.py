"""The public functions: train, load, evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.utils.data import Dataset

from generalist.attacks.threats import ThreatOptions, parse_threat
from generalist.core.errors import DataError, RunError
from generalist.core.run import RunDirectory
from generalist.data.dataset import materialise
from generalist.data.options import DataOptions, load_splits
from generalist.data.sets import Images, from_arrays
from generalist.data.split import subset
from generalist.evaluation import Accuracy, check_classifier, evaluate_model
from generalist.models import ModelOptions, build_model, check_size
from generalist.recipe import Recipe, load_recipe
from generalist.stages import run_directory, train_runs
from generalist.tensors.flat import Flat
from generalist.training.artefacts import branch_files, load_weights
from generalist.training.environment import choose_device
from generalist.training.loop import Listener

RunLike = str | Path | RunDirectory
MAX_SIDE = 4096
"""More channels or pixels a side than any network here is made for: a weights file that says so is damaged."""


def train(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    *,
    overrides: Iterable[str] = (),
    out: str | Path | None = None,
    device: str = "auto",
    resume: bool = False,
    start: str | None = None,
    data: Any = None,
    trust_code: bool = False,
    listener: Listener | None = None,
) -> RunDirectory:
    """Train a recipe (a shipped name, a YAML file or a mapping) and return its run directory.

    `overrides` are `field.path=value` texts, `start` is `RUN[@EPOCH]` to branch from (the command line's --from),
    `data` is (images, labels) or {"train": ..., "test": ...} in memory. Everything is checked before anything runs.
    """
    overrides = [*overrides, "data.name=arrays"] if data is not None else list(overrides)
    if resume and isinstance(recipe, str | Path) and RunDirectory(Path(recipe)).exists():
        out = out or recipe
        recipe = RunDirectory(Path(recipe)).recipe
    whole = load_recipe(recipe, overrides=overrides, trust_code=trust_code)
    run = run_directory(whole, out, resume=resume)
    train_runs(
        whole,
        run,
        start=start,
        resume=resume,
        device=choose_device(device),
        data=data,
        trust_code=trust_code,
        listener=listener or Listener(),
    )
    return run


def load(run: RunLike, *, which: str = "best", device: str = "cpu", trust_code: bool = False) -> nn.Module:
    """A network in evaluation mode: of a run, or of a weights file.

    `which` is the `best` or the `last` global learner, or the name of a learner in the run's last snapshot.
    """
    path = run.path if isinstance(run, RunDirectory) else Path(run)
    if path.is_dir():
        path = _weights_file(RunDirectory(path).require(), which)
    state, about = load_weights(path)
    return _network(state, about, path, trust_code=trust_code).to(choose_device(device)).eval()


def evaluate(
    model: nn.Module | RunLike,
    data: Any,
    *,
    threats: str | ThreatOptions | Sequence[str | ThreatOptions] = ("linf:8/255",),
    attacks: str | Sequence[str] = ("natural", "pgd-20"),
    samples: int | None = None,
    batch_size: int = 500,
    seed: int = 0,
    device: str = "auto",
    trust_code: bool = False,
) -> dict[str, Accuracy]:
    """Accuracy of any module that maps [0,1] images to logits, natural and under attack.

    `data` is (images, labels), a torch Dataset, or the name of a data set (its test images). One threat or attack
    needs no list. `samples` takes a seeded random subset. The model is given back in its own mode, on its own device
    where it is a module.
    """
    images = _images(data, trust_code=trust_code)
    if isinstance(model, nn.Module):
        where = next((p.device for p in model.parameters()), torch.device("cpu"))
    else:
        where = choose_device(device)
        model = load(model, device=str(where), trust_code=trust_code)
    check_classifier(model, images, where)
    index = None if samples is None else subset(len(images), samples, seed)
    threats = [threats] if isinstance(threats, str | ThreatOptions) else threats
    attacks = [attacks] if isinstance(attacks, str) else attacks
    parsed = [threat if isinstance(threat, ThreatOptions) else parse_threat(threat) for threat in threats]
    return evaluate_model(
        model, images.to(where), threats=parsed, attacks=attacks, index=index, batch_size=batch_size, seed=seed
    )


# -- the parts ------------------------------------------------------------------------------------------------------


def _weights_file(run: RunDirectory, which: str) -> Path:
    if which in {"best", "last"}:
        return run.model if which == "best" else run.last
    files = branch_files(str(run.path), [which])
    if which not in files:
        raise RunError(f"{run.path} keeps no learner {which!r}; choose best, last or the name of a learner")
    return files[which]


def _network(state: dict[str, Any], about: dict[str, Any], path: Path, *, trust_code: bool) -> nn.Module:
    """Build what the file's header describes and fill in its weights."""
    try:
        options = ModelOptions.model_validate(about["model"])
        classes, shape = about["classes"], [int(size) for size in about["shape"]]
        if not isinstance(classes, list) or len(shape) != 3 or not all(0 < size <= MAX_SIDE for size in shape):
            raise ValueError(f"images of shape {shape}")  # believing it would allocate a network of that size
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(f"{path} does not say which network it belongs to: {error!r:.200}") from error
    check_size(options, state, num_classes=len(classes), shape=shape)
    model = build_model(options, num_classes=len(classes), shape=shape, seed=0, trust_code=trust_code)
    flat = Flat(model)
    flat.load(*flat.read(state))
    return model


def _images(data: Any, *, trust_code: bool) -> Images:
    if isinstance(data, str):
        try:
            options = DataOptions(name=data)
        except ValidationError as error:
            raise DataError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None
        splits = load_splits(options, trust_code=trust_code)
        return splits.test if splits.test is not None else splits.train
    if isinstance(data, tuple | list) and len(data) == 2:
        return from_arrays(data[0], data[1])
    if isinstance(data, Dataset):
        return materialise(data, name=type(data).__name__)
    if hasattr(data, "augmented"):
        images: Images = data
        return images
    raise RunError(f"data must be (images, labels), a torch Dataset or a data set's name, not {type(data).__name__}")
