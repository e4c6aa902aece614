"""FAT: which step a sample stops at, the schedule of tau, the noise."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from objectives_toy import EPS, SEED, STEP, Toy, assert_minimises, cross_entropy_attack, linf_start, make_toy
from torch import Tensor
from training_helpers import ROBUST, tiny_recipe

from generalist.attacks.pgd import AttackOptions
from generalist.attacks.threats import Linf
from generalist.core import random
from generalist.core.errors import RecipeError
from generalist.data.sets import Batch
from generalist.objectives.fat import FATOptions, FriendlyAdversarialTraining, friendly_pgd

STEPS = 10


def brightness(x: Tensor) -> Tensor:
    """Class 1 above a brightness of one half, class 0 below: every step of an attack on class 0 is known."""
    value = x.flatten(1).sum(1) - 0.5
    return torch.stack([-10 * value, 10 * value], 1)


def trace(start: float, tau: float, *, steps: int = STEPS) -> float:
    """One pixel of class 0 attacked in steps of 0.05, within 0.3."""
    pixel = torch.full((1, 1, 1, 1), start, dtype=torch.float64)
    batch = Batch(pixel, torch.tensor([0]), torch.tensor([5]))
    options = AttackOptions(steps=steps, step=0.05, start="none")
    found = friendly_pgd(
        brightness, batch, threat=Linf(0.3), options=options, tau=torch.tensor(tau), noise=0.0, seed=0, purpose="trace"
    )
    return float(found)


@pytest.mark.parametrize(
    ("start", "tau", "end"),
    [
        (0.42, 0, 0.52),  # seen at 0.42 and 0.47 (right) and 0.52 (wrong): it stays there
        (0.42, 1, 0.57),  # wrong at 0.52, one step further, wrong again: stop
        (0.42, 2, 0.62),
        (0.42, 1.9, 0.57),  # rounded down
        (0.60, 0, 0.60),  # misclassified before the attack: never moved
        (0.60, 2, 0.70),
        (0.10, 0, 0.40),  # never misclassified: as far as eps allows
        (0.42, 50, 0.72),  # tau beyond all steps: plain PGD
    ],
)
def test_a_traced_case(start: float, tau: float, end: float) -> None:
    assert trace(start, tau) == pytest.approx(end)


def test_the_image_after_the_last_step_is_not_looked_at() -> None:
    assert trace(0.42, 0, steps=2) == pytest.approx(0.52)
    assert trace(0.42, 0, steps=1) == pytest.approx(0.47)


def by_removal(toy: Toy, tau: int, noise: float, steps: int) -> Tensor:
    """As the authors have it: samples leave a list one by one. No masks, no batch."""
    model, ends = copy.deepcopy(toy.model).eval(), []
    starts = (toy.batch.x + linf_start(toy.batch)).clamp(0, 1)
    for x, y, index, now in zip(toy.batch.x, toy.batch.y, toy.batch.index, starts, strict=True):
        left = tau
        for number in range(steps):
            now = now.detach().requires_grad_()
            logits = model(now[None])
            if int(logits.argmax()) != int(y):
                if left == 0:
                    break
                left -= 1
            (grad,) = torch.autograd.grad(F.cross_entropy(logits, y[None]), now)
            draw = random.normal(SEED, f"attack/robust/linf:0.1/noise/{number}", index, STEP, shape=x.shape)
            now = now.detach() + EPS / 4 * grad.sign() + noise * draw.double()
            now = torch.minimum(torch.maximum(now, x - EPS), x + EPS).clamp(0, 1)
        ends.append(now.detach())
    return torch.stack(ends)


@pytest.mark.parametrize("tau", [0, 1, 2])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_masks_do_what_removal_does(tmp_path: Path, tau: int, noise: float) -> None:
    objective = {"kind": "fat", "noise": noise}
    toy = make_toy(objective, tmp_path, scalars={"tau": float(tau)}, attack={"steps": 5})
    torch.testing.assert_close(toy.adversarial(), by_removal(toy, tau, noise, 5), rtol=0, atol=1e-12)
    if noise == 0:  # some stop early: else the comparison would show nothing
        assert not torch.equal(toy.adversarial(), cross_entropy_attack(toy, steps=5))


def test_loss_and_gradient(tmp_path: Path) -> None:
    toy = make_toy("fat", tmp_path, scalars={"tau": 1.0})
    images = by_removal(toy, 1, 0.001, 3)
    assert_minimises(toy, F.cross_entropy(toy.logits(images), toy.batch.y))


def test_samples_do_not_depend_on_their_batch(tmp_path: Path) -> None:
    toy = make_toy("fat", tmp_path, scalars={"tau": 0.0})
    whole = toy.adversarial()
    part = torch.tensor([4, 1])
    toy.batch = Batch(toy.batch.x[part], toy.batch.y[part], toy.batch.index[part])
    torch.testing.assert_close(toy.adversarial(), whole[part], rtol=0, atol=1e-12)


def test_tau_grows_at_epochs_50_and_90_of_120() -> None:
    schedule = FriendlyAdversarialTraining(FATOptions()).schedules()["tau"]
    assert [schedule.at(epoch - 1, 120) for epoch in (1, 50, 51, 90, 91, 120)] == [0, 0, 1, 1, 2, 2]


def test_a_negative_tau_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"tau.*0 or more"):
        tiny_recipe([{**ROBUST, "objective": {"kind": "fat", "tau": -1}}])
    recipe = tiny_recipe([{**ROBUST, "objective": {"kind": "fat", "tau": 2}}])
    assert recipe.learners[0].objective.tau.at(0, 4) == 2  # type: ignore[attr-defined]


def test_the_attack_stays_in_ball_and_box(tmp_path: Path) -> None:
    toy = make_toy({"kind": "fat", "noise": 1.0}, tmp_path, scalars={"tau": 9.0})
    found = toy.adversarial()
    assert float((found - toy.batch.x).abs().max()) <= EPS + 1e-12
    assert float(found.min()) >= 0 and float(found.max()) <= 1
