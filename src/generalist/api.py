"""The public functions: train, load, evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from generalist.attacks.threats import ThreatOptions, parse_threat
from generalist.core.errors import RecipeError, RunError
from generalist.core.files import write_json, write_text
from generalist.core.run import RunDirectory, next_free
from generalist.data.dataset import materialise
from generalist.data.options import DataOptions, load_splits
from generalist.data.sets import Images, from_arrays
from generalist.data.split import subset
from generalist.evaluation import Accuracy, evaluate_model
from generalist.models import ModelOptions, build_model, check_model
from generalist.recipe import FRESH, Recipe, StageOptions, load_recipe, parse_yaml, stage_recipe, to_yaml
from generalist.tensors.flat import Flat
from generalist.training.artefacts import branch_files, load_weights
from generalist.training.environment import choose_device, describe, switches
from generalist.training.loop import Listener, Trainer

RunLike = str | Path | RunDirectory


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
    run = _run_directory(whole, out, resume=resume)
    stages = _plan(whole, run, start=start, trust_code=trust_code)
    where = choose_device(device)
    with run.lock():
        for stage, directory, files in stages:
            _train_stage(
                stage, directory, files, device=where, data=data, trust_code=trust_code, listener=listener or Listener()
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
    threats: Sequence[str | ThreatOptions] = ("linf:8/255",),
    attacks: Sequence[str] = ("natural", "pgd-20"),
    samples: int | None = None,
    batch_size: int = 500,
    seed: int = 0,
    device: str = "auto",
    trust_code: bool = False,
) -> dict[str, Accuracy]:
    """Accuracy of any module that maps [0,1] images to logits, natural and under attack.

    `data` is (images, labels), a torch Dataset, or the name of a data set (its test images). `samples` takes a
    seeded random subset. The model is given back in its own mode, on its own device where it is a module.
    """
    images = _images(data)
    if isinstance(model, nn.Module):
        where = next((p.device for p in model.parameters()), torch.device("cpu"))
    else:
        where = choose_device(device)
        model = load(model, device=str(where), trust_code=trust_code)
    check_model(model, images.shape, len(images.classes), where)
    index = None if samples is None else subset(len(images), samples, seed)
    parsed = [parse_threat(threat) if isinstance(threat, str) else threat for threat in threats]
    return evaluate_model(
        model, images.to(where), threats=parsed, attacks=attacks, index=index, batch_size=batch_size, seed=seed
    )


# -- the parts ------------------------------------------------------------------------------------------------------


def _run_directory(recipe: Recipe, out: str | Path | None, *, resume: bool) -> RunDirectory:
    if out is None:
        if resume:
            raise RunError("nothing to resume: name the run with --out RUN (or `generalist train RUN --resume`)")
        return RunDirectory(next_free(Path("runs"), recipe.name or "run"))
    run = RunDirectory(Path(out))
    if resume:
        _check_same_recipe(recipe, run.require())
    elif run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
        raise RunError(f"{run.path} exists already; go on with --resume, or choose another --out")
    return run


def _check_same_recipe(recipe: Recipe, run: RunDirectory) -> None:
    """A resumed run follows its own recipe to the letter."""
    before = parse_yaml(run.recipe.read_text(errors="replace"), str(run.recipe))
    now = parse_yaml(to_yaml(recipe), "recipe")
    changed = [field for field in now if field != "name" and now[field] != before.get(field)]
    if changed:
        raise RecipeError(
            changed[0], f"differs from that of {run.path}; a resumed run keeps its recipe (branch with --from instead)"
        )


Plan = list[tuple[Recipe, RunDirectory, "str | None"]]


def _plan(recipe: Recipe, run: RunDirectory, *, start: str | None, trust_code: bool) -> Plan:
    """(recipe, directory, where its weights come from) of each stage; all of it checked."""
    if not recipe.stages:
        if start is not None:
            branch_files(start, [])  # fails now where there is nothing to branch from
        return [(recipe, run, start)]
    names = [stage.name for stage in recipe.stages]
    plan: Plan = []
    for i, stage in enumerate(recipe.stages):
        directory = run if stage.name == names[-1] else run.stage(stage.name)
        source = _stage_source(stage, names[:i], run, start if i == 0 else None)
        plan.append((stage_recipe(recipe, stage, trust_code=trust_code), directory, source))
    return plan


def _stage_source(stage: StageOptions, earlier: list[str], run: RunDirectory, start: str | None) -> str | None:
    if stage.start in earlier:
        return str(run.stage(stage.start).path)
    if stage.start == FRESH:
        return start
    branch_files(stage.start, [])
    return stage.start


def _train_stage(
    recipe: Recipe,
    run: RunDirectory,
    source: str | None,
    *,
    device: torch.device,
    data: Any,
    trust_code: bool,
    listener: Listener,
) -> None:
    splits = load_splits(recipe.data, trust_code=trust_code, arrays=data)
    with switches(recipe.train, device):
        trainer = Trainer(recipe, run, splits, device=device, trust_code=trust_code, listener=listener)
        if source is not None:
            trainer.start_from(branch_files(source, [learner.name for learner in recipe.learners]))
        write_json(run.environment, describe(splits, device, recipe.train.seed))
        write_text(run.recipe, to_yaml(recipe))
        if trainer.resume():
            listener.say(f"resuming {run.path} at step {trainer.step}")
        trainer.run()


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
        classes, shape = len(about["classes"]), [int(size) for size in about["shape"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} does not say which network it belongs to: {error!r:.200}") from error
    model = build_model(options, num_classes=classes, shape=shape, seed=0, trust_code=trust_code)
    flat = Flat(model)
    flat.load(*flat.read(state))
    return model


def _images(data: Any) -> Images:
    if isinstance(data, str):
        splits = load_splits(DataOptions(name=data))
        return splits.test if splits.test is not None else splits.train
    if isinstance(data, tuple | list) and len(data) == 2:
        return from_arrays(data[0], data[1])
    if isinstance(data, Dataset):
        return materialise(data, name=type(data).__name__)
    if hasattr(data, "augmented"):
        images: Images = data
        return images
    raise RunError(f"data must be (images, labels), a torch Dataset or a data set's name, not {type(data).__name__}")
