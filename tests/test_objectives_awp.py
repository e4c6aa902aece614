"""AWP: gradients at perturbed weights, an exact way back, and no trace of the first pass."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from objectives_toy import Toy, assert_same_gradients, cross_entropy_attack, make_toy, parameter_gradients
from torch import Tensor
from training_helpers import NATURAL, ROBUST, stopped_and_resumed, tiny_recipe, train

from generalist.core.errors import RecipeError
from generalist.data.sets import Batch
from generalist.objectives.awp import perturbation
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, Objective, Progress


def perturbed(toy: Toy, loss: Tensor, rho: float) -> None:
    """Move the plain network's weight tensors up the gradient of `loss`."""
    gradients = parameter_gradients(toy.model, loss)
    with torch.no_grad():
        for weight, gradient in zip(toy.model.parameters(), gradients, strict=True):
            if weight.dim() > 1:
                weight.add_(rho * weight.norm() * gradient / gradient.norm())


@pytest.mark.parametrize("rho", [0.005, 0.3])
def test_gradients_at_perturbed_weights(tmp_path: Path, rho: float) -> None:
    toy = make_toy({"kind": "awp", "around": "at", "rho": rho}, tmp_path)
    x, y = cross_entropy_attack(toy), toy.batch.y  # the attack is on the weights as they are
    before = copy.deepcopy(toy.model.state_dict())
    perturbed(toy, F.cross_entropy(toy.logits(x), y), rho)
    moved = {name: weight.detach().clone() for name, weight in toy.model.named_parameters()}
    toy.model.load_state_dict({**before, **moved})  # with the statistics of the start
    loss = F.cross_entropy(toy.logits(x), y)
    gradients, metrics = toy.gradients()
    torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-10, atol=0)
    assert_same_gradients(gradients, parameter_gradients(toy.model, loss))
    for name, buffer in toy.model.named_buffers():  # one forward pass, at the perturbed weights
        torch.testing.assert_close(toy.learner.model.get_buffer(name), buffer)
    assert int(toy.learner.model.get_buffer("norm.num_batches_tracked")) == 1


@pytest.mark.parametrize("around", ["at", "nt", {"kind": "trades", "beta": 6}, "mart", "agr", "fat"])
def test_weights_come_back_bit_for_bit(tmp_path: Path, around: Any) -> None:
    scalars = {"steered": 1.0, "tau": 0.0}
    learner = {"threat": None, "attack": None} if around == "nt" else {}
    toy = make_toy({"kind": "awp", "around": around, "rho": 0.3}, tmp_path, scalars=scalars, **learner)
    for _ in range(3):
        before = toy.learner.flat.parameters.clone()
        gradients, _ = toy.gradients()
        assert torch.equal(toy.learner.flat.parameters, before)
        assert any(bool(gradient.any()) for gradient in gradients)


def test_weights_come_back_when_the_objective_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = make_toy("awp", tmp_path)
    inner = toy.objective.inner  # type: ignore[attr-defined]
    answer = inner.gradients_of
    calls: list[int] = []

    def failing(inputs: Inputs, progress: Progress) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return answer(inputs, progress)

    monkeypatch.setattr(inner, "gradients_of", failing)
    before = toy.learner.flat.parameters.clone()
    with pytest.raises(RuntimeError, match="memory"):
        toy.gradients()
    assert torch.equal(toy.learner.flat.parameters, before)


def test_no_perturbation_is_the_wrapped_objective(tmp_path: Path) -> None:
    plain, wrapped = (make_toy(kind, tmp_path / str(i)) for i, kind in enumerate(["at", {"kind": "awp", "rho": 0}]))
    expected, metrics = plain.gradients()
    gradients, found = wrapped.gradients()
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    assert found == metrics
    assert torch.equal(plain.learner.flat.vector, wrapped.learner.flat.vector)


def test_perturbations_begin_after_the_warm_up(tmp_path: Path) -> None:
    """Its share of training is the wrapped objective's, bit for bit; the rest is AWP's."""
    always = {"kind": "awp", "rho": 0.3}
    epochs = make_toy(always, tmp_path / "any").learner.objective.learner.epochs
    assert epochs >= 2
    for epoch, like in [(1, "at"), (2, always)]:
        toys = [
            make_toy(kind, tmp_path / f"{epoch}-{i}") for i, kind in enumerate([{**always, "warmup": 1 / epochs}, like])
        ]
        for toy in toys:
            toy.progress.epoch.fill_(epoch)
            toy.progress = replace(toy.progress, variant=toy.objective.variant(0, epoch))
        gradients, expected = (toy.gradients()[0] for toy in toys)
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True)), epoch


def test_length_and_direction_of_a_perturbation() -> None:
    weight, gradient = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    found = perturbation(weight, gradient, rho=0.01)
    torch.testing.assert_close(found.norm(), 0.01 * weight.norm())
    torch.testing.assert_close(found / found.norm(), gradient / gradient.norm())
    assert not perturbation(weight, torch.zeros_like(weight), rho=0.01).any()


# -- what is the wrapped objective's --------------------------------------------------------------------------------


