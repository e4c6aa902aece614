"""The graph engine against the eager one. GPU tests: run with `pytest -m gpu` on a machine with CUDA."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graph_stand_in import Recording, replace_cuda

from generalist.core.errors import InterruptedRunError, RecipeError
from generalist.core.run import RunDirectory
from generalist.data.options import load_splits
from generalist.data.sets import Batch
from generalist.objectives.base import LearnerView, Progress
from generalist.recipe import load_recipe
from generalist.tensors.sync_batchnorm import Synchroniser
from generalist.training.graph import GraphEngine, why_not_graph
from generalist.training.loop import Listener, Trainer
from generalist.training.parallel import Parallel


def trainer(path: Path, *overrides: str, device: str = "cuda", recipe: str = "digits-t", **more: Any) -> Trainer:
    job = load_recipe(recipe, overrides=["model.width=4", "validation.images=50", *overrides])
    path.mkdir(parents=True, exist_ok=True)
    return Trainer(job, RunDirectory(path), load_splits(job.data), device=torch.device(device), **more)


def run_steps(instance: Trainer, steps: int) -> torch.Tensor:
    """The global learner after `steps` iterations of the first epochs."""
    epoch = 1
    while instance.step < steps:
        for item in instance.engine.feed(
            instance.train_images,
            instance._batches(epoch),
            epoch=epoch,
            seed=instance.job.train.seed,
            options=instance.job.data.augmentation,
        ):
            position = instance.step / instance.steps_per_epoch
            instance.engine.set_progress(step=instance.step, epoch=epoch, position=position)
            instance.engine.iteration(item)
            instance.step += 1
            if instance.step == steps:
                break
        epoch += 1
    return instance.global_learner.vector.clone()


def test_graph_is_refused_without_cuda(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.engine.*CUDA"):
        trainer(tmp_path, "train.engine=graph", device="cpu")


def test_reasons_against_recording() -> None:
    job = load_recipe("digits-t", overrides=["train.last_batch=keep"])
    images = load_splits(job.data).train
    assert "keep" in (why_not_graph(job, images, torch.device("cuda")) or "")
    assert "CUDA" in (why_not_graph(load_recipe("digits-t"), images, torch.device("cpu")) or "")
    assert why_not_graph(load_recipe("digits-t"), images, torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("recipe", ["digits-d", "digits-t"])
def test_graph_equals_eager_in_float64(tmp_path: Path, recipe: str, compiled: str) -> None:
    """50 iterations across epochs; the tolerance leaves room for cuDNN's choice of algorithms only."""
    changes = ("train.precision=fp64", f"train.compile={compiled}")
    eager = trainer(tmp_path / "eager", "train.engine=eager", "train.precision=fp64", recipe=recipe)
    graph = trainer(tmp_path / "graph", "train.engine=graph", *changes, recipe=recipe)
    assert isinstance(graph.engine, GraphEngine) and graph.engine.compiled == (compiled == "true")
    assert all((learner.view.constant is None) == (learner.threat is None) for learner in graph.learners)
    results = run_steps(eager, 50), run_steps(graph, 50)
    assert (results[0] - results[1]).abs().max() < 1e-9
    assert results[0].abs().max() > 0.1


def given_images(view: LearnerView, batch: Batch, progress: Progress, **options: Any) -> torch.Tensor:
    """Stands in for an attack: the same images in every engine, however it rounds."""
    return (batch.x + 0.1 * torch.sin(50 * batch.x + batch.index.reshape(-1, 1, 1, 1))).clamp(0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_one_iteration_in_float32_with_given_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str
) -> None:
    monkeypatch.setattr(LearnerView, "adversarial", given_images)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager = trainer(tmp_path / "eager", "train.engine=eager")
    graph = trainer(tmp_path / "graph", "train.engine=graph", f"train.compile={compiled}")
    start = eager.global_learner.vector.clone()
    assert torch.equal(start, graph.global_learner.vector)
    expected, found = run_steps(eager, 1), run_steps(graph, 1)
    assert (expected - found).abs().max() <= 1e-5 * expected.abs().max()
    for one, other in zip(eager.learners, graph.learners, strict=True):
        assert (one.flat.vector - other.flat.vector).abs().max() <= 1e-5 * one.flat.vector.abs().max()
        assert not torch.equal(one.flat.vector, start)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", ["digits-d", "digits-t"])
