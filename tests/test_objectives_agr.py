"""AGR: the combination of two gradients by hand, and when it acts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from objectives_toy import assert_same_gradients, cross_entropy_attack, make_toy, parameter_gradients
from torch import Tensor

from generalist.objectives.agr import AdversarialGradientSteering, AGROptions, steer

FAR = 1e9
"""A clip that never acts."""


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("adversarial", "clean", "expected", "cosine"),
    [
        # cos = -1/sqrt(2): the part along (0, 1) goes.
        (vector(1, -1), vector(0, 2), vector(1, 0), -(0.5**0.5)),
        # cos = 0: nothing to remove.
        (vector(3, 0), vector(0, 2), vector(3, 0), 0.0),
        # cos = 0.6: 0.6 (5, 0) + 0.4 (3, 4).
        (vector(3, 4), vector(5, 0), vector(4.2, 1.6), 0.6),
        # opposite: nothing is left.
        (vector(2, 0), vector(-1, 0), vector(0, 0), -1.0),
        # no clean gradient, or no adversarial one.
        (vector(3, 4), vector(0, 0), vector(3, 4), 0.0),
        (vector(0, 0), vector(3, 4), vector(0, 0), 0.0),
    ],
)
def test_projection_by_hand(adversarial: Tensor, clean: Tensor, expected: Tensor, cosine: float) -> None:
    found, measured = steer(adversarial, clean, clip=FAR)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert float(measured) == pytest.approx(cosine)


def test_norms_are_clipped_and_short_gradients_are_not_stretched() -> None:
    long, _ = steer(vector(3, 4), vector(5, 0), clip=0.1)
    torch.testing.assert_close(long, vector(4.2, 1.6) * 0.1 / (4.2**2 + 1.6**2) ** 0.5)
    short, _ = steer(vector(0.03, 0.04), vector(0.05, 0), clip=0.1)
    torch.testing.assert_close(short, vector(0.042, 0.016))
    zero, _ = steer(vector(0, 0), vector(0, 0), clip=0.1)
    assert zero.tolist() == [0, 0]


def test_tiny_gradients_do_not_vanish_in_their_squares() -> None:
    adversarial, clean = (torch.tensor(values) * 1e-30 for values in ([3.0, 4.0], [5.0, 0.0]))
    found, cosine = steer(adversarial, clean, clip=0.1)
    assert float(cosine) == pytest.approx(0.6, rel=1e-3)
    torch.testing.assert_close(found * 1e30, torch.tensor([4.2, 1.6]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("steered", [0.0, 1.0])
def test_per_parameter_tensor_in_the_last_quarter_alone(tmp_path: Path, steered: float) -> None:
    toy = make_toy({"kind": "agr", "clip": 0.05}, tmp_path, scalars={"steered": steered})
    attacked = cross_entropy_attack(toy)
    gradients, metrics = toy.gradients()
    clean = parameter_gradients(toy.model, F.cross_entropy(toy.logits(toy.batch.x), toy.batch.y))
    robust_loss = F.cross_entropy(toy.logits(attacked), toy.batch.y)
    robust = parameter_gradients(toy.model, robust_loss)
    torch.testing.assert_close(metrics["loss"], robust_loss.detach())
    expected, conflicts = [], []
    for g1, g2 in zip(robust, clean, strict=True):
        cosine = float((g1 * g2).sum() / (g1.norm() * g2.norm()))
        combined = cosine * g2 + (1 - cosine) * g1 if cosine > 0 else g1 - (g1 * g2).sum() / g2.norm() ** 2 * g2
        expected.append(combined * min(1.0, 0.05 / float(combined.norm())) if steered else g1)
        conflicts.append(cosine <= 0)
    assert_same_gradients(gradients, expected)
    assert float(metrics["conflict"]) == pytest.approx(sum(conflicts) / len(conflicts))


def test_it_starts_after_three_quarters() -> None:
    schedule = AdversarialGradientSteering(AGROptions()).schedules()["steered"]
    assert [schedule.at(epoch, 120) for epoch in (0, 89.99, 90, 119)] == [0, 0, 1, 1]
    always = AdversarialGradientSteering(AGROptions(start=0.0)).schedules()["steered"]
    never = AdversarialGradientSteering(AGROptions(start=1.0)).schedules()["steered"]
    assert (always.at(0, 10), never.at(9.9, 10)) == (1, 0)
