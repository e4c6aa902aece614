"""Objectives that mix or shorten: rst, iat, fast-at, at-half, trades."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from objectives_toy import (
    EPS,
    SEED,
    STEP,
    assert_finite,
    assert_minimises,
    cross_entropy_attack,
    extreme,
    linf_start,
    make_toy,
    reference_pgd,
)
from training_helpers import FAST_AT, ROBUST, reference_bits, reference_uniform, tiny_recipe

from generalist.core.errors import GeneralistError, RecipeError

# -- rst --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.5, 0.2])
def test_rst_forwards_both_halves_as_one_batch(tmp_path: Path, beta: float) -> None:
    toy = make_toy({"kind": "rst", "beta": beta}, tmp_path)
    attacked, y = cross_entropy_attack(toy), toy.batch.y
    torch.testing.assert_close(toy.adversarial(), attacked, rtol=0, atol=1e-12)
    logits = toy.logits(torch.cat([toy.batch.x, attacked]))
    log_p = logits.log_softmax(1).gather(1, torch.cat([y, y])[:, None])[:, 0]
    expected = -(1 - beta) * log_p[:6].mean() - beta * log_p[6:].mean()
    assert_minimises(toy, expected)
    apart = (1 - beta) * F.cross_entropy(toy.logits(toy.batch.x), y) + beta * F.cross_entropy(toy.logits(attacked), y)
    assert not torch.isclose(apart, expected)  # BatchNorm tells the two apart


def test_at_half_forwards_the_halves_apart(tmp_path: Path) -> None:
    toy = make_toy("at-half", tmp_path)
    attacked, y = cross_entropy_attack(toy), toy.batch.y
    halves = [F.cross_entropy(toy.logits(x), y) for x in (toy.batch.x, attacked)]
    assert_minimises(toy, 0.5 * halves[0] + 0.5 * halves[1])


# -- iat --------------------------------------------------------------------------------------------------------------


def drawn(half: str) -> tuple[float, list[int]]:
    """Share and permutation of a half, from the reference generator."""
    share = float(reference_uniform(SEED, f"mixup/robust/{half}/share", STEP)[0])
    values = np.array(reference_bits(SEED, f"mixup/robust/{half}/order", STEP, count=6), dtype=np.uint64)
    return share, np.argsort(values.view(np.int64), kind="stable").tolist()


def test_iat_mixes_each_half_with_itself(tmp_path: Path) -> None:
    toy = make_toy("iat", tmp_path)
    y = toy.batch.y
    total = torch.zeros((), dtype=torch.float64)
    for half, x in (("natural", toy.batch.x), ("adversarial", cross_entropy_attack(toy))):
        share, order = drawn(half)
        mixed = torch.stack([share * x[i] + (1 - share) * x[j] for i, j in enumerate(order)])
        log_p = toy.logits(mixed).log_softmax(1)
        for i, j in enumerate(order):
            total = total - (share * log_p[i, y[i]] + (1 - share) * log_p[i, y[j]]) / 6
    metrics = assert_minimises(toy, 0.5 * total)
    assert metrics["loss"] == 0.5 * (metrics["natural_loss"] + metrics["adversarial_loss"])


def test_iat_draws_anew_for_each_half_and_step(tmp_path: Path) -> None:
    toy = make_toy("iat", tmp_path)
    assert drawn("natural")[0] != drawn("adversarial")[0] and drawn("natural")[1] != drawn("adversarial")[1]
    made = toy.objective.prepare(toy.batch, toy.progress).made
    later = replace(toy.progress, step=torch.tensor(STEP + 1))
    assert made["natural_share"] != toy.objective.prepare(toy.batch, later).made["natural_share"]


# -- fast-at ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.25, 0.5])
def test_fast_at_takes_one_step_from_a_uniform_start(tmp_path: Path, alpha: float) -> None:
    toy = make_toy({"kind": FAST_AT, "alpha": alpha}, tmp_path)
    model = copy.deepcopy(toy.model).eval()
    start = (toy.batch.x + linf_start(toy.batch)).clamp(0, 1).requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(start), toy.batch.y), start)
    moved = start.detach() + alpha * EPS * grad.sign()
    attacked = torch.minimum(torch.maximum(moved, toy.batch.x - EPS), toy.batch.x + EPS).clamp(0, 1)
    torch.testing.assert_close(toy.adversarial(), attacked, rtol=0, atol=1e-12)
    assert_minimises(toy, F.cross_entropy(toy.logits(attacked), toy.batch.y))


def test_fast_at_in_l2_takes_a_step_of_its_eps(tmp_path: Path) -> None:
    """Hooks of the threat, no norm of its own: one step of 1.25 eps lands on the ball's surface, or the box's."""
    toy = make_toy(FAST_AT, tmp_path, threat="l2:0.3")
    lengths = (toy.adversarial() - toy.batch.x).flatten(1).norm(dim=1)
    assert float(lengths.max()) <= 0.3 + 1e-12 and float(lengths.min()) > 0.1


@pytest.mark.parametrize("field", [{"steps": 9}, {"step": 0.5}, {"start": "none"}], ids=str)
def test_an_attack_that_fast_at_would_not_take_is_refused(field: dict[str, Any]) -> None:
    for objective in (FAST_AT, {"kind": "awp", "around": FAST_AT}):
        with pytest.raises(
            RecipeError, match=rf"attack\.{next(iter(field))}: objective '.*' has its own; leave it out"
        ):
            tiny_recipe([{**ROBUST, "objective": objective, "attack": field}])
    tiny_recipe([{**ROBUST, "objective": FAST_AT, "attack": {"batchnorm": "train", "scale": 0.5}}])


# -- trades -----------------------------------------------------------------------------------------------------------


def test_trades_in_plain_probabilities(tmp_path: Path) -> None:
    toy = make_toy({"kind": "trades", "beta": 1}, tmp_path)
    with torch.no_grad():
        target = copy.deepcopy(toy.model).eval()(toy.batch.x).softmax(1)
    attacked = reference_pgd(toy.model, toy.batch, lambda logits: -(target * logits.log_softmax(1)).sum())
    torch.testing.assert_close(toy.adversarial(), attacked, rtol=0, atol=1e-12)
    p, q = toy.logits(toy.batch.x).softmax(1), toy.logits(attacked).softmax(1)
    natural = -p.gather(1, toy.batch.y[:, None]).log().mean()
    assert_minimises(toy, natural + (p * (p / q).log()).sum(1).mean())


@pytest.mark.parametrize("objective", ["trades", "rst", "iat", "fast-at", "at-half"])
def test_finite_where_probabilities_underflow(tmp_path: Path, objective: str) -> None:
    toy = make_toy(objective, tmp_path)
    extreme(toy)
    assert_finite(toy)


AT_THE_IMAGE = {"steps": 3, "start": "none"}


@pytest.mark.parametrize("objective", ["trades", "score", {"kind": "awp", "around": "trades"}], ids=str)
def test_an_attack_that_could_not_move_is_refused(tmp_path: Path, objective: Any) -> None:
    """TRADES' divergence and SCORE's distance are smallest, and flat, at the image itself."""
    with pytest.raises(GeneralistError, match="no gradient at the image itself"):
        make_toy(objective, tmp_path, attack=AT_THE_IMAGE)


def test_the_error_of_score_has_a_gradient_at_the_image(tmp_path: Path) -> None:
    toy = make_toy({"kind": "score", "form": "at"}, tmp_path, attack=AT_THE_IMAGE)
    assert not torch.equal(toy.adversarial(), toy.batch.x)
