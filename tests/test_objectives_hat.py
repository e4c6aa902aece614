"""Helper-based training: loss and gradient by formula around several objectives, where its labels come from, what is
refused, resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from several_norms_helpers import (
    LINF,
    Toy,
    assert_capturable,
    assert_finite_when_probabilities_underflow,
    assert_resumes,
    cross_entropies,
    learner,
    log_probabilities,
    now,
    one_by_one,
    plain_pgd,
    recipe_of,
    train_inside_a_generalist,
)
from torch import Tensor, nn
from training_helpers import NATURAL, ROBUST, TinyNet, make_trainer, tiny_recipe, train

from generalist.core.errors import GeneralistError, RecipeError
from generalist.objectives.base import Inputs
from generalist.objectives.hat import HatOptions, HelperBasedTraining
from generalist.objectives.trades import TradesOptions
from generalist.training.artefacts import load_weights
from generalist.training.learner_options import LearnerOptions

BESIDE: dict[str, Any] = {"kind": "hat", "around": "at", "teacher": "#natural"}


@pytest.fixture(scope="module")
def natural(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A network that has learnt natural images, to be the teacher."""
    run = train(tiny_recipe([NATURAL, ROBUST]), tmp_path_factory.mktemp("teacher"))
    run.directory.recipe.write_text("{}")
    return f"{run.directory.path}#natural"


def hat(toy: Toy) -> HelperBasedTraining:
    assert isinstance(toy.objective, HelperBasedTraining)
    return toy.objective


def teacher_of(toy: Toy, source: str) -> TinyNet:
    run, _, name = source.partition("#")
    teacher = toy.fresh()
    teacher.load_state_dict(load_weights(Path(run) / "snapshots" / "4" / f"{name}.safetensors")[0])
    return teacher.eval()


def trades(model: nn.Module, toy: Toy, attacked: Tensor, beta: float) -> Tensor:
    clean, robust = log_probabilities(model(toy.batch.x)), log_probabilities(model(attacked))
    divergence = (clean.exp() * (clean - robust)).sum(1)
    return (cross_entropies(clean, toy.batch.y) + beta * divergence).mean()


@pytest.mark.parametrize("around", ["at", {"kind": "trades", "beta": 1.5}, None], ids=str)
def test_images_further_out_have_the_class_that_the_teacher_sees(around: Any, natural: str, tmp_path: Path) -> None:
    """By default around TRADES with beta 2.5, two perturbations out, with a weight of a half, as the authors do."""
    changed = {"around": around, "weight": 0.75, "reach": 3} if around else {}
    weight, reach = (0.75, 3) if around else (0.5, 2)
    attack = {"steps": 3, "start": "none" if around == "at" else "gaussian"}
    toy = Toy({"kind": "hat", "teacher": natural, **changed}, tmp_path, attack=attack)
    toy.objective.epoch_start(1)
    attacked = toy.objective.prepare(toy.batch, toy.complete(now())).made["adversarial"]
    if around == "at":
        torch.testing.assert_close(attacked, one_by_one(toy, plain_pgd("linf", LINF)), rtol=1e-12, atol=1e-14)
    assert 0 < float((attacked - toy.batch.x).abs().max()) <= LINF * (1 + 1e-12)
    with torch.no_grad():
        classes = teacher_of(toy, natural)(attacked).argmax(1)
    assert not torch.equal(classes, toy.batch.y), "an attack that fools nobody would not tell the two apart"

    def loss(model: nn.Module) -> Tensor:
        if around == "at":
            inside = cross_entropies(model(attacked), toy.batch.y).mean()
        else:
            inside = trades(model, toy, attacked, beta=1.5 if around else 2.5)
        helper = model(toy.batch.x + reach * (attacked - toy.batch.x))
        return inside + weight * cross_entropies(helper, classes).mean()

    model = toy.fresh()
    expected = loss(model)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    found, value = toy.gradients()
    assert value == pytest.approx(float(expected.detach()), rel=1e-12)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


def test_batchnorm_sees_what_the_objective_inside_sees(natural: str, tmp_path: Path) -> None:
    toys = [
        Toy(objective, tmp_path / name)
        for name, objective in (("at", "at"), ("hat", {"kind": "hat", "around": "at", "teacher": natural}))
    ]
    for toy in toys:
        toy.objective.epoch_start(1)
        before = copy.deepcopy(dict(toy.model.named_buffers()))
        toy.gradients()
        assert any(not torch.equal(buffer, before[name]) for name, buffer in toy.model.named_buffers())
    for (name, plain), (_, ours) in zip(*(toy.model.named_buffers() for toy in toys), strict=True):
        assert torch.equal(plain, ours), name


