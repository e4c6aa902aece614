"""The interface of evaluation attacks: a small object with a name, which turns a batch into a verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from generalist.attacks.pgd import Classifier
from generalist.attacks.threats import Threat, per_sample, widen
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch

SLACK = 1e-6
"""Relative room for rounding when a perturbation is checked against its ball: float32 keeps about seven digits."""

HAIR = 1e-3
"""How far outside of its ball, as a share of eps, rounding alone may put a perturbation. On a CPU in float32, a sum of
squares over 3x512x512 pixels is wrong in the sixth digit, and the sums in the projection onto l1 in the fourth."""


@dataclass(frozen=True, eq=False)
class Found:
    """What an attack found for each sample of a batch."""

    x: Tensor
    """Images inside ball and box: adversarial where `broken`, the attack's best try elsewhere."""

    broken: Tensor
    """bool [B]: misclassified, by a forward pass on `x` itself."""


class Attack(Protocol):
    """An attack with its settings: one or more rounds, each a restart or a target or both.

    A round's result for a sample depends on (sample, round, seed, threat) alone: neither on other rounds nor on the
    batch around it. So a batch may hold samples that are in different rounds.
    """

    @property
    def name(self) -> str: ...

    def rounds(self, num_classes: int) -> int:
        """The number of rounds against a model with so many classes."""
        ...

    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        """Attack each sample in the round given for it, int64 [B]: from 0 to below `rounds`.

        Also samples that this model gets wrong as they are: the caller asks only about samples that the model under
        evaluation gets right. A random model, or a faster form of it, may disagree, and must not leave them unattacked.
        """
        ...

    def run(self, model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Found:
        """All rounds on one batch: for each sample the first success, or the last try.

        A sample that is wrong as it is keeps its own image.
        """
        ...


@torch.no_grad()
def verdict(model: Classifier, batch: Batch, x: Tensor, *, threat: Threat) -> Found:
    """Check an attack's images, and see which of them the model gets wrong.

    An image that has left the ball or the box, or is nan, is replaced by the original: no attack may succeed by
    leaving its threat model. One that rounding alone has put outside is first drawn back in, and can succeed.
    """
    if batch.x.dtype in (torch.float16, torch.bfloat16):  # their rounding is too coarse to stay in the ball
        raise GeneralistError(f"attacks need images in float32 or float64, not {batch.x.dtype}: give batch.x.float()")
    x = _drawn_back(x, batch.x, threat)
    inside = threat.norm((x - batch.x).double()) <= _limit(threat)
    rows = x.flatten(1)
    inside &= ((rows >= 0) & (rows <= 1)).all(1)  # false for nan, too
    x = torch.where(per_sample(inside, x), x, batch.x)
    return Found(x=x, broken=answers(widen(model(x)), batch.index, under=f" under attack in {threat}") != batch.y)


def _limit(threat: Threat) -> float:
    """The largest norm that counts as inside."""
    return threat.eps * (1 + SLACK) + SLACK


def _drawn_back(x: Tensor, natural: Tensor, threat: Threat) -> Tensor:
    """The images, where those that lie a hair outside of the ball are scaled back to a hair inside it."""
    delta = (x - natural).double()
    size = threat.norm(delta)
    outside = (size > _limit(threat)) & (size <= (1 + HAIR) * threat.eps)
    # A little further than needed, because the image is rounded once more.
    shrink = per_sample(torch.where(outside, (1 - 10 * SLACK) * threat.eps / size, 1), x)
    return torch.where(shrink < 1, natural + shrink * delta, x).to(x.dtype)


def answers(logits: Tensor, index: Tensor, *, under: str = "") -> Tensor:
    """The predicted class of each image; nan among the logits is refused. Waits for the device."""
    nan = logits.isnan().any(1)
    if count := int(nan.sum().item()):
        # argmax takes nan for the largest, so a model that outputs nan could pass for correct.
        raise GeneralistError(
            f"the model outputs NaN on {count} of {len(logits)} images in a batch (the first is image "
            f"{int(index[nan][0])}){under}: fix the model, or evaluate it in float32 as after model.float()"
        )
    return logits.argmax(1)
