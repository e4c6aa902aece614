"""`generalist bench train`: both engines and the published code's loop, measured one after the other in one process.

The order is graph, eager, published: cuDNN remembers the kernels that it chose, and the start-up time of the graph
engine, the one that matters, must not profit from an earlier subject's search.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch._dynamo.utils

from generalist.bench.flops import FORMULA, ModelFlops, count_model, iteration_flops, why_not_counted
from generalist.bench.images import synthetic_splits
from generalist.bench.published import why_not_published
from generalist.bench.subjects import BATCHES, Setting, Subject, engine_subject, published_subject
from generalist.bench.timing import Ceiling, Timing, matmul_ceiling, synchronize, time_blocks
from generalist.core.errors import GeneralistError, RecipeError
from generalist.data.options import Splits, load_splits
from generalist.recipe import Recipe, load_recipe
from generalist.training.environment import choose_device, describe, switches
from generalist.training.options import Job

ENGINES = ("graph", "eager")
PUBLISHED = "published"
MAX_ITERATIONS = 100_000
DEFAULT_RECIPE = {"cuda": "cifar10-resnet18-d-plain", "cpu": "digits-d"}
DEFAULT_ITERATIONS = {"cuda": 100, "cpu": 20}
WARM_UP = {"cuda": 10, "cpu": 3}

SYNTHETIC = "random pixels of the data set's shape; the images' content changes no timing"
NO_STREAM = "the recipe streams its images from files; here they lie in memory, so decoding is not in these figures"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """The figures of one subject."""

    name: str
    timing: Timing
    images_per_second: float
    startup_seconds: float
    """From the start to the end of the first iteration: data to the device, networks, compilation, recording."""
    compile_seconds: float
    """torch.compile's own account of its part of that time; networks compiled in parallel count separately."""
    peak_bytes: int | None
    """The most device memory used by tensors at once; None on the CPU."""
    losses: dict[str, float]

    def record(self, flops: float | None, ceiling: Ceiling) -> dict[str, Any]:
        tflops = None if flops is None else flops / (self.timing.median / 1000) / 1e12
        return {
            "name": self.name,
            "ms_per_iteration": self.timing.median,
            "spread": self.timing.spread,
            "blocks_ms": list(self.timing.blocks),
            "images_per_second": self.images_per_second,
            "tflops": tflops,
            "share_of_ceiling": None if tflops is None else tflops / ceiling.tflops,
            "peak_memory_bytes": self.peak_bytes,
            "startup_seconds": self.startup_seconds,
            "compile_seconds": self.compile_seconds,
            "mean_loss": {name: loss if math.isfinite(loss) else None for name, loss in self.losses.items()},
        }


@dataclass(frozen=True)
class Report:
    """Everything that was measured, and on which machine."""

    recipe: Recipe
    overrides: list[str]
    environment: dict[str, Any]
    data: dict[str, Any]
    iterations: int
    warm_up: int
    ceiling: Ceiling
    model_flops: ModelFlops | None
    results: list[Result]
    notes: list[str] = field(default_factory=list)

    @property
    def flops(self) -> float | None:
        """FLOPs of one iteration."""
        return None if self.model_flops is None else iteration_flops(self.recipe, self.model_flops)

    def ratios(self) -> dict[str, float]:
        """`a/b`: how many times as long an iteration of a takes as one of b."""
        times = {result.name: result.timing.median for result in self.results}
        pairs = [(slow, fast) for slow in (PUBLISHED, "eager") for fast in ("eager", "graph") if slow != fast]
        return {f"{a}/{b}": times[a] / times[b] for a, b in pairs if a in times and b in times}

    def record(self) -> dict[str, Any]:
        """The report as JSON stores it."""
        job = self.recipe
        return {
            "recipe": job.name,
            "overrides": self.overrides,
            "model": job.model.name,
            "learners": [_about_learner(job, i) for i in range(len(job.learners))],
            "batch_size": job.train.batch_size,
            "precision": job.train.precision,
            "compile": job.train.compile,
            "channels_last": job.train.channels_last,
            "data": self.data,
            "environment": self.environment,
            "iterations": self.iterations,
            "warm_up": self.warm_up,
            "flops": None
            if self.model_flops is None
            else {"iteration": self.flops, "image": asdict(self.model_flops), "formula": FORMULA},
            "ceiling": {
                "tflops": self.ceiling.tflops,
                "precision": self.ceiling.precision,
                "by_size": {str(size): value for size, value in self.ceiling.by_size.items()},
            },
            "results": [result.record(self.flops, self.ceiling) for result in self.results],
            "ratios": self.ratios(),
            "notes": self.notes,
        }


def _about_learner(job: Job, i: int) -> dict[str, Any]:
    learner = job.learners[i]
    return {
        "name": learner.name,
        "objective": learner.objective.kind,
        "threat": str(learner.threat) if learner.threat else None,
        "attack_steps": learner.attack.steps if learner.threat else 0,
    }


