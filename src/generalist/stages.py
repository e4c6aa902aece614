"""From a recipe to its runs on disk: one run, or one for each stage, in order.

Every run is built (data, networks, starting weights) before anything is written, so that a mistake leaves nothing
behind. The files that identify a directory are written first: environment.json, recipe.yaml, then checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from generalist._version import __version__
from generalist.core import ranks
from generalist.core.distributed import Group
from generalist.core.errors import InterruptedRunError, RecipeError, RunError
from generalist.core.files import write_json, write_text
from generalist.core.run import GLOBAL, RunDirectory, next_free
from generalist.data.options import Splits, load_splits
from generalist.recipe import FRESH, Recipe, parse, parse_yaml, to_yaml
from generalist.stage_plans import Plan, Shapes, check_shapes, plan_runs
from generalist.tracking import Tracker, Tracking
from generalist.training import checkpoint as checkpoints
from generalist.training.artefacts import artefact_file
from generalist.training.environment import describe, switches
from generalist.training.loop import Listener, Trainer
from generalist.training.signals import StopRequest, stop_requests

RUNS = Path("runs")
"""Where runs go by default."""

HOW = [
    *("name", "source", "data.root", "data.workers", "data.decoder", "validation.batch_size"),
    *("train.engine", "train.compile", "train.parallel", "train.checkpoint_epochs", "train.checkpoint_minutes"),
]
"""Fields that change how the work is done, or its name, but not the result: a resumed run may change them."""


def run_directory(recipe: Recipe, out: str | Path | None, *, resume: bool, trust_code: bool = False) -> RunDirectory:
    """Where a run goes: a new directory, or if it is resumed the one that holds it."""
    if out is None and not resume:
        return RunDirectory(next_free(RUNS, folder_of(recipe)))
    run = RunDirectory(Path(out)) if out is not None else _only_run(folder_of(recipe))
    if resume:
        _check_same_recipe(recipe, run.require(), trust_code=trust_code)
        for part in (run, *(run.stage(stage.name) for stage in recipe.stages)):
            checkpoints.check_kept(part)
    else:
        _check_free(run)
    return run


def folder_of(recipe: Recipe) -> str:
    """The default name of the folder below runs/ for its first run."""
    # A recipe's name can be any text: only characters that are safe in the name of one folder are kept.
    return re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.name).strip(".-") or "run"


def _only_run(folder: str) -> RunDirectory:
    """The only run below runs/ with this folder's name, or with a number behind it; of several, the unfinished one."""
    named = [RunDirectory(path) for path in sorted(RUNS.glob(f"{folder}*"))]
    found = [run for run in named if run.exists() and re.fullmatch(r"(-\d+)?", run.path.name[len(folder) :])]
    unfinished = [run for run in found if not run.last.is_file()]
    if len(found) != 1 and len(unfinished) != 1:
        paths = ", ".join(str(run.path) for run in unfinished or found)
        there = f"there are several, {paths}" if found else f"there is no {RUNS / folder}"
        raise RunError(f"nothing to resume: {there}; name the run with --out RUN (or `generalist train RUN --resume`)")
    return (unfinished or found)[0]


def check_ranks(recipe: Recipe, start: str | None, group: Group) -> None:
    """Refuse a job whose processes were given different things, such as an older file on one node."""
    fields = {f"the recipe's {name}": value for name, value in _plain(recipe).items() if name not in ("name", "source")}
    versions = {"the version of generalist": __version__, "the version of PyTorch": str(torch.__version__)}
    group.check_alike({**versions, "--from": start, **fields})


def shared_directory(
    recipe: Recipe, out: str | Path | None, *, resume: bool, group: Group, trust_code: bool = False
) -> tuple[RunDirectory, bool]:
    """(where the run of all ranks goes, whether it is resumed), as decided by rank 0.

    A job that torchrun may restart after losing a rank begins its run, or continues it if there already is one.
    """
    if out is None and ranks.restartable():
        raise RunError("torchrun may restart this job: name the run with --out RUN, so that it can continue there")
    found = None
    if group.first:
        resume = resume or (ranks.restartable() and RunDirectory(Path(out or "")).exists())
        found = run_directory(recipe, out, resume=resume, trust_code=trust_code), resume
    shared: tuple[RunDirectory, bool] = group.from_first(found)
    return shared


