"""SGD and Adam(W) on flat vectors against torch.optim, in float64, with a learning rate that changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_helpers import reference_uniform

from generalist.tensors.optimizers import OptimizerOptions, build_optimizer

SIZE, STEPS = 12, 30


def gradient_at(weights: torch.Tensor, step: int) -> torch.Tensor:
    """Of a bowl whose floor moves: depends on the weights, so an error in one step grows in the next ones."""
    target = torch.from_numpy(reference_uniform(0, "target", step, count=SIZE)) * 4 - 2
    return torch.sin(weights - target) + 0.1 * (weights - target) ** 3


def rate_at(step: int) -> float:
    return 0.05 * (1 - step / 40) if step != 11 else 0.2


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd plain": (
        {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0},
        lambda w: torch.optim.SGD([w], lr=1.0),
    ),
    "sgd momentum": (
        {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.0},
        lambda w: torch.optim.SGD([w], lr=1.0, momentum=0.9),
    ),
    "sgd momentum decay": (
        {"kind": "sgd", "momentum": 0.9, "weight_decay": 3.5e-3},
        lambda w: torch.optim.SGD([w], lr=1.0, momentum=0.9, weight_decay=3.5e-3),
    ),
    "sgd nesterov": (
        {"kind": "sgd", "momentum": 0.8, "weight_decay": 5e-4, "nesterov": True},
        lambda w: torch.optim.SGD([w], lr=1.0, momentum=0.8, weight_decay=5e-4, nesterov=True),
    ),
    "adam": (
        {"kind": "adam", "weight_decay": 0.0},
        lambda w: torch.optim.Adam([w], lr=1.0),
    ),
    "adam decay": (
        {"kind": "adam", "weight_decay": 0.02, "betas": [0.8, 0.95], "adam_eps": 1e-6},
        lambda w: torch.optim.Adam([w], lr=1.0, weight_decay=0.02, betas=(0.8, 0.95), eps=1e-6),
    ),
    "adamw": (
        {"kind": "adamw", "weight_decay": 0.02},
        lambda w: torch.optim.AdamW([w], lr=1.0, weight_decay=0.02),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_thirty_steps_equal_torch(case: str) -> None:
    options, theirs = CASES[case]
    start = torch.from_numpy(reference_uniform(1, "start", count=SIZE)) - 0.5
    weights, expected = start.clone(), start.clone().requires_grad_()
    optimizer = build_optimizer(OptimizerOptions(**options, lr=0.1), weights)
    other = theirs(expected)
    for step in range(STEPS):
        optimizer.step(weights, gradient_at(weights, step), torch.tensor(rate_at(step), dtype=torch.float64))
        other.param_groups[0]["lr"] = rate_at(step)
        expected.grad = gradient_at(expected.detach(), step)
        other.step()
    assert (weights - start).abs().max() > 0.1
    torch.testing.assert_close(weights, expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_reset_optimizer_is_a_new_one(case: str) -> None:
    options = OptimizerOptions(**CASES[case][0], lr=0.1)
    lr = torch.tensor(0.05, dtype=torch.float64)
    weights = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    used, fresh = build_optimizer(options, weights), build_optimizer(options, weights)
    scratch = weights.clone()
    for step in range(3):
        used.step(scratch, gradient_at(scratch, step), lr)
    used.reset()
    first, second = weights.clone(), weights.clone()
    used.step(first, gradient_at(weights, 0), lr)
    fresh.step(second, gradient_at(weights, 0), lr)
    assert torch.equal(first, second)


def test_padding_between_tensors_stays_zero() -> None:
    for options, _ in CASES.values():
        weights = torch.zeros(SIZE, dtype=torch.float64)
        optimizer = build_optimizer(OptimizerOptions(**options, lr=0.1), weights)
        for _ in range(3):
            optimizer.step(weights, torch.zeros_like(weights), torch.tensor(0.1, dtype=torch.float64))
        assert not weights.any()


def test_the_learning_rate_is_read_at_each_step() -> None:
    rate = torch.tensor(0.0, dtype=torch.float64)
    weights = torch.ones(SIZE, dtype=torch.float64)
    optimizer = build_optimizer(OptimizerOptions(kind="sgd", lr=0.1, momentum=0.0, weight_decay=0.0), weights)
    optimizer.step(weights, torch.ones_like(weights), rate)
    assert torch.equal(weights, torch.ones_like(weights))
    rate.fill_(0.5)
    optimizer.step(weights, torch.ones_like(weights), rate)
    assert torch.equal(weights, torch.full_like(weights, 0.5))