def bench_train(
    recipe: str | None = None,
    *,
    overrides: Iterable[str] = (),
    iterations: int | None = None,
    device: str = "auto",
    engines: Sequence[str] = ENGINES,
    published: bool = True,
    synthetic: bool = True,
    trust_code: bool = False,
    say: Say = lambda text: None,
) -> Report:
    """Measure a recipe's iteration. `iterations` are timed for each subject, after a warm-up."""
    where = choose_device(device)
    iterations = DEFAULT_ITERATIONS[where.type] if iterations is None else iterations
    _check(engines, iterations)
    overrides = list(overrides)
    name = recipe or DEFAULT_RECIPE[where.type]
    job = _one_run(load_recipe(name, overrides=overrides, trust_code=trust_code))
    job, splits, notes = _images(job, synthetic=synthetic, trust_code=trust_code)
    warm_up = WARM_UP[where.type]
    setting = Setting(job, splits, where, 1 + warm_up + iterations, trust_code)
    with switches(job.train, where), torch.random.fork_rng([where] if where.type == "cuda" else []):
        say("measuring matrix products")
        ceiling = matmul_ceiling(job.train.precision, where)
        results = _measure_engines(setting, engines, iterations=iterations, warm_up=warm_up, notes=notes, say=say)
        why_not = why_not_published(job)
        if published and why_not is None:
            say("measuring the published code's loop")
            torch.backends.cudnn.benchmark = False  # PyTorch's default; `switches` restores it
            build = partial(published_subject, setting)
            results.append(_measure(PUBLISHED, build, setting, iterations=iterations, warm_up=warm_up))
        elif published:
            notes.append(f"the published code has no form for this recipe: {why_not}")
        environment = _environment(splits, where, job.train.seed)
        model_flops = _model_flops(setting, notes)
    data = {"name": job.data.name, "synthetic": synthetic, "shape": list(splits.train.shape)}
    return Report(
        recipe=job,
        overrides=overrides,
        environment=environment,
        data=data | {"classes": len(splits.train.classes)},
        iterations=iterations,
        warm_up=warm_up,
        ceiling=ceiling,
        model_flops=model_flops,
        results=results[::-1],
        notes=notes,
    )


def _check(engines: Sequence[str], iterations: int) -> None:
    unknown = [engine for engine in engines if engine not in ENGINES]
    if unknown or not engines:
        raise GeneralistError(f"unknown engine {(unknown or [''])[0]!r}; choose among {', '.join(ENGINES)}")
    if not 1 <= iterations <= MAX_ITERATIONS:
        raise GeneralistError(f"iterations must be 1 to {MAX_ITERATIONS}, not {iterations}")


def _one_run(recipe: Recipe) -> Recipe:
    """The recipe, prepared for measuring: nothing is validated, so next to nothing is held out."""
    if recipe.stages:
        raise RecipeError("stages", "a benchmark measures one run; leave the stages out with --set stages=[]")
    validation = recipe.validation.model_copy(update={"split": "held-out", "images": 1})
    return recipe.model_copy(update={"validation": validation})


def _images(recipe: Recipe, *, synthetic: bool, trust_code: bool) -> tuple[Recipe, Splits, list[str]]:
    """The recipe as it is measured, its images, and remarks about them."""
    if not synthetic:
        splits = load_splits(recipe.data, trust_code=trust_code)
        if splits.train.resident:
            recipe.data.augmentation.check_fits(*splits.train.shape[1:])
        return recipe, splits, []
    notes = [SYNTHETIC]
    if recipe.data.name == "folder" and recipe.data.resident is not True:
        notes.append(NO_STREAM)
    if recipe.data.extra is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"extra": None})})
        notes.append("the extra images are left out: they take their share of a batch, but no time of their own")
    splits = synthetic_splits(recipe.data, count=BATCHES * recipe.train.batch_size + 1)
    recipe.data.augmentation.check_fits(*splits.train.shape[1:])
    return recipe, splits, notes


def _measure_engines(
    setting: Setting, engines: Sequence[str], *, iterations: int, warm_up: int, notes: list[str], say: Say
) -> list[Result]:
    """The results of the engines that can run here, graph first."""
    results = []
    for engine in (name for name in ENGINES if name in engines):
        say(f"measuring the {engine} engine")
        try:
            build = partial(engine_subject, setting, engine, say)
            results.append(_measure(engine, build, setting, iterations=iterations, warm_up=warm_up))
        except RecipeError as error:
            if error.path != "train.engine":
                raise
            notes.append(f"{engine} engine not measured: {error.problem.partition('; ')[0]}")
    if not results:
        raise GeneralistError(f"nothing to measure: {notes[-1]}")
    return results


def _measure(name: str, build: Callable[[], Subject], setting: Setting, *, iterations: int, warm_up: int) -> Result:
    """Build the subject, step it once for the start-up time, then under the clock."""
    device = setting.device
    gc.collect()  # the previous subject and its device memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    synchronize(device)
    compiled, started = _compile_seconds(), time.perf_counter()
    subject = build()
    subject.step()
    synchronize(device)
    startup, compiling = time.perf_counter() - started, _compile_seconds() - compiled
    timing = time_blocks(subject.step, device=device, iterations=iterations, warm_up=warm_up)
    return Result(
        name=name,
        timing=timing,
        images_per_second=1000 * setting.job.train.batch_size / timing.median,
        startup_seconds=startup,
        compile_seconds=compiling,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        losses=subject.losses(),
    )


def _compile_seconds() -> float:
    """Seconds that torch.compile has taken in this process so far."""
    return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])


def _model_flops(setting: Setting, notes: list[str]) -> ModelFlops | None:
    problem = why_not_counted(setting.job)
    if problem is not None:
        notes.append(f"FLOPs not counted: {problem}")
        return None
    return count_model(setting.network(), setting.splits.train.shape, setting.device)


def _environment(splits: Splits, device: torch.device, seed: int) -> dict[str, Any]:
    versions: dict[str, Any] = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
    return describe(splits, device, seed) | (versions if device.type == "cuda" else {})
