"""The public functions: train, load, evaluate, mix."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from generalist import dial
from generalist.attacks.autoattack import AutoAttack
from generalist.attacks.base import Attack
from generalist.attacks.threats import ThreatOptions, parse_threat
from generalist.core import distributed
from generalist.core.errors import DataError, GeneralistError, RunError
from generalist.core.run import RunDirectory
from generalist.data.evaluated import Source, images_of, own_images
from generalist.data.sets import Images
from generalist.data.split import subset
from generalist.evaluation import Evaluation, check_classifier, evaluate_model
from generalist.evaluation.classifier import device_of
from generalist.evaluation.out_of_distribution import (
    Keep,
    before_shift,
    fit_shift,
    measure_shift,
    parse_shift,
)
from generalist.evaluation.plan import Mode, Precision, Preset, make_plan, preset_named
from generalist.evaluation.suite import Moment, Place, suite_options
from generalist.recipe import Recipe, load_recipe, stage_recipes
from generalist.stages import check_ranks, folder_of, shared_directory, train_runs
from generalist.tracking import Tracker, make_trackers
from generalist.training.artefacts import load_weights
from generalist.training.environment import choose_device
from generalist.training.loop import Listener
from generalist.weights import network_of, run_of, weights_file

RunLike = str | Path | RunDirectory
SHIFT_BATCH = 500
"""Batch size for corrupted images; affects only speed and memory."""

DEFAULT_THREATS = ("linf:8/255",)


def train(
    recipe: RunLike | Mapping[str, Any] | Recipe,
    *,
    overrides: str | Iterable[str] | Mapping[str, Any] = (),
    out: str | Path | None = None,
    device: str = "auto",
    resume: bool = False,
    start: RunLike | None = None,
    data: Any = None,
    trust_code: bool = False,
    listener: Listener | None = None,
    trackers: str | Tracker | Sequence[str | Tracker] = (),
) -> RunDirectory:
    """Train a recipe and return its run directory.

    `recipe` is a shipped name, a YAML file, a mapping, or a run to `resume`. `overrides` are `field.path=value` strings
    or a mapping from fields to values. `start` is `RUN[@EPOCH][#SUBJECT]`, the weights to branch from (--from). `data`
    holds images in memory: (images, labels), or {"train": ..., "test": ...}. `trackers` log the run in addition to
    metrics.jsonl: tensorboard, wandb, mlflow, or objects of your own (`generalist.tracking.Tracker`).
    The whole recipe is checked before training starts. In a process started by torchrun, the training is shared with
    the other processes (`train.parallel`).
    """
    following = make_trackers(trackers)
    if isinstance(overrides, Mapping):
        changes = [
            f"{field}={value if isinstance(value, str) else json.dumps(value)}" for field, value in overrides.items()
        ]
    else:
        changes = [overrides] if isinstance(overrides, str) else list(overrides)
    changes += ["data.name=arrays"] if data is not None else []
    if isinstance(recipe, RunDirectory):
        recipe = recipe.path
    if resume and isinstance(recipe, str | Path) and RunDirectory(Path(recipe)).exists():
        out = out or recipe
        recipe = RunDirectory(Path(recipe)).recipe
    whole = load_recipe(recipe, overrides=changes, trust_code=trust_code)
    source = str(_path_of(start)) if start is not None else None
    with distributed.start(choose_device(device), timeout=whole.train.parallel.timeout) as group:
        check_ranks(whole, source, group)
        run, resume = shared_directory(whole, out, resume=resume, group=group, trust_code=trust_code)
        if out is None and not resume and run.path.name != folder_of(whole) and listener and group.first:
            listener.say(f"{run.path.with_name(folder_of(whole))} already exists: this run is {run.path}")
        train_runs(
            whole,
            run,
            start=source,
            resume=resume,
            device=group.device,
            data=data,
            trust_code=trust_code,
            listener=listener if listener and group.first else Listener(),
            group=group,
            trackers=following if group.first else (),
        )
    return run


def load(run: RunLike, *, which: str = "best", device: str = "cpu", trust_code: bool = False) -> nn.Module:
    """Load a network, in evaluation mode, from a run, an exported folder or a weights file.

    `which` is `best` or `last` for the global learner, or the name of a learner in the run's last snapshot. Append
    `@EPOCH`, as in `global@90`, for the snapshot of another epoch.
    """
    path = weights_file(_path_of(run), which)
    state, about = load_weights(path)
    return network_of(state, about, path, trust_code=trust_code).to(choose_device(device)).eval()


def evaluate(
    model: nn.Module | RunLike,
    data: Any = None,
    *,
    root: str | Path | None = None,
    which: str = "best",
    threats: str | ThreatOptions | Sequence[str | ThreatOptions] | None = None,
    attacks: str | Attack | AutoAttack | Sequence[str | Attack | AutoAttack] | None = None,
    preset: str | None = None,
    mode: Mode | None = None,
    samples: int | None = None,
    batch_size: int | None = None,
    precision: Precision = "default",
    shards: str = "1/1",
    seed: int = 0,
    device: str = "auto",
    out: str | Path | None = None,
    resume: bool = False,
    corruptions: str | Sequence[str] | None = None,
    perturbations: bool | Sequence[str] = False,
    official: str | Path | None = None,
    trust_code: bool = False,
    listener: Callable[[Moment], None] = lambda moment: None,
) -> Evaluation:
    """Measure the accuracy of a module that maps [0, 1] images to logits, natural and under attack.

    `data` is (images, labels), a torch Dataset, or the name of a data set, whose test images are used (`root` says
    where it is stored). Without it, a run is evaluated on its own test images. A `folder` is read at the resolution
    that the weights were trained at, or at 224.

    A single threat or attack needs no list. Threats default to those that the run's learners train against, else to
    linf:8/255; attacks to those of the `preset` (papers, standard or quick), else to natural and pgd-20. `samples`
    takes a seeded random subset. With `out`, records and summary are kept in a directory of their own below it;
    `resume` continues an interrupted evaluation there, and `shards="2/4"` evaluates the second of four parts.

    `corruptions` (`common`, `extra`, `all` or names) and `perturbations` are measured as well, into
    `.summary["out_of_distribution"]`; they are generated from the images, or read from the folder `official`.

    The result maps names to accuracies, and its `.summary` has everything else. A module keeps its mode and device.
    """
    shift = parse_shift(corruptions, perturbations, official)
    if shift and shards != "1/1":
        raise GeneralistError("corruptions are measured on all images at once: leave the shards out")
    usual = preset_named(preset) if preset is not None else Preset(("natural", "pgd-20"), "each")
    shard, count = _shard(shards)
    options = suite_options(
        mode=mode or usual.mode, precision=precision, batch_size=batch_size, seed=seed, shard=shard, shards=count
    )
    chosen = usual.attacks if attacks is None else _listed(attacks)
    home = None if isinstance(model, nn.Module) else _recipe_of(_path_of(model), trust_code=trust_code)
    parsed = _threats(threats, chosen, home, usual)
    # Before anything is read, so that a wrong name fails at once.
    plan = make_plan(chosen, parsed, mode=options.mode, precision=options.precision)
    subject, network = _subject(model, which, device, trust_code=trust_code)
    about = {} if isinstance(model, nn.Module) else load_weights(weights_file(_path_of(model), which))[1]
    source = _source_of(home, about, data=data, root=root, trust_code=trust_code)
    images = source.images
    _check_channels(about, images)
    check_classifier(network, images, device_of(network))
    shift = fit_shift(images, shift)
    index = _subset(len(images), samples, usual, seed)
    assumed = threats is None and home is None and not usual.threats and bool(plan.columns)
    warnings = _warnings(model, about, source, own=data is None, assumed=assumed)
    place = Place(Path(out), subject, source.split, resume=resume) if out is not None else None
    found = evaluate_model(
        network,
        images,
        threats=parsed,
        attacks=chosen,
        index=index,
        options=options,
        place=place,
        notes=shift.notes,
        warnings=warnings,
        listener=before_shift(listener, shift),
    )
    if shift:
        keep = Keep(Path(found.summary["directory"]), found.summary["identity"], resume) if place else None
        found.summary["out_of_distribution"] = measure_shift(
            network,
            images,
            shift,
            index=index,
            seed=seed,
            batch_size=batch_size or SHIFT_BATCH,
            keep=keep,
            after=len(plan.steps),
            listener=listener,
        )
    return found


def mix(
    run: RunLike,
    gamma: dial.Gamma,
    *,
    epoch: int | None = None,
    source: dial.Source | None = None,
    statistics: dial.Statistics = "best",
    device: str = "auto",
    data: Any = None,
    trust_code: bool = False,
) -> nn.Module:
    """Mix the learners of a finished run by other shares than its own; returns a network in evaluation mode.

    Nothing is trained. `gamma` is the lead learner's share; or, for N learners, N - 1 shares in the dial's order (the
    lead learner, other learners with a threat, learners without), where the last learner gets the rest; or a mapping
    from learners to shares. The learners are those of the last snapshot, or of `epoch`. `source` says what is mixed of
    each: its weights (`raw`), its average over time (`averaged`) or its part of the global learner (`parts`); by
    default the parts if the run has kept them, else what the run itself mixes. The `statistics` of BatchNorm are
    `mixed` like the weights, `reestimated` on training images, or the `best` of the two on the validation images. The
    last two read the run's images, so a run on arrays needs its `data` again.
    """
    where = RunDirectory(_path_of(run))
    how: dict[str, Any] = {"epoch": epoch, "source": source, "statistics": statistics}
    return dial.mix(where, gamma, **how, device=device, data=data, trust_code=trust_code).model


# -- helpers --------------------------------------------------------------------------------------------------------


def _path_of(run: RunLike) -> Path:
    if isinstance(run, RunDirectory):
        return run.path
    try:
        return Path(run)
    except TypeError:
        kind = type(run).__name__
        raise RunError(
            f"expected a run, a weights file or a torch.nn.Module, not {kind}: wrap it in a module"
        ) from None


def _unfinished(path: Path, about: dict[str, Any]) -> tuple[str, ...]:
    """A warning if the run has not finished."""
    run = RunDirectory(path)
    if not run.exists() or run.last.is_file():
        return ()
    return (f"measured before the run finished, on its network of epoch {about.get('epoch')}",)


def _changed(path: Path, images: Images) -> tuple[str, ...]:
    """A warning if the run's test images have changed since it was trained."""
    run = run_of(path)
    known = ((run.read_environment() if run is not None else None) or {}).get("data")
    before = known.get("test") if isinstance(known, dict) else None
    if before is None or before == images.checksum():
        return ()
    return (
        "these are not the test images that the run knew when it was trained: images, classes or their order differ",
    )


