"""From options to the parts of a run: images, learners, the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from generalist.core.errors import RecipeError
from generalist.data.options import Splits
from generalist.data.sets import Images, ImageSet, join
from generalist.models import build_model, check_model
from generalist.objectives.base import build_objective
from generalist.tensors.folding import CannotFoldError, check_trace
from generalist.tensors.sync_batchnorm import synchronise
from generalist.training.engine import EagerEngine
from generalist.training.global_learner import GlobalLearner
from generalist.training.graph import GraphEngine, why_not_graph
from generalist.training.learner import Learner
from generalist.training.options import Job
from generalist.training.parallel import Parallel

WORTH_COMPILING = 2000
"""The number of iterations from which compilation pays for itself."""


def with_extra(splits: Splits) -> tuple[Images, Tensor | None]:
    """The training images with the extra ones behind them, and the indices of those."""
    if splits.extra is None:
        return splits.train, None
    assert isinstance(splits.train, ImageSet), "the recipe's check allows extra images in memory only"
    return join(splits.train, splits.extra), len(splits.train) + torch.arange(len(splits.extra))


def build_learners(
    job: Job,
    images: Images,
    index: Tensor,
    *,
    device: torch.device,
    artefact: Callable[[str], dict[str, Tensor]],
    validation: tuple[Images, Tensor],
    trust_code: bool,
    parallel: Parallel,
) -> list[Learner]:
    """All learners, from one and the same fresh network; `index` says which images are trained on."""
    model = build_model(
        job.model, num_classes=len(images.classes), shape=images.shape, seed=job.train.seed, trust_code=trust_code
    )
    model = model.to(device, torch.float64 if job.train.precision == "fp64" else torch.float32)
    if job.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check_model(model, images.shape, len(images.classes), device)
    for i, options in enumerate(job.learners):
        if options.cutout >= min(images.shape[1:]):
            raise RecipeError(f"learners.{i}.cutout", f"{options.cutout} covers a whole image; make it smaller")
        if options.augmentation is not None:
            if not images.resident:
                raise RecipeError(f"learners.{i}.augmentation", "images are streamed from files; set data.resident")
            options.augmentation.check_fits(*images.shape[1:], field=f"learners.{i}.augmentation")
    if parallel.sync is not None:
        synchronise(model, parallel.sync)
    learners = [
        Learner(
            options,
            copy.deepcopy(model),
            build_objective(options.objective),
            seed=job.train.seed,
            images=images,
            index=index,
            artefact=artefact,
            epochs=job.train.epochs,
            padding=(options.augmentation or job.data.augmentation).crop,
            validation=validation,
            autocast=job.train.autocast,
            counters=job.mixing.counters,
            parallel=parallel,
        )
        for options in job.learners
    ]
    for i, learner in enumerate(learners):
        if parallel.ranks > 1 and not learner.objective.separable:
            raise RecipeError(
                f"learners.{i}.objective",
                f"{learner.options.objective.kind!r} needs whole batches, which {parallel.ranks} ranks would divide; "
                "set train.parallel.layout to learners, or start fewer processes",
            )
    return learners


def build_engine(
    job: Job,
    images: Images,
    learners: Sequence[Learner],
    global_learner: GlobalLearner,
    *,
    device: torch.device,
    iterations: int,
    say: Callable[[str], None],
    parallel: Parallel | None = None,
) -> EagerEngine:
    """The engine that the recipe asks for, or with `auto` the fastest that can run here."""
    wanted = job.train.engine
    problem = why_not_graph(job, images, device, learners, parallel)
    if wanted == "graph" and problem is not None:
        raise RecipeError("train.engine", f"graph cannot run here: {problem}; use auto or eager")
    if wanted == "auto" and problem is not None and device.type == "cuda":
        say(f"eager engine: {problem}")
    graph = wanted != "eager" and problem is None
    compiled = job.train.compile
    if compiled == "auto":
        compiled = graph and iterations >= WORTH_COMPILING and not job.train.deterministic
    synchronised = parallel is not None and parallel.sync is not None
    if compiled and synchronised:
        say("networks are not compiled for training: BatchNorm is synchronised (train.parallel.sync_batchnorm)")
    engine = (
        GraphEngine(job, learners, global_learner, parallel, say=say)
        if graph
        else EagerEngine(job, learners, global_learner, parallel)
    )
    if compiled:
        engine.compile()
        for learner in learners:
            learner.compile(network=not synchronised)
    for learner in learners:
        if graph and learner.attacks:
            fold(learner, images, compiled=compiled, say=say)
    return engine


def fold(learner: Learner, images: Images, *, compiled: bool, say: Callable[[str], None]) -> None:
    """Let the learner attack a folded network; if there is none, say why and attack the network itself."""
    try:
        x = images.batch(torch.arange(min(2, len(images)))).x
        check_trace(learner.model, x.to(learner.flat.vector))
        learner.fold(images.shape, compiled=compiled)
    except CannotFoldError as reason:
        say(f"learner {learner.name!r} attacks its network as it is, without folding BatchNorm: {reason}")
