"""What the tests of objectives share: an objective on a toy network in float64, and references from definitions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from training_helpers import (
    FAST_AT,
    ROBUST,
    TinyNet,
    at_start,
    fresh_model,
    make_trainer,
    reference_uniform,
    tiny_recipe,
)

from generalist.data.sets import Batch
from generalist.objectives.base import Metrics, Objective, Progress
from generalist.training.learner import Learner

EPS = 0.1
SEED = 3
STEP = 7


@dataclass
class Toy:
    """One learner with its objective, a batch of its images, and a plain network with the same weights."""

    learner: Learner
    batch: Batch
    progress: Progress
    model: TinyNet

    @property
    def objective(self) -> Objective:
        return self.learner.objective

    def gradients(self) -> tuple[list[Tensor], Metrics]:
        self.learner.model.train()
        return self.objective.gradients(self.batch, self.progress)

    def adversarial(self) -> Tensor:
        """The images that the objective's own attack makes."""
        self.learner.model.train()
        return self.objective.prepare(self.batch, self.progress).made["adversarial"]

    def logits(self, x: Tensor) -> Tensor:
        """Of the plain network, as training sees it: BatchNorm with the batch's statistics."""
        logits: Tensor = self.model.train()(x)
        return logits


def make_toy(objective: Any, path: Path, *, scalars: dict[str, float] | None = None, **learner: Any) -> Toy:
    """The objective in linf 0.1 with three attack steps, unless it has its own or `learner` says otherwise, at step 7.
    Values that change during training are those of its start, unless `scalars` has them."""
    kind = objective if isinstance(objective, str) else objective["kind"]
    attack = None if kind == FAST_AT else {"steps": 3, "start": "uniform"}
    options = {**ROBUST, "attack": attack, "objective": objective, **learner}
    trainer = make_trainer(tiny_recipe([{k: v for k, v in options.items() if v is not None}]), path)
    made = trainer.learners[0]
    with torch.no_grad():  # running statistics that differ from the batch's, lest a wrong mode go unseen
        for name, buffer in made.model.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1)
    batch = trainer.train_images.batch(torch.tensor([0, 1, 2, 4, 6, 9]))
    batch = replace(batch, x=batch.x.double())
    asked = {name: torch.tensor(value, dtype=torch.float64) for name, value in (scalars or {}).items()}
    values = at_start(made.schedules()) | asked
    progress = Progress(torch.tensor(STEP), torch.tensor(2), torch.tensor(0.1), scalars=values)
    return Toy(made, batch, progress, fresh_model(trainer))


def linf_start(batch: Batch, purpose: str = "attack/robust/linf:0.1") -> Tensor:
    """The uniform start of each sample, from the reference generator."""
    count = batch.x[0].numel()
    rows = [reference_uniform(SEED, purpose, int(i), STEP, count=count) for i in batch.index]
    return torch.from_numpy(EPS * (2 * np.stack(rows) - 1)).reshape(batch.x.shape)


def reference_pgd(
    model: TinyNet, batch: Batch, loss: Callable[[Tensor], Tensor], *, steps: int = 3, size: float = EPS / 4
) -> Tensor:
    """PGD in linf from the uniform start, against the network in evaluation mode; `loss` takes logits."""
    model = copy.deepcopy(model).eval()
    x = (batch.x + linf_start(batch)).clamp(0, 1)
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(loss(model(x)), x)
        x = torch.minimum(torch.maximum(x + size * grad.sign(), batch.x - EPS), batch.x + EPS).clamp(0, 1)
    return x.detach()


def cross_entropy_attack(toy: Toy, **options: Any) -> Tensor:
    return reference_pgd(toy.model, toy.batch, lambda logits: F.cross_entropy(logits, toy.batch.y), **options)


def parameter_gradients(model: TinyNet, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same_gradients(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) and any(bool(gradient.any()) for gradient in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def assert_minimises(toy: Toy, expected: Tensor) -> Metrics:
    """Loss and gradients of the objective are those of `expected`, computed on the plain network.

    To be asked once: the forward pass changes the running statistics that the next attack would see.
    """
    gradients, metrics = toy.gradients()
    torch.testing.assert_close(metrics["loss"], expected.detach(), rtol=1e-10, atol=1e-12)
    assert_same_gradients(gradients, parameter_gradients(toy.model, expected))
    return metrics


def extreme(toy: Toy) -> None:
    """Scale the last layer until most probabilities underflow to zero, in both networks."""
    for model in (toy.learner.model, toy.model):
        with torch.no_grad():
            model.get_parameter("linear.weight").mul_(1e5)


def assert_finite(toy: Toy) -> None:
    gradients, metrics = toy.gradients()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert all(bool(value.isfinite().all()) for value in metrics.values())