def _subset(count: int, samples: int | None, usual: Preset, seed: int) -> Tensor | None:
    """The images to evaluate: `samples` of `count`, or as many as the preset `usual` says; None: all."""
    if samples is None:
        if usual.samples is None or usual.samples >= count:
            return None
        samples = usual.samples
    return None if samples == count else subset(count, samples, seed)


def _subject(model: nn.Module | RunLike, which: str, device: str, *, trust_code: bool) -> tuple[str, nn.Module]:
    """The name of the network to evaluate, and the network."""
    if isinstance(model, nn.Module):
        own = device_of(model).type
        if device != "auto" and choose_device(device).type != own:
            raise GeneralistError(f"device {device!r}, but the model is on {own}: move it there, as with model.to(...)")
        return type(model).__name__, model
    path = _path_of(model)
    network = load(model, which=which, device=device, trust_code=trust_code)
    return which if path.is_dir() else path.stem, network


def _recipe_of(path: Path, *, trust_code: bool) -> Recipe | None:
    """The recipe of the last stage of the run at `path`, or around it; None for a file that belongs to no run."""
    run = run_of(path)
    return stage_recipes(load_recipe(run.recipe, trust_code=trust_code), trust_code=trust_code)[-1] if run else None


def _listed(
    attacks: str | Attack | AutoAttack | Sequence[str | Attack | AutoAttack],
) -> list[str | Attack | AutoAttack]:
    listed = [*attacks] if isinstance(attacks, list | tuple) else [cast(str | Attack | AutoAttack, attacks)]
    if not listed:
        raise GeneralistError("attacks: none is given; write natural for no attack, or names as in natural,pgd-20")
    return listed