def test_attacked_images_agree_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, recipe: str
) -> None:
    """The sign of a gradient near 0 may turn, and then a pixel goes the other way: 99 in 100 must agree."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    instance = trainer(tmp_path, "train.engine=eager", device=device, recipe=recipe)
    run_steps(instance, 20)
    batch = instance.train_images.batch(instance.train_index[:200])
    progress = Progress(instance.engine.step, instance.engine.epoch, instance.engine.lr[0])
    for learner in instance.learners:
        if learner.threat is None:
            continue
        plain = learner.view.adversarial(batch, progress)
        learner.fold(instance.train_images.shape, compiled=False)
        folded = learner.view.adversarial(batch, progress)
        assert ((plain - folded).abs() < 1e-4).float().mean() >= 0.99
        assert (plain - batch.x).abs().max() > 0.1


@pytest.mark.gpu
def test_gpu_equals_cpu_in_float64(tmp_path: Path) -> None:
    """Data order, augmentation and random starts are the same on every device, so the weights are."""
    changes = ("train.engine=eager", "train.precision=fp64")
    cpu = run_steps(trainer(tmp_path / "cpu", *changes, device="cpu"), 20)
    gpu = run_steps(trainer(tmp_path / "gpu", *changes), 20)
    assert (cpu - gpu.cpu()).abs().max() < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_deterministic_resume_is_bit_equal(tmp_path: Path, engine: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    changes = (f"train.engine={engine}", "train.deterministic=true", "train.epochs=6", "mixing.redistribution.every=1")
    try:
        whole = trainer(tmp_path / "whole", *changes)
        whole.run()

        def stop(done: int, total: int) -> None:
            if done == 41:
                os.kill(os.getpid(), signal.SIGTERM)

        broken = trainer(tmp_path / "broken", *changes, listener=Listener(iteration=stop))
        with pytest.raises(InterruptedRunError):
            broken.run()
        resumed = trainer(tmp_path / "broken", *changes)
        assert resumed.resume()
        assert resumed.step == 41
        resumed.run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(whole.global_learner.vector, resumed.global_learner.vector)
    assert all(
        torch.equal(a, b) for a, b in zip(whole.live_tensors().values(), resumed.live_tensors().values(), strict=True)
    )


@pytest.mark.gpu
def test_run_resumes_under_the_other_engine(tmp_path: Path) -> None:
    """Precision fp64, so that what remains is the engines' difference alone."""
    changes = ("train.precision=fp64", "train.epochs=2", "validation.every=2")
    whole = trainer(tmp_path / "whole", "train.engine=graph", *changes)
    run_steps(whole, 30)
    half = trainer(tmp_path / "half", "train.engine=graph", *changes)
    run_steps(half, half.steps_per_epoch)
    half.checkpoint()
    other = trainer(tmp_path / "half", "train.engine=eager", *changes)
    assert other.resume()
    items = other.engine.feed(
        other.train_images, other._batches(2), epoch=2, seed=0, options=other.job.data.augmentation
    )
    for item in items:
        if other.step == 30:
            break
        other.engine.set_progress(step=other.step, epoch=2, position=other.step / other.steps_per_epoch)
        other.engine.iteration(item)
        other.step += 1
    assert (whole.global_learner.vector - other.global_learner.vector).abs().max() < 1e-9


@pytest.fixture
def nccl() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_messages_between_gpus_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: None, compiled: str
) -> None:
    """The sums of gradients and of BatchNorm's statistics as NCCL sends them, in a job of one: none travels far."""
    changes = ("train.engine=graph", "train.precision=fp64", f"train.compile={compiled}")
    expected = run_steps(trainer(tmp_path / "alone", *changes), 20)
    sent: list[torch.Tensor] = []
    total, build = Parallel.total, Parallel.__init__

    def count(parallel: Parallel, tensor: torch.Tensor) -> None:
        sent.append(tensor)
        total(parallel, tensor)

    def build_synchronised(parallel: Parallel, *given: Any) -> None:
        build(parallel, *given)
        parallel.sync = Synchroniser(parallel.total)

    monkeypatch.setattr(Parallel, "total", count)
    monkeypatch.setattr(Parallel, "mean", count)
    monkeypatch.setattr(Parallel, "__init__", build_synchronised)
    instance = trainer(tmp_path / "sent", *changes)
    assert isinstance(instance.engine, GraphEngine)
    found = run_steps(instance, 20)
    assert len(sent) > len(instance.learners)
    assert (found - expected).abs().max() < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_memory_does_not_grow(tmp_path: Path, compiled: str) -> None:
    instance = trainer(tmp_path, "train.engine=graph", f"train.compile={compiled}", recipe="digits-d")
    assert isinstance(instance.engine, GraphEngine)
    run_steps(instance, 20)
    gc.collect()  # what earlier tests left behind
    torch.cuda.synchronize()
    early = torch.cuda.memory_allocated()
    run_steps(instance, 2000)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == early


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_recording_on_a_gpu_leaves_no_trace(tmp_path: Path, compiled: str) -> None:
    instance = trainer(tmp_path, "train.engine=graph", f"train.compile={compiled}")
    engine = instance.engine
    assert isinstance(engine, GraphEngine)
    run_steps(instance, 3)
    before = {name: tensor.clone() for name, tensor in engine._state().items()}
    engine._record()
    assert engine._state().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine._state().items())


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_cuda(monkeypatch.setattr)


