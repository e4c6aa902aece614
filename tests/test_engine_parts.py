"""What the graph engine is made of, on any machine: the folded attack, compiled passes, the choice of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_graph_engine import run_steps, trainer
from torch import Tensor, nn
from training_helpers import ROBUST, make_trainer, tiny_images, tiny_recipe

from generalist.attacks.pgd import AttackOptions, Moves, pgd
from generalist.attacks.threats import ThreatOptions
from generalist.core.compiling import compiled
from generalist.data.augment import AugmentOptions
from generalist.data.options import load_splits
from generalist.models.registry import MODELS
from generalist.recipe import load_recipe
from generalist.tensors.folding import FoldedNetwork
from generalist.tensors.optimizers import SGD, OptimizerOptions
from generalist.training import build
from generalist.training.engine import EagerEngine, collect
from generalist.training.global_learner import _blend
from generalist.training.learner import Learner

# -- the folded attack ------------------------------------------------------------------------------------------------


def test_folded_attack_trains_the_same(tmp_path: Path) -> None:
    """50 iterations in float64, across epochs and a redistribution."""
    changes = ("train.precision=fp64", "train.batch_size=128", "mixing.redistribution.every=1")
    plain = trainer(tmp_path / "plain", *changes, device="cpu")
    folded = trainer(tmp_path / "folded", *changes, device="cpu")
    for learner in folded.learners:
        if learner.attacks:
            learner.fold(folded.train_images.shape, compiled=False)
    assert [type(learner.view.constant) for learner in folded.learners] == [
        FoldedNetwork if learner.threat else type(None) for learner in folded.learners
    ]
    start = plain.global_learner.vector.clone()
    expected, found = run_steps(plain, 50), run_steps(folded, 50)
    assert (expected - found).abs().max() < 1e-9
    assert (expected - start).abs().max() > 0.1
    for name, tensor in plain.live_tensors().items():
        difference = (tensor.double() - folded.live_tensors()[name].double()).abs()
        assert tensor.numel() == 0 or difference.max() < 1e-8, name


class Stubborn(nn.Module):
    """A network that depends on what it is fed: it cannot be traced."""

    def __init__(self, *, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.linear = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        logits: Tensor = self.linear((x if x.mean() > 1e6 else torch.relu(x)).mean(dim=(2, 3)))
        return logits


if "stubborn" not in MODELS.names():
    MODELS.register("stubborn")(Stubborn)


def test_network_that_cannot_be_folded_says_so_and_trains_the_same(tmp_path: Path) -> None:
    recipe = tiny_recipe([ROBUST], model={"name": "stubborn"})
    plain, folded = make_trainer(recipe, tmp_path / "plain"), make_trainer(recipe, tmp_path / "folded")
    said: list[str] = []
    build.fold(folded.learners[0], folded.train_images, compiled=False, say=said.append)
    assert folded.learners[0].view.constant is None
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("learner 'robust' attacks its network as it is") and "control flow" in said[0]
    plain.run()
    folded.run()
    assert torch.equal(plain.global_learner.vector, folded.global_learner.vector)


def test_attack_in_training_mode_is_not_folded(tmp_path: Path) -> None:
    """The batch's own statistics are not constants."""
    robust = {**ROBUST, "attack": {"steps": 2, "batchnorm": "train"}}
    plain = make_trainer(tiny_recipe([robust]), tmp_path / "plain")
    folded = make_trainer(tiny_recipe([robust]), tmp_path / "folded")
    assert not plain.learners[0].attacks
    folded.learners[0].fold(folded.train_images.shape, compiled=False)
    plain.run()
    folded.run()
    assert torch.equal(plain.global_learner.vector, folded.global_learner.vector)


# -- which engine, compiled or not ------------------------------------------------------------------------------------


class _Graph(EagerEngine):
    """Stands in for the graph engine, which asks for CUDA as soon as it is made."""

    def __init__(self, *given: Any, say: Callable[[str], None]) -> None:
        super().__init__(*given)


def built(
    monkeypatch: pytest.MonkeyPatch, path: Path, *overrides: str, iterations: int, problem: str | None
) -> tuple[str, list[str], list[str]]:
    """The kind of engine that is made, what was compiled, and the names of the learners that were folded."""
    compiled: list[str] = []
    folded: list[str] = []
    instance = trainer(path, "train.engine=eager", "train.compile=false", device="cpu")
    monkeypatch.setattr(build, "GraphEngine", _Graph)
    monkeypatch.setattr(build, "why_not_graph", lambda *about: problem)
    monkeypatch.setattr(EagerEngine, "compile", lambda engine: compiled.append("engine"))
    monkeypatch.setattr(Learner, "compile", lambda learner, network: compiled.append(learner.name))
    monkeypatch.setattr(Learner, "fold", lambda learner, shape, compiled: folded.append(learner.name))
    job = load_recipe("digits-t", overrides=["model.width=4", *overrides])
    engine = build.build_engine(
        job,
        instance.train_images,
        instance.learners,
        instance.global_learner,
        device=torch.device("cpu"),
        iterations=iterations,
        say=lambda text: None,
    )
    return type(engine).__name__, compiled, folded


EVERYTHING = ["engine", "linf", "natural", "l2"]


