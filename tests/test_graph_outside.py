"""Learners that cannot be recorded run outside of the graph engine's recording; all else stays inside, and right.

On a machine without CUDA the graph is a stand-in, and so are PyTorch's complaints about waiting for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_stand_in import Recording, replace_cuda
from test_graph_engine import run_steps, trainer
from torch import Tensor, fx, nn
from training_helpers import NATURAL, ROBUST, make_trainer, tiny_recipe

import generalist
from generalist.core.errors import RecipeError
from generalist.core.run import RunDirectory
from generalist.data.options import load_splits
from generalist.models.registry import MODELS
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, Objective, Progress
from generalist.recipe import load_recipe
from generalist.training import build
from generalist.training.graph import GraphEngine, why_not_graph
from generalist.training.loop import Listener, Trainer


class Peeking(Objective):
    """Natural training that reads its loss back in every step."""

    adversarial = False

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        loss = self.learner.cross_entropy(self.learner.forward(inputs.batch.x), inputs.batch.y)
        if not loss.is_cuda and torch.cuda.get_sync_debug_mode() == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return (loss if float(loss.detach()) < 1e9 else loss * 0), {}


class Announced(Peeking):
    """The same, and it says so."""

    capturable = False


class Seldom(Peeking):
    """The same in every other step; the graph of the steps between is recorded first."""

    variants = ("blind", "peeking")

    def variant(self, step: int, epoch: int) -> str:
        return self.variants[step % 2]

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        if progress.variant == "peeking":
            return super().loss(inputs, progress)
        return self.learner.cross_entropy(self.learner.forward(inputs.batch.x), inputs.batch.y), {}


class Broken(Peeking):
    """Fails whenever waiting is an error, for a reason of its own."""

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        raise RuntimeError("this is broken")


for name, kind in {"peeking": Peeking, "announced": Announced, "seldom": Seldom, "broken": Broken}.items():
    if name not in OBJECTIVES.names():
        OBJECTIVES.register(name)(kind)

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXACT = ("train.precision=fp64", "train.batch_size=256", "train.compile=false")


class Said(Listener):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def graph_trainer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Trainer, list[str]]]:
    """A trainer with the graph engine on a device, and what it says."""

    def build_one(path: Path, device: str, *changes: str, recipe: str = "digits-t") -> tuple[Trainer, list[str]]:
        said = Said()
        if device == "cuda":
            return trainer(path, "train.engine=graph", *changes, recipe=recipe, listener=said), said.lines
        replace_cuda(monkeypatch.setattr)
        instance = trainer(path, *changes, device="cpu", recipe=recipe)
        instance.engine = GraphEngine(instance.job, instance.learners, instance.global_learner, say=said.say)
        monkeypatch.setattr(Recording, "engine", instance.engine, raising=False)
        return instance, said.lines

    return build_one


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(
    ("objective", "why", "graphs"),
    [
        ("announced", "objective 'announced' cannot be recorded", 1),
        ("peeking", "its step waits for the device", 1),
        ("seldom", "its step waits for the device", 2),
    ],
)
def test_a_learner_outside_of_the_recording_trains_the_same(
    tmp_path: Path,
    graph_trainer: Callable[..., tuple[Trainer, list[str]]],
    device: str,
    objective: str,
    why: str,
    graphs: int,
) -> None:
    changes = (*EXACT, f"learners.1.objective={objective}")
    eager = trainer(tmp_path / "eager", "train.engine=eager", *changes, device=device)
    graph, said = graph_trainer(tmp_path / "graph", device, *changes)
    expected, found = run_steps(eager, 8), run_steps(graph, 8)
    engine = graph.engine
    assert isinstance(engine, GraphEngine) and engine.outside == [1] and len(engine.graphs) == graphs
    assert [line for line in said if "outside" in line] == [f"learner 'natural' runs outside of the recording: {why}"]
    assert (expected - found).abs().max() < 1e-9
    for one, other in zip(eager.learners, graph.learners, strict=True):
        assert (one.flat.vector - other.flat.vector).abs().max() < 1e-9
    means = engine.take_means()
    for name, wanted in eager.engine.take_means().items():
        assert means[name] == pytest.approx(wanted, abs=1e-8)
    if device == "cuda":
        assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("device", PLACES)
def test_learners_of_ours_are_all_recorded(
    tmp_path: Path, graph_trainer: Callable[..., tuple[Trainer, list[str]]], device: str
) -> None:
    graph, said = graph_trainer(tmp_path, device, *EXACT)
    run_steps(graph, 2)
    assert isinstance(graph.engine, GraphEngine) and graph.engine.outside == [] and said == []


@pytest.mark.parametrize("device", PLACES)
def test_an_error_of_another_kind_is_not_hidden(
    tmp_path: Path, graph_trainer: Callable[..., tuple[Trainer, list[str]]], device: str
) -> None:
    graph, _ = graph_trainer(tmp_path, device, *EXACT, "learners.1.objective=broken")
    with pytest.raises(RuntimeError, match="this is broken"):
        run_steps(graph, 1)


def test_a_run_of_which_nothing_can_be_recorded_is_refused() -> None:
    class Some:
        def __init__(self, capturable: bool) -> None:
            self.objective = type("Its", (), {"capturable": capturable, "variants": ("default",)})
            self.options = type("Its", (), {"objective": type("Its", (), {"kind": "announced"})})

    job = load_recipe("digits-t")
    images, device = load_splits(job.data).train, torch.device("cuda")
    none: Any = [Some(False), Some(False)]
    one: Any = [Some(False), Some(True)]
    assert why_not_graph(job, images, device, none) == "objective 'announced' cannot be recorded"
    assert why_not_graph(job, images, device, one) is None


class Forgetful(nn.Module):
    """Its answers in training are drawn anew at each pass."""

    def __init__(self, *, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.dropout(torch.relu(self.conv(x)).mean(dim=(2, 3))))
        return logits


class Sly(Forgetful):
    """A tracer sees another network than a caller does."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if isinstance(x, fx.Proxy) else -x)