def graph_trainer(path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, recipe: str) -> Trainer:
    """A trainer with the graph engine on the CPU, its attacks folded."""
    instance = trainer(path, *overrides, device="cpu", recipe=recipe)
    instance.engine = GraphEngine(instance.job, instance.learners, instance.global_learner)
    monkeypatch.setattr(Recording, "engine", instance.engine, raising=False)
    compiled = instance.job.train.compile is True
    if compiled:
        instance.engine.compile()
    for learner in instance.learners:
        if learner.attacks:
            learner.fold(instance.train_images.shape, compiled=compiled)
    return instance


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch.compile without the slow generation of code; the list grows by the source of everything compiled."""
    compile_, graphs = torch.compile, []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("recipe", ["digits-t", "digits-d"])
def test_recording_leaves_no_trace(
    tmp_path: Path,
    without_cuda: None,
    compiled_graphs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    compiled: str,
) -> None:
    """Warm-up and recording run iterations of their own; all that they changed must be put back.

    The graph itself is replaced, so this checks the engine's book-keeping on any machine, not CUDA.
    """
    changes = ("train.precision=fp64", "train.batch_size=256", "learners.0.averaging.decay=0.9")
    eager = trainer(tmp_path / "eager", *changes, device="cpu", recipe=recipe)
    graph = graph_trainer(tmp_path / "graph", monkeypatch, *changes, f"train.compile={compiled}", recipe=recipe)
    assert (run_steps(eager, 6) - run_steps(graph, 6)).abs().max() < 1e-11
    assert isinstance(graph.engine, GraphEngine) and len(graph.engine.graphs) == 1
    assert bool(compiled_graphs) == (compiled == "true")
    means, expected = graph.engine.take_means(), eager.engine.take_means()
    for name, found in means.items():
        assert found == pytest.approx(expected[name], abs=1e-9)
    for name, tensor in eager.live_tensors().items():
        assert (tensor.double() - graph.live_tensors()[name].double()).abs().max() < 1e-10, name


def test_awp_is_recorded_again_where_its_warm_up_ends(
    tmp_path: Path, without_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = (
        "train.precision=fp64",
        "train.batch_size=256",
        "train.epochs=2",
        "mixing.redistribution.every=0",
        "learners.linf.objective={kind: awp, rho: 0.1, warmup: 0.5}",
    )
    eager = trainer(tmp_path / "eager", *changes, device="cpu", recipe="digits-d")
    graph = graph_trainer(tmp_path / "graph", monkeypatch, *changes, recipe="digits-d")
    for instance in (eager, graph):
        instance.run()
    assert isinstance(graph.engine, GraphEngine)
    assert list(graph.engine.graphs) == [("default, warming up", "default"), ("default", "default")]
    for name, tensor in eager.live_tensors().items():
        assert (tensor.double() - graph.live_tensors()[name].double()).abs().max() < 1e-10, name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rehearsal_compiles_what_the_attack_runs(
    tmp_path: Path,
    without_cuda: None,
    compiled_graphs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
) -> None:
    """Compiled in another precision, the network under attack would be compiled again, one after the other."""
    changes = (f"train.precision={precision}", "train.compile=true", "train.batch_size=64")
    instance = graph_trainer(tmp_path, monkeypatch, *changes, recipe="digits-d")
    engine = instance.engine
    assert isinstance(engine, GraphEngine)
    feed = engine.feed(
        instance.train_images, instance._batches(1), epoch=1, seed=0, options=instance.job.data.augmentation
    )
    engine.index = next(feed).clone()
    engine.set_progress(step=0, epoch=1, position=0.0)
    engine._rehearse()
    assert sum("conv2d" in code for code in compiled_graphs) == 2  # the network that trains, the one under attack
    engine._step_inside()
    assert sum("conv2d" in code for code in compiled_graphs) == 2
