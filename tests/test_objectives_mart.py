"""MART: its loss, its weights by sample, and what becomes of it where probabilities underflow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from objectives_toy import assert_finite, assert_minimises, cross_entropy_attack, extreme, make_toy

from generalist.objectives.mart import runner_up, weighted_divergence


def test_loss_and_gradient(tmp_path: Path) -> None:
    """Written in plain probabilities, sample by sample."""
    toy = make_toy({"kind": "mart", "weight": 5}, tmp_path)
    attacked = cross_entropy_attack(toy)
    torch.testing.assert_close(toy.adversarial(), attacked, rtol=0, atol=1e-12)
    natural, robust = toy.logits(toy.batch.x).softmax(1), toy.logits(attacked).softmax(1)
    terms = []
    for p, q, label in zip(natural, robust, toy.batch.y.tolist(), strict=True):
        wrong = max(q[k] for k in range(len(q)) if k != label)
        divergence = sum(p[k] * torch.log(p[k] / q[k]) for k in range(len(p)))
        terms.append(-torch.log(q[label]) - torch.log(1 - wrong) + 5 * (1 - p[label]) * divergence)
    assert_minimises(toy, torch.stack(terms).mean())


def test_label_smoothing_reaches_the_first_term(tmp_path: Path) -> None:
    plain, smooth = (make_toy("mart", tmp_path / str(s), label_smoothing=s) for s in (0.0, 0.2))
    _, metrics = plain.gradients()
    _, smoothed = smooth.gradients()
    logits = plain.logits(cross_entropy_attack(plain))
    log_p = logits.log_softmax(1)
    difference = 0.2 * (log_p.gather(1, plain.batch.y[:, None]).mean() - log_p.mean())
    torch.testing.assert_close(smoothed["loss"] - metrics["loss"], difference.detach())


def test_it_is_finite_where_probabilities_underflow(tmp_path: Path) -> None:
    toy = make_toy("mart", tmp_path)
    extreme(toy)
    assert bool((toy.logits(toy.batch.x).softmax(1) == 0).any())
    assert_finite(toy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_at_the_edge_of_numbers(dtype: torch.dtype) -> None:
    """A wrong class with probability 1 costs the gap of its logit; a sure and right sample has no weight."""
    logits = torch.tensor([[0.0, 900.0, 0.0], [900.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    y = torch.tensor([0, 0])
    loss = runner_up(logits, y)
    two = torch.tensor(2.0, dtype=dtype)
    torch.testing.assert_close(loss.detach(), torch.stack([900 - two.log(), torch.zeros((), dtype=dtype)]))
    weighted = weighted_divergence(logits, logits.flip(0), y)
    torch.testing.assert_close(weighted.detach(), torch.tensor([900.0, 0.0], dtype=dtype))
    (grad,) = torch.autograd.grad(loss.sum() + weighted.sum(), logits)
    assert bool(grad.isfinite().all())


def test_two_classes_need_no_third() -> None:
    logits = torch.tensor([[0.3, -0.2]], dtype=torch.float64)
    p = logits.softmax(1)
    torch.testing.assert_close(runner_up(logits, torch.tensor([0])), -p[:, 0].log())