def _threats(
    threats: str | ThreatOptions | Sequence[str | ThreatOptions] | None,
    attacks: Sequence[str | Attack | AutoAttack],
    recipe: Recipe | None,
    preset: Preset,
) -> list[ThreatOptions]:
    """The threats asked for; else those that the run trains against, and the preset's in any other norm."""
    if threats is None:
        own = [threat for learner in recipe.learners for threat in learner.threats()] if recipe else []
        norms = {threat.norm for threat in own}
        threats = [*own, *(word for word in preset.threats if word.partition(":")[0] not in norms)]
        if recipe and not threats and any(attack != "natural" for attack in attacks):
            raise RunError("this run trains against no threat: say which to evaluate, as in --threats linf:8/255")
        threats = threats if recipe or threats else DEFAULT_THREATS
    elif not threats and any(attack != "natural" for attack in attacks):
        raise RunError("threats: none is given, but attacks need one, as in linf:8/255")
    listed = [threats] if isinstance(threats, str | ThreatOptions) else threats
    if not isinstance(listed, Sequence) or not all(isinstance(threat, str | ThreatOptions) for threat in listed):
        raise RunError(f"threats: {threats!r} names none; write norm:eps, as in 'linf:8/255'")
    return [threat if isinstance(threat, ThreatOptions) else parse_threat(threat) for threat in listed]


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise RunError(f"shards: {text!r} is not a part: write i/n, as in 1/4 for the first of four")
    return int(match[1]), int(match[2])


