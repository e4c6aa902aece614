"""The graph engine against the eager one. GPU tests: run with `pytest -m gpu` on a machine with CUDA."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from generalist.core.errors import InterruptedRunError, RecipeError
from generalist.core.run import RunDirectory
from generalist.data.options import load_splits
from generalist.recipe import load_recipe
from generalist.training.graph import GraphEngine, why_not_graph
from generalist.training.loop import Listener, Trainer


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
def test_graph_equals_eager_in_float64(tmp_path: Path) -> None:
    """50 iterations across epochs; the tolerance leaves room for cuDNN's choice of algorithms only."""
    results = {
        engine: run_steps(trainer(tmp_path / engine, f"train.engine={engine}", "train.precision=fp64"), 50)
        for engine in ("eager", "graph")
    }
    assert (results["eager"] - results["graph"]).abs().max() < 1e-9
    assert results["eager"].abs().max() > 0.1


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


@pytest.mark.gpu
def test_memory_does_not_grow(tmp_path: Path) -> None:
    instance = trainer(tmp_path, "train.engine=graph", recipe="digits-d")
    assert isinstance(instance.engine, GraphEngine)
    run_steps(instance, 20)
    gc.collect()  # what earlier tests left behind
    torch.cuda.synchronize()
    early = torch.cuda.memory_allocated()
    run_steps(instance, 2000)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == early


class _Recording:
    """Stands in for a CUDA graph on a machine without one: replaying runs the iteration that was recorded."""

    engine: GraphEngine

    def replay(self) -> None:
        self.engine._whole_iteration()


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Recording)


@pytest.mark.parametrize("recipe", ["digits-t", "digits-d"])
def test_recording_leaves_no_trace(
    tmp_path: Path, without_cuda: None, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Warm-up and recording run iterations of their own; all that they changed must be put back.

    The graph itself is replaced, so this checks the engine's book-keeping on any machine, not CUDA.
    """
    changes = ("train.precision=fp64", "train.batch_size=256", "learners.0.averaging.decay=0.9")
    eager = trainer(tmp_path / "eager", *changes, device="cpu", recipe=recipe)
    graph = trainer(tmp_path / "graph", *changes, device="cpu", recipe=recipe)
    graph.engine = GraphEngine(graph.job, graph.learners, graph.global_learner)
    monkeypatch.setattr(_Recording, "engine", graph.engine, raising=False)
    assert torch.equal(run_steps(eager, 6), run_steps(graph, 6))
    assert len(graph.engine.graphs) == 1
    assert eager.engine.take_means() == graph.engine.take_means()
    for name, tensor in eager.live_tensors().items():
        assert torch.equal(tensor, graph.live_tensors()[name]), name