def _check_free(run: RunDirectory) -> None:
    if run.path.exists() and not (run.path.is_dir() and run.barely_begun()):
        remedy = "go on with --resume, or choose" if run.exists() else "it is not a run: choose"
        raise RunError(f"{run.path} exists already; {remedy} another --out")


def _check_same_recipe(recipe: Recipe, run: RunDirectory, *, trust_code: bool) -> None:
    """A resumed run must have the same recipe, except for the fields in `HOW`."""
    now, before = _plain(recipe), parse_yaml(run.recipe.read_text(errors="replace"), str(run.recipe))
    with suppress(RecipeError):  # fills in the defaults of options that are newer than the run
        before = _plain(parse(before, trust_code=trust_code))
    for raw in (now, before):
        for field in HOW:
            section, _, name = field.rpartition(".")
            if isinstance(fields := raw.get(section) if section else raw, dict):
                fields.pop(name, None)
    if changed := _first_change(now, before):
        raise RecipeError(
            changed, f"differs from that of {run.path}; a resumed run keeps its recipe (branch with --from)"
        )


def _first_change(one: Any, other: Any) -> str:
    """The path of the first field in which two plain recipes differ; empty if there is none."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(name, one.get(name), other.get(name)) for name in {**one, **other}]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(one, other, strict=True))]
    else:
        return ""
    for name, mine, theirs in pairs:
        if mine != theirs:
            return f"{name}.{_first_change(mine, theirs)}".rstrip(".")
    return ""


def _plain(recipe: Recipe) -> dict[str, Any]:
    return parse_yaml(to_yaml(recipe), "recipe")


@dataclass(frozen=True)
class _Built:
    splits: Splits
    trainer: Trainer


def train_runs(
    whole: Recipe,
    run: RunDirectory,
    *,
    start: str | None,
    resume: bool,
    device: torch.device,
    data: Any,
    trust_code: bool,
    listener: Listener,
    group: Group,
    trackers: Sequence[Tracker] = (),
) -> None:
    """Check everything, then train each run of the recipe, under one lock and with one handler of signals."""
    if resume:
        recorded: str | None = group.from_first(_recorded_source(whole, run) if group.first else None)
        if start is not None and start != recorded:
            raise RunError(
                f"{run.path}started from {recorded or 'fresh weights'}: a resumed run continues, leave --from out"
            )
        start = recorded
    plans = plan_runs(whole, run, start=start, trust_code=trust_code)
    if not resume:
        for plan in plans:
            _check_start_epoch(plan)

    def build(plan: Plan, listener: Listener = listener) -> _Built:
        return _build(plan, device=device, data=data, trust_code=trust_code, listener=listener, group=group)

    ready: _Built | None = build(plans[0])
    shapes = [_shapes(ready)]
    for plan in plans[1:]:  # only for their complaints, so that not all learners are in memory together
        shapes.append(_shapes(build(plan, Listener())))
    check_shapes(whole, plans, shapes)
    tracking = Tracking(trackers, listener.say)
    with run.lock() if group.first else nullcontext(), stop_requests(patient=group.world > 1) as request:
        if not resume and group.first:
            _check_free(run)  # again, now that no other process can interfere
        for i, plan in enumerate(plans):
            stage, ready = ready or build(plan), None
            _train_stage(whole, run, plan, stage, resume=resume, device=device, request=request, tracking=tracking)
            del stage  # and its memory, before the next one is built
            (received,) = group.agree([request.received or 0])
            if received and i + 1 < len(plans):
                raise InterruptedRunError(
                    f"stopped after stage {whole.stages[i].name!r}; go on with --resume", received
                )


def _check_start_epoch(plan: Plan) -> None:
    """Refuse to begin in the middle of the schedules with untrained weights."""
    if plan.recipe.train.start_epoch and plan.source is None:
        raise RecipeError(
            "train.start_epoch",
            f"{plan.recipe.train.start_epoch} epochs count as done, but training would start from fresh weights: say "
            "where they come from (--from RUN@EPOCH, or a stage's `start`), or leave it out",
        )


def _shapes(built: _Built | None) -> Shapes:
    assert built is not None
    return {name: tuple(t.shape) for name, t in built.trainer.learners[0].flat.module.state_dict().items()}


def _build(
    plan: Plan, *, device: torch.device, data: Any, trust_code: bool, listener: Listener, group: Group
) -> _Built:
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
            locate=plan.locate,
            group=group,
        )
        _check_images(splits, trainer)
        started = group.from_first(checkpoints.exist(plan.directory))
        if not started:  # a run that has a checkpoint no longer needs its sources
            for text in plan.sources():
                if plan.stage_of(text) is None:
                    trainer.check_source(artefact_file(text, GLOBAL))
            if plan.source is not None and not plan.waits:
                trainer.start_from(plan.source_files())
    return _Built(splits, trainer)


def _check_images(splits: Splits, trainer: Trainer) -> None:
    """Refuse a job whose nodes have different copies of the training or validation images."""
    if trainer.group.world > 1:
        tested = splits.test if trainer.job.validation.split == "test" else None
        checksums = [trainer.data, trainer.extra, tested.checksum() if tested is not None else None]
        trainer.group.check_alike({"its images": checksums})


def _train_stage(
    whole: Recipe,
    run: RunDirectory,
    plan: Plan,
    built: _Built,
    *,
    resume: bool,
    device: torch.device,
    request: StopRequest,
    tracking: Tracking,
) -> None:
    recipe, directory, trainer = plan.recipe, plan.directory, built.trainer
    for note in built.splits.notes():
        trainer.listener.say(f"warning: {note}")
    with switches(recipe.train, device):
        resumed = resume and trainer.resume()  # first, so that a run that is refused stays unchanged
        epochs = recipe.train.epochs
        finished = resumed and trainer.step == epochs * trainer.steps_per_epoch
        if trainer.group.first:
            if not finished:
                now = describe(built.splits, device, recipe.train.seed)
                now["parallel"] = trainer.parallel.describe()
                _record_environment(directory, now, plan.source, resume=resume)
            if directory != run:
                write_text(directory.recipe, to_yaml(recipe))
            # The whole recipe from the first stage on: --resume compares with it and needs every stage.
            write_text(run.recipe, to_yaml(whole))
        if resumed:
            done = f"{directory.path} has finished (epoch {epochs} of {epochs}): nothing is left to do"
            trainer.listener.say(done if finished else f"resuming {directory.path} at step {trainer.step}")
        else:
            for text in plan.sources():
                if plan.stage_of(text) is not None:  # the others were checked before anything ran
                    trainer.check_source(artefact_file(plan.locate(text), GLOBAL))
            if plan.waits:
                trainer.start_from(plan.source_files())
            # Weights that another node has drawn or read may differ in their rounding: all take those of rank 0.
            trainer.parallel.as_first(trainer.live_tensors().values())
            trainer.global_learner.restored()
            # The first checkpoint comes before any result. Resuming no longer needs the sources after that, and a run
            # with results but without a checkpoint must have lost it.
            trainer.checkpoint()
        with tracking.following(recipe, trainer):
            trainer.run(request)
    if finished and not directory.model.is_file():
        raise RunError(f"{directory.model} is missing, and only training can make it: train again, with another --out")


def _record_environment(
    run: RunDirectory, now: dict[str, Any], source: str | dict[str, str] | None, *, resume: bool
) -> None:
    """Write the environment that the run started in, the source of its weights, and the environment of each resume."""
    before = run.read_environment() if resume else None  # a new run may find that of one that was killed at its start
    if before is None:
        write_json(run.environment, {**now, "from": source})
    else:
        write_json(run.environment, {**before, "resumed": [*before.get("resumed", []), now]})


def _recorded_source(whole: Recipe, run: RunDirectory) -> str | None:
    """Where a resumed run was branched from, which it needs if it was killed before its first checkpoint."""
    first = run.stage(whole.stages[0].name) if len(whole.stages) > 1 else run
    environment = first.read_environment() or {}
    source = environment.get("from")
    fresh = not whole.stages or whole.stages[0].start == FRESH
    return source if isinstance(source, str) and fresh else None