@pytest.mark.parametrize(
    ("overrides", "iterations", "problem", "engine", "compiled"),
    [
        ((), 1999, None, "_Graph", False),
        ((), 2000, None, "_Graph", True),
        (("train.deterministic=true",), 2000, None, "_Graph", False),
        (("train.deterministic=true", "train.compile=true"), 2000, None, "_Graph", True),
        (("train.compile=true",), 1, None, "_Graph", True),
        (("train.compile=false",), 10**6, None, "_Graph", False),
        (("train.engine=eager",), 10**6, None, "EagerEngine", False),
        (("train.engine=eager", "train.compile=true"), 1, None, "EagerEngine", True),
        ((), 10**6, "it needs a CUDA device", "EagerEngine", False),
    ],
)
def test_when_a_run_is_compiled(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    iterations: int,
    problem: str | None,
    engine: str,
    compiled: bool,
) -> None:
    kind, found, folded = built(monkeypatch, tmp_path, *overrides, iterations=iterations, problem=problem)
    assert kind == engine
    assert found == (EVERYTHING if compiled else [])
    assert folded == (["linf", "l2"] if kind == "_Graph" else [])


# -- compiled passes --------------------------------------------------------------------------------------------------


@pytest.fixture
def quickly_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile's own tracing and functionalization, without the slow generation of code."""
    compile_ = torch.compile

    def with_backend(function: Any, **options: Any) -> Any:
        return compile_(function, backend="aot_eager", **options)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", with_backend)
    yield
    torch._dynamo.reset()


def vectors(*shape: int, count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("nesterov", [False, True])
def test_compiled_sgd_equals_the_plain_one(quickly_compiled: None, nesterov: bool) -> None:
    weights, *gradients = vectors(17, count=5)
    options = OptimizerOptions(lr=0.1, nesterov=nesterov)
    results = []
    for made_fast in (False, True):
        own = weights.clone()
        optimizer = SGD(options, own)
        if made_fast:
            optimizer.compile()
        for step, gradient in enumerate(gradients):
            optimizer.step(own, gradient.clone(), torch.tensor(0.1 / (step + 1), dtype=torch.float64))
        results.append((own, optimizer.state["momentum"]))
    for plain, found in zip(*results, strict=True):
        assert torch.allclose(plain, found, rtol=1e-14, atol=1e-15)
    assert not torch.equal(results[0][0], weights)


@pytest.mark.parametrize("warmup", [False, True])
def test_compiled_mixing_equals_the_plain_one(quickly_compiled: None, warmup: bool) -> None:
    start, *sources = vectors(33, count=4)
    gammas = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    plain, found = start.clone(), start.clone()
    fast = compiled(_blend)
    for step in range(4):
        count = torch.tensor(float(step), dtype=torch.float64)
        kept = _blend(plain, sources, gammas, count, 0.9, warmup)
        assert torch.equal(fast(found, sources, gammas, count, 0.9, warmup), kept)
    assert torch.allclose(plain, found, rtol=1e-14, atol=1e-15)
    assert not torch.allclose(plain, start)


def test_compiled_collection_equals_the_plain_one(quickly_compiled: None) -> None:
    fast = compiled(collect)
    results = []
    for function in (collect, fast):
        first_bad, sums = torch.full((2,), -1), [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
        for step, loss in enumerate((1.5, float("nan"), float("inf"))):
            losses = [torch.tensor(0.25), torch.tensor(loss)]
            function(first_bad, torch.tensor(step), losses, sums, [losses[0], torch.tensor(float(step))])
        results.append((first_bad.tolist(), [total.tolist() for total in sums]))
    assert results[0] == results[1] == ([-1, 1], [[0.75, 3.0], [3.0, 3.0]])


@pytest.mark.parametrize("start", ["uniform", "gaussian", "none"])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_compiled_attack_equals_the_plain_one(quickly_compiled: None, norm: str, start: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = tiny_images().batch(torch.arange(9))
    threat = ThreatOptions.model_validate({"norm": norm, "eps": 0.5}).build()
    options = AttackOptions.model_validate({"steps": 3, "start": start})
    results = [
        pgd(
            model,
            batch.x.double(),
            batch.y,
            threat=threat,
            options=options,
            seed=1,
            purpose="test",
            index=batch.index,
            step=torch.tensor(7),
            moves=moves,
        )
        for moves in (None, Moves.compiled())
    ]
    assert torch.allclose(results[0], results[1], rtol=0, atol=1e-12)
    assert (results[0] - batch.x).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options",
    [
        AugmentOptions(crop=1, flip=False),
        AugmentOptions(crop=2, cutout=3),
        AugmentOptions(crop=0, shift=3, erase=0.5, color=0.5),
    ],
)
def test_compiled_augmentation_equals_the_plain_one(quickly_compiled: None, options: AugmentOptions) -> None:
    images = load_splits(load_recipe("digits-t").data).train
    fast = compiled(images.augmented)
    index = torch.arange(0, 60, 3)
    for epoch in (1, 2):
        plain = images.augmented(index, epoch=torch.tensor(epoch), seed=5, options=options)
        found = fast(index, epoch=torch.tensor(epoch), seed=5, options=options)
        assert torch.equal(plain.x, found.x) and torch.equal(plain.y, found.y)
        assert all(torch.equal(value, found.augmentation[name]) for name, value in plain.augmentation.items())
        assert not torch.equal(plain.x, images.batch(index).x)


def test_compiled_run_equals_the_plain_one(tmp_path: Path, quickly_compiled: None) -> None:
    changes = ("train.precision=fp64", "train.batch_size=256")
    plain = trainer(tmp_path / "plain", *changes, device="cpu", recipe="digits-d")
    compiled = trainer(tmp_path / "compiled", *changes, "train.compile=true", device="cpu", recipe="digits-d")
    assert compiled.engine._collect is not collect and plain.engine._collect is collect
    expected, found = run_steps(plain, 8), run_steps(compiled, 8)
    assert (expected - found).abs().max() < 1e-9
    assert plain.engine.take_means().keys() == compiled.engine.take_means().keys()
