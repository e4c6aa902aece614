"""Projected gradient descent: the attack that adversarial training runs on, for any threat."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from generalist.attacks.threats import Threat, perturb, widen
from generalist.core import random
from generalist.core.compiling import compiled
from generalist.core.errors import DataError, GeneralistError
from generalist.core.options import Number, Options
from generalist.core.schedule import Schedule
from generalist.tensors.capture import Given, Step, recorded
from generalist.tensors.modes import frozen

Classifier = Callable[[Tensor], Tensor]
"""Images in [0, 1] to logits."""

BatchLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits, labels) to the value that an attack maximises, summed over the batch."""

GAUSSIAN_START = 1e-3
"""Standard deviation of the gaussian start, in units of the pixel range; TRADES' choice."""


Start = Literal["uniform", "gaussian", "none"]


class AttackOptions(Options):
    """How a learner attacks its own batches."""

    steps: int = Field(default=10, ge=0, le=100_000)
    """Gradient steps; each costs a forward and a backward pass. 0: the random start only."""

    step: Number | None = Field(default=None, gt=0)
    """Length of a step in the threat's norm, for pixels in [0, 1]. By default the threat's own: a quarter of eps for
    linf and l2, 2.5 eps / steps for l1."""

    start: Start | None = None
    """Where the attack starts: uniformly in the ball, at gaussian noise of 0.001, or at the image itself. Default: as
    the objective's authors do, which is gaussian for trades, mart, rst and score (form `trades`), none for msd, else
    uniform. A loss with its minimum at the image itself, like that of TRADES, has no gradient there and needs a random
    start."""

    batchnorm: Literal["eval", "train"] = "eval"
    """Which statistics BatchNorm uses under attack: the running ones (`eval`), or the batch's own (`train`), with which
    the attack on a sample depends on its batch. Neither updates the running ones."""

    scale: Schedule | None = None
    """Factor on eps and on the step size during training, from 0 to 1; default: always 1. Addepalli et al. (2022) let
    it rise from 0 to 1. Validation always uses the full eps."""

    @field_validator("scale")
    @classmethod
    def _shrinks(cls, scale: Schedule | None) -> Schedule | None:
        if scale is not None and not all(0 <= value <= 1 for value in scale.values):
            raise ValueError("its values are shares of eps: from 0 to 1")
        return scale


def summed_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Summed rather than averaged, so that a sample's gradient does not depend on the size of the batch."""
    return F.cross_entropy(logits, y, reduction="sum")


def ascend(x: Tensor, adversarial: Tensor, grad: Tensor, threat: Threat, size: float) -> Tensor:
    """The images `adversarial` after one step up the gradient, inside ball and box around `x`."""
    return perturb(x, threat.project(adversarial - x + size * threat.steepest(grad)))


def pgd(
    model: Classifier,
    x: Tensor,
    y: Tensor,
    *,
    threat: Threat,
    options: AttackOptions,
    seed: int,
    purpose: str,
    index: Tensor,
    step: random.Key = 0,
    loss: BatchLoss | None = None,
    moves: Moves | None = None,
    key: Hashable = None,
) -> Tensor:
    """Images in [0, 1], within `threat` of `x`, on which `loss` (cross-entropy by default) is large.

    `x` must lie in [0, 1]; that is checked where data is loaded, because a check here would wait for the device. The
    start depends on (seed, purpose, sample `index`, `step`): learners differ in purpose, iterations in step. A module
    is attacked with frozen parameters and gets its own mode back; any other callable is used as it is. A network with
    a recorder replays the steps of calls with the same `key`, which must identify `loss` and `moves`.
    """
    _check(x, index)
    moves = moves or Moves()
    loss = loss or moves.loss
    x = x.detach()
    size = threat.default_step(options.steps) if options.step is None else options.step
    start = moves.start(threat, options.start, seed=seed, purpose=purpose, index=index, step=step, like=x)
    adversarial = perturb(x, threat.project(start))
    with borrowed(model, training=options.batchnorm == "train"):
        climb: Step[Tensor] = partial(_climb, model, loss, moves, threat, size)
        if key is not None:
            climb = recorded(model, (key, threat, size), climb)
        for _ in range(options.steps):
            adversarial = climb(adversarial, (x, y))
    return adversarial


def _climb(
    model: Classifier, loss: BatchLoss, moves: Moves, threat: Threat, size: float, adversarial: Tensor, given: Given
) -> Tensor:
    x, y = given
    return moves.ascend(x, adversarial, input_gradient(model, adversarial, y, loss), threat, size)


def input_gradient(model: Classifier, x: Tensor, y: Tensor, loss: BatchLoss) -> Tensor:
    """The gradient of `loss` with respect to the images, whatever the caller's grad mode and autocast."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return gradient_of(loss(widen(model(x)), y), x)


def gradient_of(value: Tensor, x: Tensor) -> Tensor:
    """The gradient of the scalar `value` with respect to the images it was computed from."""
    if not value.requires_grad:
        raise GeneralistError(
            "the loss under attack has no gradient with respect to the images: "
            "the model must not detach its input, nor run under no_grad or inference_mode"
        )
    return torch.autograd.grad(value, x)[0]


def starting_point(
    threat: Threat,
    start: Start | None,
    *,
    seed: int,
    purpose: str,
    index: Tensor,
    step: random.Key,
    like: Tensor,
) -> Tensor:
    """The first perturbation of an attack."""
    if start == "none":
        return torch.zeros_like(like)
    if start in (None, "uniform"):
        return threat.random_start(seed, purpose, index, step, like)
    draw = random.normal(seed, purpose, index, step, shape=like.shape[1:], device=like.device)
    return (GAUSSIAN_START * draw).to(like.dtype)


@dataclass(frozen=True)
class Moves:
    """The parts of PGD outside of the network; each may be replaced by a compiled form."""

    start: Callable[..., Tensor] = starting_point
    ascend: Callable[[Tensor, Tensor, Tensor, Threat, float], Tensor] = ascend
    loss: BatchLoss = summed_cross_entropy

    @classmethod
    def compiled(cls) -> Moves:
        return cls(*(compiled(part) for part in (starting_point, ascend, summed_cross_entropy)))


def borrowed(model: Classifier, *, training: bool = False) -> AbstractContextManager[None]:
    """Within this context a module is frozen; afterwards it is as it was. Any other callable is used as it is."""
    return frozen(model, training=training) if isinstance(model, nn.Module) else nullcontext()


def _check(x: Tensor, index: Tensor) -> None:
    if not x.is_floating_point():
        raise DataError(f"images under attack must be floats in [0, 1], not {x.dtype}: divide bytes by 255")
    if index.shape != x.shape[:1]:
        raise DataError(f"index must hold one number per image: {list(index.shape)} for images {list(x.shape)}")
