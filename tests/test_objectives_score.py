"""SCORE: both forms, their bound, their attacks, and extreme answers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from objectives_toy import Toy, assert_finite, assert_minimises, extreme, make_toy, reference_pgd
from torch import Tensor
from training_helpers import ROBUST, tiny_recipe

from generalist.core.errors import RecipeError
from generalist.objectives.score import error_bound


def one_hot(toy: Toy) -> Tensor:
    return torch.eye(3, dtype=torch.float64)[toy.batch.y]


def attacked_by_hand(toy: Toy, target: Tensor) -> Tensor:
    return reference_pgd(toy.model, toy.batch, lambda logits: ((logits.softmax(1) - target) ** 2).sum())


def test_the_bound_is_a_squared_distance() -> None:
    for clip, classes in ((0.4, 10), (0.3, 3), (0.0, 5)):
        answer = torch.full((classes,), clip / (classes - 1), dtype=torch.float64)
        answer[0] = 1 - clip
        label = torch.zeros(classes, dtype=torch.float64)
        label[0] = 1
        assert error_bound(clip, classes) == pytest.approx(float(((answer - label) ** 2).sum()))


@pytest.mark.parametrize(("clip", "used"), [(None, 0.4), (0.6, 0.6), (0, 0.0)])
def test_the_form_of_at(tmp_path: Path, clip: float | None, used: float) -> None:
    toy = make_toy({"kind": "score", "form": "at", "clip": clip}, tmp_path)
    target = one_hot(toy)
    attacked = attacked_by_hand(toy, target)
    torch.testing.assert_close(toy.adversarial(), attacked, rtol=0, atol=1e-12)
    errors = ((toy.logits(attacked).softmax(1) - target) ** 2).sum(1) - used**2 * 3 / 2
    metrics = assert_minimises(toy, errors.clamp_min(0).mean())
    assert metrics["clipped"] == (errors <= 0).float().mean()


@pytest.mark.parametrize("weight", [6.0, 0.5])
def test_the_form_of_trades(tmp_path: Path, weight: float) -> None:
    toy = make_toy({"kind": "score", "form": "trades", "weight": weight}, tmp_path)
    with torch.no_grad():
        target = copy.deepcopy(toy.model).eval()(toy.batch.x).softmax(1)
    attacked = attacked_by_hand(toy, target)
    torch.testing.assert_close(toy.adversarial(), attacked, rtol=0, atol=1e-12)
    robust, natural = toy.logits(attacked).softmax(1), toy.logits(toy.batch.x).softmax(1)
    errors = ((natural - one_hot(toy)) ** 2).sum(1) + weight * ((robust - natural) ** 2).sum(1)
    assert_minimises(toy, torch.relu(errors - 0.3**2 * 3 / 2).mean())


def test_some_samples_are_clipped_and_some_are_not(tmp_path: Path) -> None:
    """The bound is chosen between two errors, so that the toy tests above cannot pass without it."""
    toy = make_toy({"kind": "score", "form": "at", "clip": 0.6}, tmp_path)
    errors = ((toy.logits(toy.adversarial()).softmax(1) - one_hot(toy)) ** 2).sum(1)
    assert bool((errors < 0.6**2 * 1.5).any()) and bool((errors > 0.6**2 * 1.5).any())


def test_label_smoothing_moves_the_target(tmp_path: Path) -> None:
    toy = make_toy({"kind": "score", "form": "at", "clip": 0}, tmp_path, label_smoothing=0.3)
    target = 0.7 * one_hot(toy) + 0.1
    answers = toy.logits(attacked_by_hand(toy, one_hot(toy))).softmax(1)
    assert_minimises(toy, ((answers - target) ** 2).sum(1).mean())


@pytest.mark.parametrize("form", ["at", "trades"])
def test_it_is_finite_where_probabilities_underflow(tmp_path: Path, form: Any) -> None:
    toy = make_toy({"kind": "score", "form": form}, tmp_path)
    extreme(toy)
    assert bool((toy.logits(toy.batch.x).softmax(1) == 0).any())
    assert_finite(toy)


def test_a_weight_of_nothing_is_refused() -> None:
    with pytest.raises(RecipeError, match="weight: form `at` has no distance to weigh"):
        tiny_recipe([{**ROBUST, "objective": {"kind": "score", "form": "at", "weight": 3}}])
