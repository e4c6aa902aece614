"""Signs that a model masks its gradient rather than being robust, of which an evaluation should warn.

A model without a useful gradient, with random outputs or with outputs that change in steps looks robust to attacks that
follow a gradient (Athalye, Carlini & Wagner 2018, "Obfuscated gradients give a false sense of security"). Each function
here checks one sign, sample by sample, and leaves the model as it was; none of them is a proof.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch
from torch import Tensor

from generalist.attacks.losses import SampleLoss, cross_entropy, margin
from generalist.attacks.pgd import Classifier, borrowed, gradient_of
from generalist.attacks.pgd_attack import restarted_pgd
from generalist.attacks.threats import Threat, perturb, widen
from generalist.core import random
from generalist.data.sets import Batch

SAME = 1e-4
"""Logits count as equal if they differ by less, relative to the largest: kernels may sum in another order each time."""

SMALL_NOISE = 2 / 255
"""A noise level, in units of the pixel range, that moves pixels by whole steps of their 8-bit values."""


def zero_gradient(model: Classifier, batch: Batch, *, loss: SampleLoss = cross_entropy) -> Tensor:
    """Per sample, whether the loss has no gradient: zero or nan at every pixel.

    The cross-entropy of a very confident model has none either, because of rounding; `losses.dlr` does not vanish so.
    """
    with borrowed(model), torch.enable_grad():
        x = batch.x.detach().requires_grad_()
        gradient = gradient_of(loss(widen(model(x)), batch.y).sum(), x)
    return torch.nan_to_num(gradient).flatten(1).abs().amax(1) == 0


@torch.no_grad()
def answers_at_random(model: Classifier, x: Tensor) -> Tensor:
    """Per sample, whether two passes over the same image give different logits."""
    with borrowed(model):
        return _differ(widen(model(x)), widen(model(x)))


@torch.no_grad()
def answers_by_company(model: Classifier, x: Tensor) -> Tensor:
    """Whether the outputs for the first half of the images, [B / 2], depend on the other images in the batch.

    The verdicts of such a model (batch statistics in evaluation mode, test-time adaptation) are not about one sample.
    """
    half = len(x) // 2
    others = torch.cat([x[:half], x[:1].expand_as(x[half:])])
    with borrowed(model):
        return _differ(widen(model(x))[:half], widen(model(others))[:half])


@torch.no_grad()
def takes_gradients(model: Classifier, x: Tensor) -> bool:
    """Whether the model's forward pass itself calls autograd: a defence that optimises something for each image."""
    functions = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)
    called: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in functions:
            called.append(event)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        with borrowed(model):
            model(x)
    finally:
        enable = getattr(before, "enable", None)  # cProfile's profiler is no function, and `setprofile` cannot take it
        sys.setprofile(None if enable else before)
        if enable:
            enable()
    return bool(called)


@torch.no_grad()
def gives_probabilities(model: Classifier, x: Tensor) -> Tensor:
    """Per sample, whether no output is below 0 and all add up to 1: probabilities instead of logits."""
    with borrowed(model):
        outputs = widen(model(x))
    return (outputs >= 0).all(1) & ((outputs.sum(1) - 1).abs() <= SAME)


def answers_in_steps(model: Classifier, batch: Batch, *, seed: int, noise: float = SMALL_NOISE) -> Tensor:
    """Per sample, whether the logits have no gradient and yet change under small noise.

    The gradient is that of the margin, because that of the cross-entropy also vanishes for a very confident model.
    """
    flat = zero_gradient(model, batch, loss=margin)
    draw = random.uniform(seed, "signals/noise", batch.index, shape=batch.x.shape[1:], device=batch.x.device)
    moved = perturb(batch.x, (noise * (2 * draw - 1)).to(batch.x.dtype))
    with torch.no_grad(), borrowed(model):
        return flat & _differ(widen(model(batch.x)), widen(model(moved)))


def not_rising(model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Tensor:
    """Per sample, whether 20 PGD steps leave the cross-entropy no larger than 2 steps of the same size do."""
    early, late = (_loss_after(model, batch, steps, threat, seed) for steps in (2, 20))
    return ~(late > early)


def _loss_after(model: Classifier, batch: Batch, steps: int, threat: Threat, seed: int) -> Tensor:
    first = torch.zeros_like(batch.y)
    x = restarted_pgd(model, batch, first, threat=threat, seed=seed, steps=steps, step=threat.eps / 4)
    with torch.no_grad(), borrowed(model):
        return cross_entropy(widen(model(x)), batch.y)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    largest = torch.maximum(one.abs(), other.abs()).amax(1)
    return ~((one - other).abs().amax(1) <= SAME * largest)  # true for nan, too
