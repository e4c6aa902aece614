"""The arithmetic of an iteration: floating-point operations, a multiply-add counted as two.

    attack = steps x (forward + gradient of the images)
    step   = forward + gradients of activations and weights

Convolutions and matrix products are counted; BatchNorm, ReLU, optimizers and averages add less than one percent and are
left out. The count is that of the mathematics instead of an implementation: all engines are compared to one number.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from generalist.tensors.modes import frozen
from generalist.training.options import Job

FORMULA = (
    "batch_size * sum over learners of (attack_steps * (forward + input_gradient) + forward + step_gradients), "
    "each in FLOPs an image; a multiply-add is 2"
)
COUNTED = ("nt", "at")
"""Objectives whose iteration is an attack, or none, and one step on the cross-entropy."""

_IMAGES = 2  # BatchNorm in train mode refuses a single value per channel


@dataclass(frozen=True)
class ModelFlops:
    """The cost of one image."""

    forward: float
    input_gradient: float
    """Backwards to the image with constant weights, as an attack needs it."""
    step_gradients: float
    """Backwards to all weights, without the image's own gradient."""


def count_model(model: nn.Module, shape: Sequence[int], device: torch.device) -> ModelFlops:
    """Count while a copy of the model runs on two images."""
    model = copy.deepcopy(model).requires_grad_(True)
    parameters = list(model.parameters())
    x = torch.full((_IMAGES, *shape), 0.5, device=device, dtype=parameters[0].dtype)
    with frozen(model):
        x.requires_grad_()
        _, input_gradient = _count(model, x, [x])
    model.train()
    forward, step_gradients = _count(model, x.detach(), parameters)
    return ModelFlops(forward, input_gradient, step_gradients)


def _count(model: nn.Module, x: Tensor, targets: Sequence[Tensor]) -> tuple[float, float]:
    """FLOPs per image of the forward pass, and of the backward pass to `targets`."""
    with FlopCounterMode(display=False) as forward:
        total = model(x).sum()
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(total, list(targets), allow_unused=True)
    return forward.get_total_flops() / _IMAGES, backward.get_total_flops() / _IMAGES


def why_not_counted(job: Job) -> str | None:
    """Why the formula does not apply to this run; None if it does."""
    others = [learner.objective.kind for learner in job.learners if learner.objective.kind not in COUNTED]
    return f"objective {others[0]!r} is neither nt nor at, the two that the formula describes" if others else None


def iteration_flops(job: Job, model: ModelFlops) -> float:
    """FLOPs of one iteration of all learners, by the formula above."""
    an_image = 0.0
    for learner in job.learners:
        steps = learner.attack.steps if learner.threat is not None else 0
        an_image += steps * (model.forward + model.input_gradient) + model.forward + model.step_gradients
    return job.train.batch_size * an_image