def _source_of(
    home: Recipe | None, about: dict[str, Any], *, data: Any, root: str | Path | None, trust_code: bool
) -> Source:
    """The images asked for, or the run's own."""
    if data is not None:
        shape = _shape_in(about) if isinstance(data, str) and data == "folder" else None
        size = shape[1] if shape and shape[1] == shape[2] else None
        return images_of(data, root=root, resolution=size, trust_code=trust_code)
    if root is not None:
        raise RunError("root is the directory of a data set that `data` names: name one, as in data='folder'")
    return own_images(home.data if home is not None else None, trust_code=trust_code)


def _check_channels(about: dict[str, Any], images: Images) -> None:
    known = _shape_in(about)
    if known and known[0] != images.shape[0]:
        raise DataError(f"{images.name}: its images have {images.shape[0]} channels, those of the training {known[0]}")


def _shape_in(about: dict[str, Any]) -> list[int] | None:
    """Channels, height and width of the images that the weights were trained on, if their header says so."""
    shape = about.get("shape")
    return shape if isinstance(shape, list) and len(shape) == 3 and all(isinstance(n, int) for n in shape) else None


def _warnings(
    model: nn.Module | RunLike, about: dict[str, Any], source: Source, *, own: bool, assumed: bool
) -> tuple[str, ...]:
    """Warnings about the images, about threats that are `assumed`, and about the run, if the images are its `own`."""
    found = source.warnings
    if assumed:
        found = (*found, f"no threats were given: evaluated with {', '.join(DEFAULT_THREATS)}")
    if isinstance(model, nn.Module):
        return found
    path, known, size = _path_of(model), _shape_in(about), tuple(source.images.shape[1:])
    if known and size != tuple(known[1:]):
        found = (*found, f"these images are {size[0]}x{size[1]}, and the network was trained on {known[1]}x{known[2]}")
    return (*found, *_unfinished(path, about), *(_changed(path, source.images) if own else ()))
