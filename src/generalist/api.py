"""The public functions: train, load, evaluate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.utils.data import Dataset

from generalist.attacks.threats import ThreatOptions, parse_threat
from generalist.core.errors import DataError, RecipeError, RunError
from generalist.core.files import write_json, write_text
from generalist.core.run import RunDirectory, next_free
from generalist.data.dataset import materialise
from generalist.data.options import DataOptions, Splits, load_splits
from generalist.data.sets import Images, from_arrays
from generalist.data.split import subset
from generalist.evaluation import Accuracy, evaluate_model
from generalist.models import ModelOptions, build_model, check_model
from generalist.recipe import FRESH, Recipe, StageOptions, load_recipe, parse_yaml, stage_recipe, to_yaml
from generalist.tensors.flat import Flat
from generalist.training.artefacts import artefact_file, branch_files, load_weights
from generalist.training.environment import choose_device, describe, switches
from generalist.training.loop import Listener, Trainer

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
    run = _run_directory(whole, out, resume=resume)
    where = choose_device(device)
    # Every stage is built before the first one runs: whatever does not fit leaves nothing behind.
    stages = [
        _build(plan, device=where, data=data, trust_code=trust_code, listener=listener or Listener())
        for plan in _plan(whole, run, start=start, trust_code=trust_code)
    ]
    with run.lock():
        while stages:  # a stage that is done gives its memory back
            _train_stage(whole, run, *stages.pop(0), device=where)
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
    images = _images(data, trust_code=trust_code)
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
        # A recipe's name is anybody's text: only what can be one plain folder's name becomes a part of the path.
        folder = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.name).strip(".-")
        return RunDirectory(next_free(Path("runs"), folder or "run"))
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


@dataclass(frozen=True)
class _Plan:
    """One training run: a recipe's only one, or one of its stages."""

    recipe: Recipe
    directory: RunDirectory
    source: str | dict[str, str] | None = None
    """`RUN[@EPOCH]` that its weights come from, or one `RUN[@EPOCH][#SUBJECT]` a learner; None: fresh ones."""
    stages: dict[str, RunDirectory] = field(default_factory=dict)
    """The stages before this one, by name."""

    @property
    def waits(self) -> bool:
        """Whether a source is an earlier stage, which has yet to run."""
        sources = self.source.values() if isinstance(self.source, dict) else [self.source or ""]
        return any(text.partition("#")[0] in self.stages for text in sources)

    def source_files(self) -> dict[str, Path]:
        """The weights file of each subject that does not start fresh."""
        if isinstance(self.source, dict):
            return {name: artefact_file(self._where(text), name) for name, text in self.source.items()}
        return branch_files(self._where(self.source or ""), [learner.name for learner in self.recipe.learners])

    def _where(self, text: str) -> str:
        source, named, subject = text.partition("#")
        return str(self.stages[source].path) + named + subject if source in self.stages else text


def _plan(recipe: Recipe, run: RunDirectory, *, start: str | None, trust_code: bool) -> list[_Plan]:
    """The recipe's runs, in order; `start` is where the first one's weights come from."""
    if not recipe.stages:
        return [_Plan(recipe, run, start)]
    plans: list[_Plan] = []
    earlier: dict[str, RunDirectory] = {}
    for i, stage in enumerate(recipe.stages):
        own = stage_recipe(recipe, stage, trust_code=trust_code)
        directory = run if i == len(recipe.stages) - 1 else run.stage(stage.name)
        fresh = start if i == 0 else None
        plans.append(_Plan(own, directory, fresh if stage.start == FRESH else stage.start, dict(earlier)))
        _check_learners(stage, own)
        earlier[stage.name] = directory
    return plans


def _check_learners(stage: StageOptions, recipe: Recipe) -> None:
    names = [learner.name for learner in recipe.learners]
    for name in stage.start if isinstance(stage.start, dict) else ():
        if name not in names:
            known = ", ".join(names)
            raise RecipeError(
                f"stages.{stage.name}.start.{name}", f"there is no such learner; the learners are {known}"
            )


def _build(
    plan: _Plan, *, device: torch.device, data: Any, trust_code: bool, listener: Listener
) -> tuple[_Plan, Splits, Trainer]:
    """Read the data and make the learners; nothing is written."""
    recipe = plan.recipe
    splits = load_splits(recipe.data, trust_code=trust_code, arrays=data)
    if splits.train.resident:
        recipe.data.augmentation.check_fits(*splits.train.shape[1:])
    with switches(recipe.train, device):
        trainer = Trainer(
            recipe,
            plan.directory,
            splits,
            device=device,
            trust_code=trust_code,
            listener=listener,
            stages=plan.stages,
        )
        if plan.source is not None and not plan.waits:
            trainer.start_from(plan.source_files())
    return plan, splits, trainer


def _train_stage(
    whole: Recipe, run: RunDirectory, plan: _Plan, splits: Splits, trainer: Trainer, *, device: torch.device
) -> None:
    recipe, directory = plan.recipe, plan.directory
    with switches(recipe.train, device):
        write_json(directory.environment, describe(splits, device, recipe.train.seed))
        if trainer.resume():
            trainer.listener.say(f"resuming {directory.path} at step {trainer.step}")
        elif plan.source is not None:
            if plan.waits:
                trainer.start_from(plan.source_files())
            trainer.checkpoint()  # from here on, whoever resumes needs the source no more
        if directory != run:
            write_text(directory.recipe, to_yaml(recipe))
        # The whole recipe from the first stage on: --resume compares with it and needs every stage.
        write_text(run.recipe, to_yaml(whole))
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
        if len(shape) != 3 or not all(0 < size <= MAX_SIDE for size in shape):
            raise ValueError(f"images of shape {shape}")  # believing it would allocate a network of that size
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RunError(f"{path} does not say which network it belongs to: {error!r:.200}") from error
    model = build_model(options, num_classes=classes, shape=shape, seed=0, trust_code=trust_code)
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
