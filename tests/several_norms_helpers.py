"""What tests of objectives against several norms share: an objective on a tiny network, independent formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_helpers import NATURAL, TinyNet, at_start, fresh_model, make_trainer, tiny_recipe

from generalist.data.sets import Batch
from generalist.objectives.base import Objective, Progress
from generalist.recipe import Recipe
from generalist.training.loop import Trainer

LINF, L2 = 0.1, 0.29
ATTACK: dict[str, Any] = {"steps": 3, "start": "none"}


def learner(objective: Any, **changes: Any) -> dict[str, Any]:
    fields = {"name": "robust", "objective": objective, "threat": f"linf:{LINF}", "attack": ATTACK}
    whole = {**fields, "optimizer": {"lr": 0.05}, **changes}
    return {name: value for name, value in whole.items() if value is not None}


def recipe_of(objective: Any, *, epochs: int = 2, **changes: Any) -> Recipe:
    mixing = {"decay": 0, "redistribution": {"every": 0}}
    return tiny_recipe([learner(objective, **changes)], train={"epochs": epochs}, mixing=mixing)


class Toy:
    """An objective in the hands of a learner with a tiny float64 network, and a batch of its images."""

    def __init__(self, objective: Any, path: Path, **changes: Any) -> None:
        self.trainer: Trainer = make_trainer(recipe_of(objective, **changes), path)
        self.objective: Objective = self.trainer.learners[0].objective
        self.model = self.trainer.learners[0].model
        self.model.train()
        self.batch = self.images(torch.arange(6))

    def images(self, index: Tensor, epoch: int = 1) -> Batch:
        options = self.trainer.job.data.augmentation
        batch = self.trainer.train_images.augmented(index, epoch=epoch, seed=3, options=options)
        return Batch(batch.x.double(), batch.y, batch.index, batch.augmentation)

    def fresh(self) -> TinyNet:
        """A plain copy of the network as it is now, in training mode."""
        model = fresh_model(self.trainer)
        model.train()
        return model

    def gradients(self, progress: Progress | None = None) -> tuple[list[Tensor], float]:
        found, metrics = self.objective.gradients(self.batch, self.complete(progress or now()))
        return found, float(metrics["loss"])

    def complete(self, progress: Progress) -> Progress:
        """With what the objective's schedules say at the start of training."""
        return replace(progress, scalars=at_start(self.objective.schedules()))


def now(step: int = 0, epoch: int = 1, variant: str = "default", lr: float = 0.05) -> Progress:
    return Progress(torch.tensor(step), torch.tensor(epoch), torch.tensor(lr, dtype=torch.float64), variant)


# -- independent formulas ---------------------------------------------------------------------------------------------


def log_probabilities(logits: Tensor) -> Tensor:
    return logits - logits.exp().sum(1, keepdim=True).log()


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    return -log_probabilities(logits)[torch.arange(len(y)), y]


def bounded_step(delta: Tensor, grad: Tensor, norm: str, eps: float) -> Tensor:
    """One steepest step of eps / 4 for one image, projected on its ball."""
    if norm == "linf":
        return (delta + eps / 4 * grad.sign()).clamp(-eps, eps)
    moved = delta + eps / 4 * grad / grad.square().sum().sqrt()
    length = moved.square().sum().sqrt()
    return moved * min(1.0, eps / float(length))


def gradient_at(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(cross_entropies(model(x), y).sum(), x)[0]


def one_by_one(
    toy: Toy, attack: Callable[[nn.Module, Tensor, Tensor], Tensor], model: nn.Module | None = None
) -> Tensor:
    """The batch attacked one image at a time, against a copy of the network in evaluation mode."""
    model = copy.deepcopy(model or toy.fresh()).eval()
    pairs = zip(toy.batch.x, toy.batch.y, strict=True)
    return torch.cat([attack(model, x[None], y[None]) for x, y in pairs])


def plain_pgd(norm: str, eps: float, steps: int = 3) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        current = x
        for _ in range(steps):
            moved = bounded_step(current - x, gradient_at(model, current, y), norm, eps)
            current = (x + moved).clamp(0, 1)
        return current

    return attack


def assert_gradients(toy: Toy, loss: Callable[[nn.Module], Tensor], progress: Progress | None = None) -> None:
    """The objective's loss and gradients are those of `loss` on a plain network."""
    model = toy.fresh()
    expected = loss(model)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    found, value = toy.gradients(progress)
    assert value == pytest.approx(float(expected.detach()), rel=1e-12)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


class NoWaiting(TorchDispatchMode):
    """Refuses what a CUDA graph cannot record: to read a value on the host, or a shape that depends on values."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.default")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in self.FORBIDDEN), f"{name} waits for the device"
        if name.startswith("aten.index"):
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype == torch.bool] if len(args) > 1 else []
            assert not masks, "indexing by a mask makes a shape that depends on values"
        return func(*args, **(kwargs or {}))


def assert_capturable(toy: Toy, progress: Progress | None = None) -> None:
    toy.gradients(progress)  # tables are filled
    with NoWaiting():
        toy.objective.gradients(toy.batch, toy.complete(progress or now()))


def assert_finite_when_probabilities_underflow(toy: Toy, progress: Progress | None = None) -> None:
    with torch.no_grad():
        toy.model.linear.weight.mul_(1e6)  # type: ignore[union-attr, operator]
    gradients, loss = toy.gradients(progress)
    assert loss > 745  # beyond it the probability of the label is 0 in double precision
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


# -- whole runs -------------------------------------------------------------------------------------------------------


class StopError(Exception):
    """Ends a run between two epochs or within one."""


def assert_resumes(recipe: Recipe, path: Path, *, after: int) -> None:
    """A run that is stopped after `after` iterations and resumed ends with the bits of one that was not."""
    whole = make_trainer(recipe, path / "whole")
    whole.run()
    early = make_trainer(recipe, path / "early")
    end_epoch = early._end_epoch

    def count(done: int, total: int) -> None:
        if done == after and done % early.steps_per_epoch:
            early.checkpoint()
            raise StopError

    def end(epoch: int, *, images: int, seconds: float) -> None:
        end_epoch(epoch, images=images, seconds=seconds)
        if early.step == after:
            raise StopError

    early.listener.iteration = count
    early._end_epoch = end  # type: ignore[method-assign]
    with pytest.raises(StopError):
        early.run()
    resumed = make_trainer(recipe, path / "early")
    assert resumed.resume() and resumed.step == after
    resumed.run()
    assert torch.equal(resumed.global_learner.vector, whole.global_learner.vector)
    assert torch.equal(resumed.learners[0].flat.vector, whole.learners[0].flat.vector)


def train_inside_a_generalist(objective: Any, path: Path, **changes: Any) -> Trainer:
    """Generalist-D with the objective in its linf learner, two epochs, redistributed after the first."""
    recipe = tiny_recipe(
        [learner(objective, **changes), NATURAL],
        train={"epochs": 2},
        mixing={"gamma": 0.5, "redistribution": {"every": 1, "start_epoch": 1}},
    )
    trainer = make_trainer(recipe, path)
    trainer.run()
    assert bool(torch.isfinite(trainer.global_learner.vector).all())
    return trainer
