"""What the tests of training share: a tiny network and data, a spy on a run, and an independent SplitMix64."""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from generalist.core.distributed import Group
from generalist.core.run import RunDirectory
from generalist.core.schedule import Schedule
from generalist.data.options import Splits, load_splits
from generalist.data.sets import Batch, ImageSet
from generalist.models.registry import MODELS
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, Objective, ObjectiveOptions, Progress
from generalist.recipe import Recipe, load_recipe, parse
from generalist.training.graph import GraphEngine
from generalist.training.learner import Learner
from generalist.training.loop import Listener, Trainer

torch.set_num_threads(1)  # the tests' tensors are tiny; threads only cost

CLASSES = 3
MASK = (1 << 64) - 1


class TinyNet(nn.Module):
    """A convolution, BatchNorm and a linear layer: every kind of state that training has to carry."""

    def __init__(self, *, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.linear = nn.Linear(3 * 16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(torch.relu(self.norm(self.conv(x))).flatten(1))
        return logits


if "tiny" not in MODELS.names():
    MODELS.register("tiny")(TinyNet)


class SpoiledOptions(ObjectiveOptions):
    """Options of the spoiled objective."""

    kind: str = "spoiled"
    """The objective's name."""

    at: int = 0
    """The step from which its loss is nan."""

    weights_only: bool = False
    """Spoil the gradients of that step, while its loss stays finite."""


class Spoiled(Objective):
    """Natural training that stops being finite at a given step."""

    Options = SpoiledOptions
    adversarial = False

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        loss = self.learner.cross_entropy(self.learner.forward(inputs.batch.x), inputs.batch.y)
        assert isinstance(self.options, SpoiledOptions)
        bad = progress.step >= self.options.at
        return loss * torch.where(bad & (not self.options.weights_only), torch.nan, 1.0), {}

    def gradients(self, batch: Batch, progress: Progress) -> tuple[list[Tensor], Metrics]:
        gradients, metrics = super().gradients(batch, progress)
        assert isinstance(self.options, SpoiledOptions)
        if self.options.weights_only and int(progress.step) >= self.options.at:
            gradients = [torch.full_like(g, torch.inf) for g in gradients]
        return gradients, metrics


if "spoiled" not in OBJECTIVES.names():
    OBJECTIVES.register("spoiled")(Spoiled)


# -- data, recipes, runs ----------------------------------------------------------------------------------------------


def tiny_images(count: int = 24, *, salt: int = 0, name: str = "tiny") -> ImageSet:
    """Grey 4x4 images of three classes, no pixel of which is zero; a class is brighter in a row of its own."""
    labels = torch.arange(count) % CLASSES
    pixels = (torch.arange(count * 16).reshape(count, 1, 4, 4) * 7919 + 104729 * (salt + 1)) % 151 + 30
    for label in range(CLASSES):
        pixels[labels == label, :, label] += 60
    return ImageSet(pixels.to(torch.uint8), labels, [str(label) for label in range(CLASSES)], name)


def tiny_splits(*, extra: int = 0, count: int = 24) -> Splits:
    more = tiny_images(extra, salt=2, name="extra") if extra else None
    return Splits(tiny_images(count), tiny_images(9, salt=1, name="test"), more)


NATURAL: dict[str, Any] = {"name": "natural", "objective": "nt", "optimizer": {"lr": 0.05}}
ROBUST: dict[str, Any] = {
    "name": "robust",
    "objective": "at",
    "threat": {"norm": "linf", "eps": 0.1},
    "attack": {"steps": 2},
    "optimizer": {"lr": 0.02, "weight_decay": 1e-3},
}
FAST_AT = "fast-at"
"""The objective that takes its own attack, and no `attack.steps`."""
L2: dict[str, Any] = {
    "name": "l2",
    "objective": "at",
    "threat": {"norm": "l2", "eps": 0.3},
    "attack": {"steps": 1},
    "optimizer": {"lr": 0.03},
}


def tiny_recipe(learners: Sequence[dict[str, Any]] = (ROBUST, NATURAL), **changes: Any) -> Recipe:
    """18 training images in batches of 6: three iterations an epoch; 6 images held out."""
    raw: dict[str, Any] = {
        "data": {"name": "arrays", "augmentation": {"crop": 1, "flip": True}},
        "model": {"name": "tiny"},
        "learners": list(learners),
        "train": {"epochs": 4, "batch_size": 6, "precision": "fp64", "seed": 3, "checkpoint_epochs": 1},
        "validation": {"images": 6, "every": 1, "steps": 2},
    }
    for section, value in changes.items():
        raw[section] = {**raw.get(section, {}), **value} if isinstance(value, dict) else value
    return parse(raw)


def make_trainer(
    recipe: Recipe,
    path: Path,
    *,
    listener: Listener | None = None,
    splits: Splits | None = None,
    group: Group | None = None,
    device: str = "cpu",
) -> Trainer:
    path.mkdir(parents=True, exist_ok=True)
    return Trainer(
        recipe,
        RunDirectory(path),
        splits or tiny_splits(),
        device=torch.device(device),
        listener=listener or Listener(),
        group=group,
    )


def train(recipe: Recipe, path: Path, **options: Any) -> Trainer:
    trainer = make_trainer(recipe, path, **options)
    trainer.run()
    return trainer


def stop_after(recipe: Recipe, path: Path, *, epoch: int, **options: Any) -> None:
    """Train until the end of an epoch, its checkpoint included, and stop as Ctrl-C would."""
    trainer = make_trainer(recipe, path, **options)
    end = trainer._end_epoch

    def stop(done: int, *, images: int, seconds: float) -> None:
        end(done, images=images, seconds=seconds)
        if done == epoch:
            raise KeyboardInterrupt

    trainer._end_epoch = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()


def stopped_and_resumed(recipe: Recipe, path: Path, *, epoch: int, **options: Any) -> Trainer:
    """Train as `stop_after` does, then another trainer from its checkpoint to the end."""
    stop_after(recipe, path, epoch=epoch, **options)
    trainer = make_trainer(recipe, path, **options)
    assert trainer.resume() and trainer.step == epoch * trainer.steps_per_epoch
    trainer.run()
    return trainer


def fresh_model(trainer: Trainer) -> TinyNet:
    """A plain network, not flat, with the weights that learner 0 has now."""
    model = TinyNet(num_classes=CLASSES, in_channels=1).double()
    model.load_state_dict(trainer.learners[0].flat.state_dict())
    return model


# -- the spy ----------------------------------------------------------------------------------------------------------


@dataclass
class Moment:
    """One learner's state, as numpy arrays."""

    weights: np.ndarray
    counters: np.ndarray
    momentum: np.ndarray
    average: np.ndarray | None
    average_counters: np.ndarray | None


def moment_of(learner: Learner) -> Moment:
    average = learner.average
    return Moment(
        learner.flat.vector.numpy().copy(),
        learner.flat.counters.numpy().copy(),
        next(iter(learner.optimizer.state.values())).numpy().copy(),
        average.vector.numpy().copy() if average else None,
        average.counters.numpy().copy() if average else None,
    )


@dataclass
class Trace:
    """What a run did: every learner before and after each step, and the global learner after each update."""

    start: np.ndarray
    before: dict[str, list[Moment]] = field(default_factory=dict)
    after: dict[str, list[Moment]] = field(default_factory=dict)
    lr: dict[str, list[float]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    mixed: list[np.ndarray] = field(default_factory=list)
    mixed_counters: list[np.ndarray] = field(default_factory=list)


def spy_on(trainer: Trainer) -> Trace:
    """Record a run from outside, without changing it."""
    trace = Trace(trainer.global_learner.vector.numpy().copy())
    for learner in trainer.learners:
        learner.step = _spied_step(learner, trace, first=learner is trainer.learners[0])  # type: ignore[method-assign]
    update = trainer.global_learner.update

    def spied_update(learners: Sequence[Learner], gammas: Tensor) -> None:
        update(learners, gammas)
        trace.mixed.append(trainer.global_learner.vector.numpy().copy())
        trace.mixed_counters.append(trainer.global_learner.counters.numpy().copy())

    trainer.global_learner.update = spied_update  # type: ignore[method-assign]
    return trace


def _spied_step(learner: Learner, trace: Trace, *, first: bool) -> Callable[[Batch, Progress], Metrics]:
    step = learner.step
    before, after = trace.before.setdefault(learner.name, []), trace.after.setdefault(learner.name, [])
    rates = trace.lr.setdefault(learner.name, [])

    def spied(batch: Batch, progress: Progress) -> Metrics:
        before.append(moment_of(learner))
        metrics = step(batch, progress)
        after.append(moment_of(learner))
        rates.append(float(progress.lr))
        if first:
            trace.batches.append(batch)
        return metrics

    return spied


def at_start(schedules: Mapping[str, Schedule]) -> dict[str, Tensor]:
    """What they say at the start of training."""
    return {name: torch.tensor(one.at(0, 1), dtype=torch.float64) for name, one in schedules.items()}


def batches_of(trainer: Trainer) -> dict[str, list[Batch]]:
    """Run it; what each learner learnt from, iteration by iteration."""
    seen: dict[str, list[Batch]] = {learner.name: [] for learner in trainer.learners}
    for learner in trainer.learners:
        gradients = learner.objective.gradients

        def spied(batch: Batch, progress: Progress, *, ask: Any = gradients, name: str = learner.name) -> Any:
            seen[name].append(batch)
            return ask(batch, progress)

        learner.objective.gradients = spied  # type: ignore[method-assign]
    trainer.run()
    return seen


# -- both engines -----------------------------------------------------------------------------------------------------


def assert_engines_agree(recipe: str, path: Path, *, overrides: Sequence[str], learner: int) -> None:
    """Two epochs of a shipped recipe on a GPU, in float64: operation by operation, and recorded."""
    weights = []
    for engine in ("eager", "graph"):
        changes = [f"train.engine={engine}", "train.precision=fp64", "train.epochs=2", "validation.images=50"]
        job = load_recipe(recipe, overrides=["model.width=4", *overrides, *changes])
        (path / engine).mkdir()
        trainer = Trainer(job, RunDirectory(path / engine), load_splits(job.data), device=torch.device("cuda"))
        assert isinstance(trainer.engine, GraphEngine) == (engine == "graph")
        trainer.run()
        weights.append(trainer.learners[learner].flat.vector.clone())
    assert float((weights[0] - weights[1]).abs().max()) < 1e-9 and float(weights[0].abs().max()) > 0.1


# -- an independent counter-based generator ---------------------------------------------------------------------------


def reference_mix(z: int) -> int:
    """The finaliser of SplitMix64, in Python's own integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_bits(seed: int, purpose: str, *keys: int, count: int = 1) -> list[int]:
    """Unsigned 64-bit draws at an address."""
    state = int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "little")
    for key in keys:
        state = reference_mix((state * 0xBF58476D1CE4E5B9 + key + 0x9E3779B97F4A7C15) & MASK)
    return [reference_mix((state + j * 0x9E3779B97F4A7C15) & MASK) for j in range(1, count + 1)]


def reference_uniform(seed: int, purpose: str, *keys: int, count: int = 1) -> np.ndarray:
    return np.array([(value >> 40) / 2**24 for value in reference_bits(seed, purpose, *keys, count=count)])


def _die_soon(done: int, total: int) -> None:
    """After the first checkpoint, once so many seconds of this process's own time are spent, whatever else runs here.

    Nobody handles SIGVTALRM: it ends the process where it stands.
    """
    if done == 4:
        signal.setitimer(signal.ITIMER_VIRTUAL, float(sys.argv[3]))


if __name__ == "__main__":  # a run in a process of its own, which does not come to its end
    given = Recipe.model_validate_json(Path(sys.argv[1]).read_text())
    make_trainer(given, Path(sys.argv[2]), listener=Listener(iteration=_die_soon)).run()
