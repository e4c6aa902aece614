"""Robust mode connectivity: the curve and its gradient by formula, its stages, the choice of the best point."""

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
    assert_resumes,
    cross_entropies,
    now,
    one_by_one,
    plain_pgd,
    recipe_of,
    train_inside_a_generalist,
)
from torch import Tensor
from training_helpers import ROBUST, make_trainer, tiny_recipe, train

from generalist.core.errors import GeneralistError
from generalist.core.plain_yaml import merge
from generalist.objectives.rmc import RobustModeConnectivity, curve_point
from generalist.recipe import parse
from generalist.training.artefacts import load_weights


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two runs that end in different weights."""
    found = []
    for i, threat in enumerate((f"linf:{LINF}", f"l2:{L2}")):
        path = tmp_path_factory.mktemp(f"end{i}")
        run = train(tiny_recipe([{**ROBUST, "threat": threat, "optimizer": {"lr": 0.05 + 0.1 * i}}]), path)
        run.directory.recipe.write_text("{}")
        found.append(str(run.directory.path))
    return found


def rmc(ends: list[str], **changes: Any) -> dict[str, Any]:
    around = {"kind": "at-max", "beside": [f"l2:{L2}"]}
    return {"kind": "rmc", "ends": ends, "around": around, "points": 3, "statistics": 12, **changes}


def on_the_curve(ends: list[str], path: Path, **changes: Any) -> tuple[Toy, RobustModeConnectivity]:
    """An rmc learner at the start of its first epoch, with weights of its own."""
    toy = Toy(rmc(ends, **changes), path)
    assert isinstance(toy.objective, RobustModeConnectivity)
    toy.objective.epoch_start(1)
    with torch.no_grad():
        toy.model.linear.bias.add_(torch.tensor([0.3, -0.2, 0.1]))  # type: ignore[union-attr, operator]
    return toy, toy.objective


def weights_of(ends: list[str]) -> list[dict[str, Tensor]]:
    states = [load_weights(Path(end) / "snapshots" / "4" / "global.safetensors")[0] for end in ends]
    return [{name: tensor.double() for name, tensor in state.items()} for state in states]


def bezier(first: Tensor, control: Tensor, last: Tensor, t: float) -> Tensor:
    return (1 - t) ** 2 * first + 2 * t * (1 - t) * control + t**2 * last


def test_the_curve_is_a_bezier_curve_through_the_middle() -> None:
    first, control, last = torch.tensor([[1.0, -2.0], [0.5, 3.0], [4.0, 0.25]], dtype=torch.float64)
    middle = bezier(first, control, last, 0.5)
    for t in (0.0, 0.2, 0.5, 0.9, 1.0):
        found = curve_point(first, middle, last, torch.tensor(t, dtype=torch.float64))
        torch.testing.assert_close(found, bezier(first, control, last, t), rtol=1e-14, atol=1e-14)


def test_training_starts_at_the_mean_of_the_ends(ends: list[str], tmp_path: Path) -> None:
    toy = Toy(rmc(ends), tmp_path)
    toy.objective.epoch_start(1)
    states = weights_of(ends)
    for name, tensor in toy.model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, (states[0][name] + states[1][name]) / 2)


@pytest.mark.parametrize("step", [0, 1, 7])
def test_loss_and_gradient_at_a_point_of_the_curve(ends: list[str], tmp_path: Path, step: int) -> None:
    toy, objective = on_the_curve(ends, tmp_path)
    progress = now(step)
    t = float(objective.position(progress))
    assert 0 < t < 1
    states, model = weights_of(ends), toy.fresh()
    own = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    point = {
        n: bezier(states[0][n], 2 * p - (states[0][n] + states[1][n]) / 2, states[1][n], t) for n, p in own.items()
    }
    there = toy.fresh()
    there.load_state_dict({**there.state_dict(), **{name: tensor.detach() for name, tensor in point.items()}})
    pair = [one_by_one(toy, plain_pgd(norm, eps), there) for norm, eps in (("linf", LINF), ("l2", L2))]
    with torch.no_grad():
        losses = [cross_entropies(there.eval()(x), toy.batch.y) for x in pair]
    worst = torch.stack([pair[int(b > a)][i] for i, (a, b) in enumerate(zip(*losses, strict=True))])
    logits = torch.func.functional_call(model, point, (worst,))
    expected = cross_entropies(logits, toy.batch.y).mean()
    wanted = torch.autograd.grad(expected, list(own.values()))
    before = [parameter.detach().clone() for parameter in toy.model.parameters()]
    found, loss = toy.gradients(progress)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(before, toy.model.parameters(), strict=True)), "restored to the bit"


def test_t_is_uniform_and_drawn_anew_for_each_batch(ends: list[str], tmp_path: Path) -> None:
    _, objective = on_the_curve(ends, tmp_path)
    draws = torch.stack([objective.position(now(step)) for step in range(500)])
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.05) and float(draws.std()) == pytest.approx(0.289, abs=0.03)
    assert len(draws.unique()) == 500


def test_the_best_point_on_the_validation_images_is_what_is_saved(ends: list[str], tmp_path: Path) -> None:
    trainer = train(recipe_of(rmc(ends)), tmp_path)
    objective = trainer.learners[0].objective
    assert isinstance(objective, RobustModeConnectivity)
    scores = {t: objective._accuracies(objective._network(torch.tensor(t))) for t in (0.0, 0.5, 1.0)}
    best = float(objective.best)
    assert scores[best] == max(scores.values())
    expected = objective._network(torch.tensor(best)).state_dict()
    saved = load_weights(trainer.directory.last)[0]
    for name, tensor in expected.items():
        torch.testing.assert_close(saved[name], tensor)
    record = trainer.directory.read_metrics()[-1]["validation"]["accuracy"]
    assert record["global"]["natural"] == pytest.approx(scores[best][1])
    assert torch.equal(objective.ends[0]["linear.weight"], weights_of(ends)[0]["linear.weight"]), "ends are fixed"


def test_a_snapshot_holds_a_network_of_the_curve(ends: list[str], tmp_path: Path) -> None:
    """Also of an epoch that is not validated: what training averages beside is no point of it."""
    raw = recipe_of(rmc(ends), epochs=3).model_dump(mode="json")
    trainer = make_trainer(
        parse(merge(raw, {"train": {"snapshots": {"every": 2}}, "validation": {"every": 3}})), tmp_path
    )
    objective = trainer.learners[0].objective
    assert isinstance(objective, RobustModeConnectivity)
    named: list[dict[str, Tensor]] = []
    choose = objective.best_network
    objective.best_network = lambda: (named.append(choose()), named[-1])[1]  # type: ignore[method-assign]
    trainer.run()
    kept = load_weights(trainer.directory.snapshots / "2" / "global.safetensors")[0]
    assert len(named) == 2, "for the snapshot and for the validation"
    for name, tensor in named[0].items():
        torch.testing.assert_close(kept[name], tensor)


def test_a_better_point_wins(ends: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, objective = on_the_curve(ends, tmp_path)
    scores = iter([(0.2, 0.9), (0.4, 0.5), (0.4, 0.6)])
    monkeypatch.setattr(objective, "_accuracies", lambda model: next(scores))
    state = objective.best_network()
    assert state is not None and float(objective.best) == 1, "the natural accuracy decides between equals"
    assert torch.equal(state["linear.bias"], weights_of(ends)[1]["linear.bias"])


@pytest.mark.parametrize("after", [4, 6])
def test_rmc_resumes_without_its_sources(ends: list[str], tmp_path: Path, after: int) -> None:
    assert_resumes(recipe_of(rmc(ends), epochs=3), tmp_path, after=after)


def test_the_state_holds_that_of_the_inner_objective(ends: list[str], tmp_path: Path) -> None:
    around = {"kind": "e-at", "beside": [f"l2:{L2}"]}
    toy, objective = on_the_curve(ends, tmp_path, around=around)
    assert objective.variants == (f"linf:{LINF}", f"l2:{L2}")
    toy.gradients(now(variant=f"l2:{L2}"))
    other = make_trainer(recipe_of(rmc(ends, around=around)), tmp_path / "other").learners[0].objective
    other.load_state_dict(objective.state_dict())
    assert float(other.inner.sums[1, 1]) == 1  # type: ignore[attr-defined]
    assert torch.equal(other.state_dict()["end1.linear.bias"], weights_of(ends)[1]["linear.bias"])


def test_nothing_waits_for_the_device(ends: list[str], tmp_path: Path) -> None:
    assert_capturable(on_the_curve(ends, tmp_path)[0])


def test_the_loss_stays_finite(ends: list[str], tmp_path: Path) -> None:
    assert_finite_when_probabilities_underflow(on_the_curve(ends, tmp_path)[0])


def test_inside_a_generalist(ends: list[str], tmp_path: Path) -> None:
    trainer = train_inside_a_generalist(rmc(ends), tmp_path)
    objective = trainer.learners[0].objective
    assert isinstance(objective, RobustModeConnectivity)
    assert float(objective.best) == 0.5, "a mix has no curve: nothing was chosen"


@pytest.mark.parametrize("name", ["linear.weight", "norm.running_mean"])
@pytest.mark.parametrize("damage", ["missing", "of another size"])
def test_ends_of_another_architecture_are_refused(ends: list[str], tmp_path: Path, name: str, damage: str) -> None:
    toy = Toy(rmc(ends), tmp_path)
    state = dict(weights_of(ends)[0])
    if damage == "missing":
        del state[name]
    else:
        state[name] = torch.zeros(2, 2)
    toy.objective.learner.artefact = lambda source: state
    with pytest.raises(GeneralistError, match=f"another architecture: '{name}'"):
        toy.objective.epoch_start(1)
