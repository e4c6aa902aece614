"""Signs that a model hides its gradient rather than resists: what an evaluation should warn about.

A model without a useful gradient, with answers at random or with answers in steps looks robust to attacks that climb a
gradient (Athalye, Carlini & Wagner 2018, "Obfuscated gradients give a false sense of security"). Each function here
looks at one sign, sample by sample, and leaves the model as it was; none of them is a proof.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from generalist.attacks.losses import SampleLoss, cross_entropy
from generalist.attacks.pgd import AttackOptions, Classifier, borrowed, gradient_of, pgd
from generalist.attacks.threats import Threat, perturb, widen
from generalist.core import random
from generalist.data.sets import Batch

SAME = 1e-4
"""Logits that differ by less, in units of the largest, are the same: kernels may add up in another order each time."""

SMALL_NOISE = 2 / 255
"""Size of the noise, in units of the pixel range, that moves an image across a step of 8-bit pixels."""


@dataclass(frozen=True)
class Signals:
    """Shares of the samples, from 0 to 1, that show a sign of hidden gradients."""

    zero_gradient: float
    """The gradient of the cross-entropy is zero in every pixel."""
    random: float
    """Two passes of the same image give other logits."""
    stepped: float
    """The gradient is zero and yet small noise changes the logits."""
    not_rising: float
    """The loss is no larger after many PGD steps than after few."""


def gradient_signals(model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Signals:
    """All signs on one batch. Waits for the device."""
    return Signals(
        zero_gradient=_share(zero_gradient(model, batch)),
        random=_share(answers_at_random(model, batch.x)),
        stepped=_share(answers_in_steps(model, batch, seed=seed)),
        not_rising=_share(not_rising(model, batch, threat=threat, seed=seed)),
    )


def zero_gradient(model: Classifier, batch: Batch, *, loss: SampleLoss = cross_entropy) -> Tensor:
    """Per sample, whether the loss has no gradient: all pixels zero or nan.

    The cross-entropy of a model that is very sure has none, either, in floats; `losses.dlr` does not vanish so.
    """
    with borrowed(model), torch.enable_grad():
        x = batch.x.detach().requires_grad_()
        gradient = gradient_of(loss(widen(model(x)), batch.y).sum(), x)
    return torch.nan_to_num(gradient).flatten(1).abs().amax(1) == 0


@torch.no_grad()
def answers_at_random(model: Classifier, x: Tensor) -> Tensor:
    """Per sample, whether two passes of the same image give other logits."""
    with borrowed(model):
        return _differ(widen(model(x)), widen(model(x)))


def answers_in_steps(model: Classifier, batch: Batch, *, seed: int, noise: float = SMALL_NOISE) -> Tensor:
    """Per sample, whether the logits stand still in the gradient's eyes but not under small noise."""
    flat = zero_gradient(model, batch)
    draw = random.uniform(seed, "signals/noise", batch.index, shape=batch.x.shape[1:], device=batch.x.device)
    moved = perturb(batch.x, (noise * (2 * draw - 1)).to(batch.x.dtype))
    with torch.no_grad(), borrowed(model):
        return flat & _differ(widen(model(batch.x)), widen(model(moved)))


def not_rising(model: Classifier, batch: Batch, *, threat: Threat, seed: int, few: int = 2, many: int = 20) -> Tensor:
    """Per sample, whether `many` PGD steps leave the cross-entropy no larger than `few` steps of the same size do."""
    early, late = (_loss_after(model, batch, steps, threat.eps / 4, threat, seed) for steps in (few, many))
    return ~(late > early)


def _loss_after(model: Classifier, batch: Batch, steps: int, step: float, threat: Threat, seed: int) -> Tensor:
    x = pgd(
        model,
        batch.x,
        batch.y,
        threat=threat,
        options=AttackOptions(steps=steps, step=step),
        seed=seed,
        purpose=f"signals/{threat}",
        index=batch.index,
    )
    with torch.no_grad(), borrowed(model):
        return cross_entropy(widen(model(x)), batch.y)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    largest = torch.maximum(one.abs(), other.abs()).amax(1)
    return ~((one - other).abs().amax(1) <= SAME * largest)  # true for nan, too


def _share(flags: Tensor) -> float:
    return flags.float().mean().item()
