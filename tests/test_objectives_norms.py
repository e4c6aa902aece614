"""The objectives against several norms by independent formulas: average, worst, multi steepest descent, extremes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from several_norms_helpers import (
    L2,
    LINF,
    Toy,
    assert_capturable,
    assert_finite_when_probabilities_underflow,
    assert_gradients,
    assert_resumes,
    bounded_step,
    cross_entropies,
    gradient_at,
    learner,
    now,
    one_by_one,
    plain_pgd,
    recipe_of,
    train_inside_a_generalist,
)
from torch import Tensor, nn
from training_helpers import tiny_recipe, train

from generalist.core.errors import GeneralistError, RecipeError
from generalist.objectives.norms import SeveralNorms, highest

BESIDE = {"beside": [f"l2:{L2}"]}
KINDS = ["at-linf-l2", "at-max", "msd", "e-at"]


def variant_of(kind: str) -> Any:
    return now(variant=f"linf:{LINF}") if kind == "e-at" else now()


def attacked(toy: Toy) -> list[Tensor]:
    return [one_by_one(toy, plain_pgd(norm, eps)) for norm, eps in (("linf", LINF), ("l2", L2))]


def test_the_average_over_norms(tmp_path: Path) -> None:
    toy = Toy({"kind": "at-linf-l2", **BESIDE}, tmp_path)
    first, second = attacked(toy)

    def loss(model: nn.Module) -> Tensor:
        return torch.cat([cross_entropies(model(x), toy.batch.y) for x in (first, second)]).mean()

    assert_gradients(toy, loss)


def test_the_worst_of_norms_is_chosen_image_by_image(tmp_path: Path) -> None:
    toy = Toy({"kind": "at-max", **BESIDE}, tmp_path)
    pair = attacked(toy)
    with torch.no_grad():
        losses = [cross_entropies(toy.fresh().eval()(x), toy.batch.y) for x in pair]
    chosen = [int(losses[1][i] > losses[0][i]) for i in range(len(toy.batch.y))]
    assert 0 < sum(chosen) < len(chosen), "this case must use both norms"
    worst = torch.stack([pair[norm][i] for i, norm in enumerate(chosen)])
    assert_gradients(toy, lambda model: cross_entropies(model(worst), toy.batch.y).mean())


def test_msd_keeps_the_steepest_norm_of_each_image_and_the_best_image_seen(tmp_path: Path) -> None:
    toy = Toy({"kind": "msd", **BESIDE}, tmp_path)
    norms = (("linf", LINF), ("l2", L2))
    chosen = set()

    def brute_force(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """One image: at each step try both norms and keep the higher loss; the best of all is the answer."""
        current, seen = x, [(float(cross_entropies(model(x), y).detach()), x)]
        for _ in range(3):
            grad = gradient_at(model, current, y)
            steps = [(x + bounded_step(current - x, grad, norm, eps)).clamp(0, 1) for norm, eps in norms]
            losses = [float(cross_entropies(model(images), y).detach()) for images in steps]
            norm = int(losses[1] > losses[0])
            chosen.add(norm)
            current = steps[norm]
            seen.append((losses[norm], current))
        return max(seen, key=lambda entry: entry[0])[1]

    expected = one_by_one(toy, brute_force)
    assert chosen == {0, 1}, "this case must use both norms"
    found = toy.objective.prepare(toy.batch, now()).made["adversarial"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert_gradients(toy, lambda model: cross_entropies(model(expected), toy.batch.y).mean())


def test_msd_stays_in_the_union_of_the_balls(tmp_path: Path) -> None:
    toy = Toy({"kind": "msd", "beside": ["l2:0.3", "l1:0.9"], "step": {"l1": 0.3}}, tmp_path)
    delta = toy.objective.prepare(toy.batch, now()).made["adversarial"] - toy.batch.x
    rows = delta.flatten(1)
    inside = (
        (rows.abs().amax(1) <= LINF + 1e-12) | (rows.norm(dim=1) <= 0.3 + 1e-12) | (rows.abs().sum(1) <= 0.9 + 1e-12)
    )
    assert bool(inside.all()) and float(rows.abs().sum()) > 0


def test_msd_goes_back_to_the_image_where_no_step_helps(tmp_path: Path) -> None:
    """Steps far beyond the best point: the start, too, is among what was seen."""
    toy = Toy({"kind": "msd", **BESIDE}, tmp_path)
    with torch.no_grad():
        toy.model.linear.weight.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(toy.objective.prepare(toy.batch, now()).made["adversarial"], toy.batch.x)


def test_the_highest_of_equals_is_the_first() -> None:
    images = [torch.full((3, 1, 1, 1), float(i)) for i in range(3)]
    losses = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([1.0, 3.0, 0.0]), torch.tensor([2.0, 3.0, 0.0])]
    found, top = highest(images, losses)
    assert found.flatten().tolist() == [2, 1, 0] and top.tolist() == [2, 3, 0]


# -- e-at ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "eps"), [("linf", LINF), ("l2", L2)])
def test_e_at_attacks_in_the_norm_of_its_variant(tmp_path: Path, norm: str, eps: float) -> None:
    toy = Toy({"kind": "e-at", **BESIDE}, tmp_path)
    assert toy.objective.variants == (f"linf:{LINF}", f"l2:{L2}")
    images = one_by_one(toy, plain_pgd(norm, eps))
    progress = now(variant=f"{norm}:{eps}")
    assert_gradients(toy, lambda model: cross_entropies(model(images), toy.batch.y).mean(), progress)


def shares(toy: Toy, draws: int = 1500) -> list[float]:
    names = [toy.objective.variant(step, 1) for step in range(draws)]
    return [names.count(name) / draws for name in toy.objective.variants]


def test_e_at_draws_norms_by_their_robust_error_of_the_epoch_before(tmp_path: Path) -> None:
    toy = Toy({"kind": "e-at", **BESIDE}, tmp_path)
    assert shares(toy) == pytest.approx([0.5, 0.5], abs=0.04)
    toy.objective.sums.copy_(torch.tensor([[9.0, 10.0], [3.5, 5.0]]))  # type: ignore[attr-defined]
    assert shares(toy) == pytest.approx([0.5, 0.5], abs=0.04), "read at the epoch's start alone"
    toy.objective.epoch_start(2)
    assert shares(toy) == pytest.approx([0.25, 0.75], abs=0.04)
    toy.objective.epoch_start(3)
    assert shares(toy) == pytest.approx([0.25, 0.75], abs=0.04), "a norm without a batch keeps its accuracy"
    toy.objective.sums.copy_(torch.tensor([[1.0, 1.0], [1.0, 1.0]]))  # type: ignore[attr-defined]
    toy.objective.epoch_start(4)
    assert shares(toy) == pytest.approx([0.5, 0.5], abs=0.04), "no norm is behind"


def test_e_at_counts_the_accuracy_of_the_norm_that_ran(tmp_path: Path) -> None:
    toy = Toy({"kind": "e-at", **BESIDE}, tmp_path)
    images = one_by_one(toy, plain_pgd("l2", L2))
    right = (toy.fresh()(images).argmax(1) == toy.batch.y).double().mean()
    toy.gradients(now(variant=f"l2:{L2}"))
    assert toy.objective.state_dict()["sums"].tolist() == [[0, 0], [pytest.approx(float(right)), 1]]


@pytest.mark.parametrize("after", [4, 6])
def test_e_at_resumes_within_and_between_epochs(tmp_path: Path, after: int) -> None:
    assert_resumes(recipe_of({"kind": "e-at", **BESIDE}, epochs=3), tmp_path, after=after)


def test_e_at_logs_the_accuracy_of_each_norm(tmp_path: Path) -> None:
    trainer = train(recipe_of({"kind": "e-at", **BESIDE}, epochs=3), tmp_path)
    logged = set().union(*(record["train"]["robust"] for record in trainer.directory.read_metrics()))
    assert {f"accuracy/linf:{LINF}", f"accuracy/l2:{L2}"} <= logged


# -- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_device(tmp_path: Path, kind: str) -> None:
    assert_capturable(Toy({"kind": kind, **BESIDE}, tmp_path), variant_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_stay_finite(tmp_path: Path, kind: str) -> None:
    assert_finite_when_probabilities_underflow(Toy({"kind": kind, **BESIDE}, tmp_path), variant_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_generalist(tmp_path: Path, kind: str) -> None:
    trainer = train_inside_a_generalist({"kind": kind, **BESIDE}, tmp_path)
    accuracy = trainer.directory.read_metrics()[-1]["validation"]["accuracy"]["robust"]
    assert set(accuracy) == {"natural", f"linf:{LINF}", f"l2:{L2}"}, "every norm that is trained on is validated"


def test_steps_by_norm(tmp_path: Path) -> None:
    options = {"kind": "at-max", **BESIDE, "step": {"l2": 0.2}}
    toy = Toy(options, tmp_path, attack={"steps": 3, "step": 0.01})
    assert isinstance(toy.objective, SeveralNorms)
    assert [attack.step for _, attack in toy.objective.norms] == [0.01, 0.2]
    other = Toy({"kind": "at-max", **BESIDE}, tmp_path / "other", attack={"steps": 3, "step": 0.01})
    assert isinstance(other.objective, SeveralNorms)
    assert [attack.step for _, attack in other.objective.norms] == [0.01, None]


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="named twice"):
        tiny_recipe([learner({"kind": "msd", "beside": ["l2:0.5", "l2:1/2"]})])
    with pytest.raises(RecipeError, match="beside"):
        tiny_recipe([learner({"kind": "msd", "beside": []})])
    with pytest.raises(RecipeError, match="needs a threat"):
        tiny_recipe([{"name": "x", "objective": "msd", "optimizer": {"lr": 0.1}}])
    with pytest.raises(GeneralistError, match="its own threat already"):
        Toy({"kind": "msd", "beside": [f"linf:{LINF}"]}, tmp_path)
    with pytest.raises(GeneralistError, match=r"objective\.step names l1, but its norms are linf, l2"):
        Toy({"kind": "msd", **BESIDE, "step": {"l1": 1}}, tmp_path)


def test_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    toy = Toy({"kind": "e-at", **BESIDE}, tmp_path)
    with pytest.raises(GeneralistError, match="is in only one of them"):
        toy.objective.load_state_dict({})
    with pytest.raises(GeneralistError, match="has shape"):
        toy.objective.load_state_dict({"accuracies": torch.zeros(3), "sums": torch.zeros(2, 2)})