def test_the_learner_beside_it_names_the_classes(tmp_path: Path) -> None:
    """As it is at the start of an epoch, and until the end of that."""
    apart = {"redistribution": {"every": 0}}
    trainer = make_trainer(tiny_recipe([{**ROBUST, "objective": BESIDE}, NATURAL], mixing=apart), tmp_path)
    objective = trainer.learners[0].objective
    assert isinstance(objective, HelperBasedTraining)
    states = [copy.deepcopy(trainer.learners[1].flat.state_dict())]
    asked: list[dict[str, Tensor]] = []

    def look(done: int, total: int) -> None:
        asked.append(copy.deepcopy(objective.teacher.network.state_dict()))
        if done % trainer.steps_per_epoch == 0:
            states.append(copy.deepcopy(trainer.learners[1].flat.state_dict()))

    trainer.listener.iteration = look
    trainer.run()
    assert len(asked) == trainer.steps_per_epoch * trainer.job.train.epochs and len(states) > 2
    for i, found in enumerate(asked):
        wanted = states[i // trainer.steps_per_epoch]
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    assert not torch.equal(states[0]["linear.weight"], states[1]["linear.weight"])


def test_within_awp_and_around_it(natural: str, tmp_path: Path) -> None:
    """Within, the helper images have their part in the perturbation and are learnt from at its end; around, neither."""
    inside = {"kind": "awp", "rho": 0.3, "around": {"kind": "hat", "around": "at", "teacher": natural}}
    outside = {"kind": "hat", "teacher": natural, "around": {"kind": "awp", "rho": 0.3, "around": "at"}}
    alone = {"kind": "awp", "rho": 0.3, "around": "at"}
    found = {}
    for name, objective in (("inside", inside), ("outside", outside), ("alone", alone)):
        toy = Toy(objective, tmp_path / name)
        toy.objective.epoch_start(1)
        before = copy.deepcopy(toy.model.state_dict())
        found[name], _ = toy.gradients()
        assert all(
            torch.equal(tensor, toy.model.state_dict()[key]) for key, tensor in before.items() if "norm" not in key
        )
    # Around AWP: its gradients, and those of the helper images at the weights as they are.
    toy = Toy({"kind": "hat", "teacher": natural, "around": "at"}, tmp_path / "helper")
    toy.objective.epoch_start(1)
    inputs = toy.objective.prepare(toy.batch, toy.complete(now()))
    model = toy.fresh()
    helper = cross_entropies(model(inputs.made["helper"]), inputs.made["helper_label"]).mean()
    added = torch.autograd.grad(0.5 * helper, list(model.parameters()))
    for whole, part, own, mixed in zip(found["outside"], found["alone"], added, found["inside"], strict=True):
        torch.testing.assert_close(whole, part + own, rtol=1e-9, atol=1e-13)
        assert whole.dim() < 2 or not torch.allclose(mixed, whole, rtol=1e-3)


@pytest.mark.parametrize("around", ["nt", "iat", "ramp", "at-linf-l2", {"kind": "awp", "around": "iat"}], ids=str)
def test_what_does_not_attack_each_image_once_is_refused(around: Any) -> None:
    with pytest.raises(RecipeError, match=r"learners\.0\.objective.*does not attack each image once; use trades"):
        recipe_of({"kind": "hat", "teacher": "#natural", "around": around})


def test_a_curve_is_not_wrapped() -> None:
    with pytest.raises(RecipeError, match="'awp' moves the weights for its loss alone: put 'hat' inside of it"):
        recipe_of(
            {"kind": "hat", "teacher": "a", "around": {"kind": "awp", "around": {"kind": "rmc", "ends": ["a", "b"]}}}
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": None}, r"objective\.teacher"),
        ({"reach": 1}, r"objective\.reach: .*greater than 1"),
        ({"weight": -1}, r"objective\.weight: .*greater than or equal to 0"),
        ({"teacher": "#nobody"}, "there is no other learner 'nobody'"),
        ({"around": {"kind": "hat", "teacher": "#natural"}}, "'hat' is around itself"),
    ],
)
def test_mistakes(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(GeneralistError, match=words):
        tiny_recipe([{**ROBUST, "objective": {**BESIDE, **changes}}, NATURAL])


def test_it_asks_for_the_teachers_of_what_it_wraps_too() -> None:
    taught = {"kind": "at-distil", "teacher": "#natural", "match": "logits"}
    options = learner({"kind": "hat", "teacher": "a#natural", "around": taught})
    own = LearnerOptions.model_validate(options)
    assert own.companions() == ["natural"]
    assert HelperBasedTraining.sources(own.objective) == ["a#natural"]


def test_what_the_authors_have_is_the_default() -> None:
    options = HatOptions(teacher="a")
    assert isinstance(options.around, TradesOptions)
    assert (options.around.beta, options.weight, options.reach) == (2.5, 0.5, 2)


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("around", ["at", {"kind": "at-distil", "teacher": "#natural", "match": "logits"}], ids=str)
def test_resumes(after: int, around: Any, tmp_path: Path) -> None:
    assert_resumes(tiny_recipe([{**ROBUST, "objective": {**BESIDE, "around": around}}, NATURAL]), tmp_path, after=after)


def test_capturable_finite_and_in_company(natural: str, tmp_path: Path) -> None:
    objective = {"kind": "hat", "around": "at", "teacher": natural}
    for name, kind in (("alone", objective), ("in awp", {"kind": "awp", "around": objective})):
        toy = Toy(kind, tmp_path / name)
        toy.objective.epoch_start(1)
        assert_capturable(toy)
        train_inside_a_generalist(kind, tmp_path / f"{name} in company")
    toy = Toy(objective, tmp_path / "far")
    toy.objective.epoch_start(1)
    assert_finite_when_probabilities_underflow(toy)


def test_what_is_made_is_kept_from_the_objective_inside(natural: str, tmp_path: Path) -> None:
    """Its own inputs are there as it made them."""
    toys = [
        Toy(objective, tmp_path / name)
        for name, objective in (("at", "at"), ("hat", {"kind": "hat", "around": "at", "teacher": natural}))
    ]
    made: list[Inputs] = []
    for toy in toys:
        toy.objective.epoch_start(1)
        made.append(toy.objective.prepare(toy.batch, toy.complete(now())))
    assert set(made[1].made) - set(made[0].made) == {"helper", "helper_label"}
    assert torch.equal(made[0].made["adversarial"], made[1].made["adversarial"])