class Counting(Objective):
    """Natural training that counts its passes, and has two kinds of batches."""

    adversarial = False
    variants = ("one", "two")
    capturable = False

    def setup(self, learner: Any) -> None:
        super().setup(learner)
        self.passes = torch.zeros((), dtype=torch.int64)
        self.calls: list[str] = []

    def variant(self, step: int, epoch: int) -> str:
        return self.variants[step % 2]

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        self.passes.add_(1)
        scale = 1 + 0.1 * self.passes.double()
        loss = self.learner.cross_entropy(self.learner.forward(inputs.batch.x), inputs.batch.y)
        return scale * loss, {"passes": self.passes.double()}

    def epoch_start(self, epoch: int) -> None:
        self.calls.append(f"start {epoch}")

    def epoch_end(self, epoch: int) -> None:
        self.calls.append(f"end {epoch}")

    def redistributed(self, *, reset: bool) -> None:
        self.calls.append("redistributed")

    def state_dict(self) -> dict[str, Tensor]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.passes.copy_(state["passes"])


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(OBJECTIVES._things, "counting", Counting)
    return {**NATURAL, "objective": {"kind": "awp", "around": "counting"}}


def test_state_sees_one_pass_an_iteration_and_hooks_are_passed_on(tmp_path: Path, counting: dict[str, Any]) -> None:
    trainer = train(tiny_recipe([counting], train={"epochs": 2}), tmp_path)
    objective = trainer.learners[0].objective
    assert isinstance(objective.inner, Counting)  # type: ignore[attr-defined]
    assert int(objective.inner.passes) == trainer.step == 6  # type: ignore[attr-defined]
    assert objective.inner.calls == ["start 1", "end 1", "start 2", "end 2"]  # type: ignore[attr-defined]
    assert objective.variants == ("one", "two") and not objective.capturable
    assert objective.variant(3, 1) == "two"


def test_a_wrapped_state_is_resumed(tmp_path: Path, counting: dict[str, Any]) -> None:
    """The number of passes scales the loss, so a run that forgot it would end elsewhere."""
    recipe = tiny_recipe([counting], train={"epochs": 4})
    whole = train(recipe, tmp_path / "whole")
    resumed = stopped_and_resumed(recipe, tmp_path / "early", epoch=2)
    assert torch.equal(resumed.learners[0].flat.vector, whole.learners[0].flat.vector)
    assert int(resumed.learners[0].objective.state_dict()["passes"]) == 12


def test_threats_are_those_of_what_is_wrapped() -> None:
    with pytest.raises(RecipeError, match="needs a threat"):
        tiny_recipe([{**NATURAL, "objective": {"kind": "awp", "around": "mart"}}])
    with pytest.raises(RecipeError, match="makes no adversarial examples"):
        tiny_recipe([{**NATURAL, "threat": "linf:0.1", "objective": {"kind": "awp", "around": "nt"}}])
    with pytest.raises(RecipeError, match="trades"):
        tiny_recipe([{**NATURAL, "threat": "linf:0.1", "objective": {"kind": "awp", "around": "tradse"}}])


def test_an_objective_that_nothing_can_wrap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own `gradients` would be left out without a word."""

    class Halved(Counting):
        def gradients(self, batch: Batch, progress: Progress) -> tuple[list[Tensor], Metrics]:
            found, metrics = super().gradients(batch, progress)
            return [gradient / 2 for gradient in found], metrics

    monkeypatch.setitem(OBJECTIVES._things, "halved", Halved)
    tiny_recipe([{**NATURAL, "objective": "halved"}])
    with pytest.raises(RecipeError, match=r"around: 'halved' has a `gradients` of its own.* `gradients_of` instead"):
        tiny_recipe([{**NATURAL, "objective": {"kind": "awp", "around": "halved"}}])


def test_variants_that_are_known_after_setup_only_are_passed_on(tmp_path: Path) -> None:
    learner = {**ROBUST, "objective": {"kind": "awp", "around": {"kind": "e-at", "beside": ["l2:0.3"]}}}
    trainer = train(tiny_recipe([learner], train={"epochs": 1}), tmp_path)
    assert trainer.learners[0].objective.variants == ("linf:0.1", "l2:0.3")


def test_variants_of_what_is_wrapped_are_kept_in_the_warm_up(
    tmp_path: Path, counting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a recording of its own there, and what is inside is asked for its own names alone."""
    learner = {**counting, "objective": {**counting["objective"], "warmup": 0.5}}
    trainer = train(tiny_recipe([learner], train={"epochs": 2}), tmp_path)
    objective, seen = trainer.learners[0].objective, list[str]()
    assert len(set(objective.variants)) == 4 and objective.variants[:2] == ("one", "two")
    assert {objective.variant(step, epoch) for step in (0, 1) for epoch in (1, 2)} == set(objective.variants)
    inner: Counting = objective.inner  # type: ignore[attr-defined]
    prepare, loss = inner.prepare, inner.loss
    monkeypatch.setattr(inner, "prepare", lambda batch, now: seen.append(now.variant) or prepare(batch, now))
    monkeypatch.setattr(inner, "loss", lambda inputs, now: seen.append(now.variant) or loss(inputs, now))
    batch = trainer.train_images.batch(torch.tensor([0, 1]))
    batch = replace(batch, x=batch.x.double())
    for name in objective.variants:
        objective.gradients(batch, Progress(torch.tensor(1), torch.tensor(1), torch.tensor(0.1), name))
    assert seen == ["one", "one", "one", "two", "two", "two", "one", "one", "two", "two"]