for name, network in {"forgetful": Forgetful, "sly": Sly}.items():
    if name not in MODELS.names():
        MODELS.register(name)(network)


@pytest.mark.parametrize("device", PLACES)
def test_recording_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The first iteration's dropout, too, is that of its step, though recording ran some iterations before it."""
    if device == "cpu":
        replace_cuda(monkeypatch.setattr)
    recipe = tiny_recipe([NATURAL], model={"name": "forgetful"}, train={"engine": "eager"})
    eager = make_trainer(recipe, tmp_path / "eager", device=device)
    graph = make_trainer(recipe, tmp_path / "graph", device=device)
    graph.engine = GraphEngine(graph.job, graph.learners, graph.global_learner)
    monkeypatch.setattr(Recording, "engine", graph.engine, raising=False)
    start = eager.learners[0].flat.vector.clone()
    run_steps(eager, 1)
    run_steps(graph, 1)
    assert (eager.learners[0].flat.vector - graph.learners[0].flat.vector).abs().max() < 1e-9
    assert not torch.equal(start, graph.learners[0].flat.vector)


def test_a_trace_that_answers_otherwise_is_not_attacked(tmp_path: Path) -> None:
    instance = make_trainer(tiny_recipe([ROBUST], model={"name": "sly"}), tmp_path)
    said: list[str] = []
    build.fold(instance.learners[0], instance.train_images, compiled=False, say=said.append)
    assert instance.learners[0].view.constant is None
    assert len(said) == 1 and said[0].endswith("its folded form gives other answers")


def test_a_run_may_go_on_under_another_engine(tmp_path: Path) -> None:
    """But with nothing else changed."""
    out, tiny = tmp_path / "run", {"model.width": 4, "train.epochs": 1, "validation.images": 20}
    changes = [f"{name}={value}" for name, value in tiny.items()]
    generalist.train("digits-nt", overrides=changes, out=out, device="cpu")
    run = generalist.train(
        "digits-nt",
        overrides=[*changes, "train.engine=eager", "train.compile=false"],
        out=out,
        resume=True,
        device="cpu",
    )
    assert load_recipe(RunDirectory(run.path).recipe).train.engine == "eager"
    with pytest.raises(RecipeError, match="keeps its recipe"):
        generalist.train("digits-nt", overrides=[*changes, "train.batch_size=7"], out=out, resume=True, device="cpu")
