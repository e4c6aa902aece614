"""Training on a teacher's answers: loss, gradient and moving teacher by formula; sources, resume, company."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from several_norms_helpers import (
    LINF,
    Toy,
    assert_capturable,
    assert_finite_when_probabilities_underflow,
    assert_gradients,
    assert_resumes,
    bounded_step,
    cross_entropies,
    log_probabilities,
    now,
    one_by_one,
    plain_pgd,
    recipe_of,
    train_inside_a_generalist,
)
from torch import Tensor, nn
from training_helpers import NATURAL, ROBUST, TinyNet, make_trainer, tiny_recipe, train

from generalist import api
from generalist.core.errors import GeneralistError
from generalist.objectives.distil import Distilled
from generalist.recipe import load_recipe
from generalist.training.artefacts import load_weights

TAUGHT: dict[str, Any] = {"kind": "at-distil", "weight": 0.3, "temperature": 2.0}
AT: dict[str, Any] = {**TAUGHT, "decay": 0.9}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two learners, to be the teacher."""
    run = train(tiny_recipe([ROBUST, NATURAL]), tmp_path_factory.mktemp("teacher"))
    run.directory.recipe.write_text("{}")
    return run.directory.path


def distilled(toy: Toy) -> Distilled:
    assert isinstance(toy.objective, Distilled)
    return toy.objective


def softened(teacher: nn.Module, x: Tensor, temperature: float) -> Tensor:
    with torch.no_grad():
        return log_probabilities(teacher.eval()(x) / temperature).exp()


def mixed_loss(logits: Tensor, y: Tensor, answers: Tensor, weight: float) -> Tensor:
    copied = -(answers * log_probabilities(logits)).sum(1)
    return ((1 - weight) * cross_entropies(logits, y) + weight * copied).mean()


def disturb(toy: Toy) -> None:
    with torch.no_grad():
        for parameter in toy.model.parameters():
            parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()).reshape(parameter.shape))


def moved(teacher: TinyNet, model: TinyNet, share: float) -> TinyNet:
    """The average after one more iteration, buffers included, by its definition."""
    teacher, state = copy.deepcopy(teacher), model.state_dict()
    for name, tensor in teacher.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_((1 - share) * tensor + share * state[name])
    return teacher


@pytest.mark.parametrize(("step", "share"), [(2, 9 / 12), (500, 0.1)])
def test_an_average_of_the_learner_teaches_it(step: int, share: float, tmp_path: Path) -> None:
    toy = Toy(AT, tmp_path)
    distilled(toy).epoch_start(1)
    start = toy.fresh()
    disturb(toy)
    teacher = moved(start, toy.fresh(), share)
    attacked = one_by_one(toy, plain_pgd("linf", LINF))
    answers = softened(teacher, toy.batch.x, 2.0)
    assert_gradients(toy, lambda m: mixed_loss(m(attacked), toy.batch.y, answers, 0.3), now(step))
    for name, tensor in distilled(toy).teacher.network.state_dict().items():
        torch.testing.assert_close(tensor, teacher.state_dict()[name], rtol=1e-12, atol=0)


def test_a_run_teaches_a_natural_learner(taught: Path, tmp_path: Path) -> None:
    source = f"{taught}#natural"
    toy = Toy({"kind": "nt-distil", "teacher": source, "weight": 0.75}, tmp_path, threat=None, attack=None)
    distilled(toy).epoch_start(1)
    teacher = toy.fresh()
    state = load_weights(taught / "snapshots" / "4" / "natural.safetensors")[0]
    teacher.load_state_dict(state)
    answers = softened(teacher, toy.batch.x, 1.0)
    disturb(toy)
    assert_gradients(toy, lambda m: mixed_loss(m(toy.batch.x), toy.batch.y, answers, 0.75))
    toy.gradients(now(1))
    for name, tensor in distilled(toy).teacher.network.state_dict().items():
        assert torch.equal(tensor, state[name].to(tensor.dtype)), "it stays as it is"


def test_logits_as_a_teacher_has_them(taught: Path, tmp_path: Path) -> None:
    toy = Toy({"kind": "at-distil", "teacher": str(taught), "weight": 0.4, "match": "logits"}, tmp_path)
    distilled(toy).epoch_start(1)
    teacher = toy.fresh()
    teacher.load_state_dict(load_weights(taught / "last.safetensors")[0])
    disturb(toy)
    attacked = one_by_one(toy, plain_pgd("linf", LINF))
    with torch.no_grad():
        wanted = teacher.eval()(toy.batch.x)

    def loss(m: nn.Module) -> Tensor:
        logits = m(attacked)
        return 0.6 * cross_entropies(logits, toy.batch.y).mean() + 0.4 * ((logits - wanted) ** 2).mean()

    assert_gradients(toy, loss)


@pytest.mark.parametrize("match", ["logits", "probabilities"])
def test_an_attack_may_lead_away_from_the_teacher(match: str, taught: Path, tmp_path: Path) -> None:
    """Each image by itself, from what the teacher says of it as it is; not from the label."""
    objective = {"kind": "at-distil", "teacher": str(taught), "weight": 1, "match": match, "attack_from": "teacher"}
    toy = Toy(objective, tmp_path)
    distilled(toy).epoch_start(1)
    teacher = toy.fresh()
    teacher.load_state_dict(load_weights(taught / "last.safetensors")[0])
    teacher.eval()
    disturb(toy)

    def apart(logits: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        if match == "logits":
            return ((logits - wanted) ** 2).mean()
        return -(log_probabilities(wanted).exp() * log_probabilities(logits)).sum(1).mean()

    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        current = x
        for _ in range(3):
            at = current.detach().requires_grad_()
            gradient = torch.autograd.grad(apart(model(at), x), at)[0]
            current = (x + bounded_step(current - x, gradient, "linf", LINF)).clamp(0, 1)
        return current

    attacked = one_by_one(toy, attack)
    assert not torch.equal(attacked, one_by_one(toy, plain_pgd("linf", LINF)))
    assert_gradients(toy, lambda m: apart(m(attacked), toy.batch.x))


def test_an_attack_away_from_the_learner_itself_needs_a_random_start(taught: Path, tmp_path: Path) -> None:
    with pytest.raises(GeneralistError, match=r"no gradient at the image itself, where attack\.start none"):
        Toy({**AT, "attack_from": "teacher"}, tmp_path)
    Toy({**TAUGHT, "teacher": str(taught), "attack_from": "teacher"}, tmp_path / "other")
    with pytest.raises(GeneralistError, match=r"learners\.0\.objective\.attack_from"):
        recipe_of({"kind": "nt-distil", "attack_from": "teacher"})


BESIDE: dict[str, Any] = {"kind": "at-distil", "teacher": "#natural", "weight": 1, "match": "logits"}


@pytest.mark.parametrize("objective", [BESIDE, {"kind": "awp", "around": BESIDE}], ids=["alone", "in awp"])
def test_another_learner_teaches_from_epoch_to_epoch(objective: dict[str, Any], tmp_path: Path) -> None:
    """As it is at the start of an epoch, and until the end of that."""
    apart = {"redistribution": {"every": 0}}  # a restart at an epoch's end would change what is expected
    trainer = make_trainer(tiny_recipe([{**ROBUST, "objective": objective}, NATURAL], mixing=apart), tmp_path)
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def look(done: int, total: int) -> None:
        robust, natural = trainer.learners
        inner = getattr(robust.objective, "inner", robust.objective)
        seen.append((copy.deepcopy(inner.teacher.network.state_dict()), copy.deepcopy(natural.flat.state_dict())))

    starts = [copy.deepcopy(trainer.learners[1].flat.state_dict())]
    trainer.listener.iteration = look
    trainer.run()
    every = trainer.steps_per_epoch
    assert every > 1 and len(seen) == every * trainer.job.train.epochs
    starts += [natural for _, natural in seen[every - 1 :: every]]
    for i, (teacher, natural) in enumerate(seen):
        for name, tensor in teacher.items():
            assert torch.equal(tensor, starts[i // every][name])
        assert not torch.equal(teacher["linear.weight"], natural["linear.weight"])


def test_another_learner_s_average_teaches(tmp_path: Path) -> None:
    """As it is at the start of an epoch, and not the weights that it is an average of."""
    taught = {**ROBUST, "objective": {**BESIDE, "teacher": "#natural.average"}}
    natural = {**NATURAL, "averaging": {"decay": 0.5}}
    apart = {"redistribution": {"every": 0}}
    trainer = make_trainer(tiny_recipe([taught, natural], mixing=apart, train={"epochs": 2}), tmp_path)
    ends: list[dict[str, Tensor]] = []

    def look(done: int, total: int) -> None:
        objective = trainer.learners[0].objective
        assert isinstance(objective, Distilled)
        teacher = objective.teacher.network.state_dict()
        if done == trainer.steps_per_epoch:
            average = trainer.learners[1].average
            assert average is not None
            ends.append(copy.deepcopy(trainer.learners[1].flat.state_dict(average.vector, average.counters)))
            ends.append(copy.deepcopy(trainer.learners[1].flat.state_dict()))
        elif done > trainer.steps_per_epoch:
            assert all(torch.equal(tensor, ends[0][name]) for name, tensor in teacher.items())
            assert not torch.equal(teacher["linear.weight"], ends[1]["linear.weight"])

    trainer.listener.iteration = look
    trainer.run()
    assert len(ends) == 2 and trainer.step > trainer.steps_per_epoch


def test_an_average_that_nobody_keeps_is_refused() -> None:
    taught = {**ROBUST, "objective": {**BESIDE, "teacher": "#natural.average"}}
    with pytest.raises(
        GeneralistError, match=r"learners\.1\.averaging: learners\.0\.objective asks for it; add `averag"
    ):
        tiny_recipe([taught, NATURAL])


@pytest.mark.parametrize("name", ["nobody", "linf"])
def test_a_learner_that_is_not_beside_it_is_refused(name: str) -> None:
    with pytest.raises(
        GeneralistError, match=rf"learners\.0\.objective: there is no other learner '{name}' \(others: natural\)"
    ):
        tiny_recipe([{**ROBUST, "objective": {**BESIDE, "teacher": f"#{name}"}}, NATURAL])


def test_an_average_starts_anew_with_new_weights_and_a_run_does_not(taught: Path, tmp_path: Path) -> None:
    for i, teacher in enumerate((None, str(taught))):
        toy = Toy({**TAUGHT, "teacher": teacher}, tmp_path / str(i))
        distilled(toy).epoch_start(1)
        before = copy.deepcopy(distilled(toy).teacher.network.state_dict())
        disturb(toy)
        toy.objective.redistributed(reset=True)
        wanted = before if teacher else toy.model.state_dict()
        after = distilled(toy).teacher.network.state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in after.items())


def test_without_a_teacher_it_is_plain_training(tmp_path: Path) -> None:
    """And smoothed labels stay smoothed."""
    runs = [
        train(recipe_of(objective, label_smoothing=0.1), tmp_path / name)
        for name, objective in (("at", "at"), ("distil", {**AT, "weight": 0}))
    ]
    torch.testing.assert_close(runs[0].global_learner.vector, runs[1].global_learner.vector, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight", [-0.1, 1.5, {"epochs": [0, 2], "values": [0, 2]}])
def test_a_weight_that_is_no_share_is_refused(weight: Any) -> None:
    with pytest.raises(GeneralistError, match=r"learners\.0\.objective.*from 0 to 1"):
        recipe_of({**AT, "weight": weight})


@pytest.mark.parametrize("idle", [{"match": "logits", "temperature": 8}, {"teacher": "a", "decay": 0.5}])
def test_options_that_would_do_nothing_are_refused(idle: dict[str, Any]) -> None:
    with pytest.raises(GeneralistError, match=r"learners\.0\.objective: (temperature|decay): .*leave it out"):
        recipe_of({"kind": "at-distil", **idle})


def test_an_average_of_points_of_a_curve_is_refused() -> None:
    curve = {"kind": "rmc", "ends": ["a", "b"]}
    with pytest.raises(GeneralistError, match="'at-distil' would average points of the curve; give it a teacher"):
        recipe_of({**curve, "around": {"kind": "awp", "around": "at-distil"}})
    recipe_of({**curve, "around": {"kind": "at-distil", "teacher": "a"}})


def test_another_architecture_is_refused(taught: Path, tmp_path: Path) -> None:
    toy = Toy({**TAUGHT, "teacher": str(taught)}, tmp_path)
    toy.model.linear = nn.Linear(7, 3)
    with pytest.raises(GeneralistError, match=r"objective\.teacher: .* another architecture: 'linear\.weight' differs"):
        toy.objective.epoch_start(1)


def test_a_teacher_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    changes = ["learners.0.objective={kind: at-distil, teacher: nowhere}"]
    with pytest.raises(GeneralistError, match="nowhere"):
        api.train("baseline-digits-at", overrides=changes, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("after", [1, 3])
def test_resumes(after: int, tmp_path: Path) -> None:
    """Within an epoch and at its end."""
    assert_resumes(recipe_of(AT), tmp_path, after=after)


@pytest.mark.parametrize("after", [1, 3])
def test_resumes_with_a_learner_beside_it(after: int, tmp_path: Path) -> None:
    assert_resumes(tiny_recipe([{**ROBUST, "objective": BESIDE}, NATURAL]), tmp_path, after=after)


def test_resumes_though_the_teacher_has_gone(taught: Path, tmp_path: Path) -> None:
    lent = tmp_path / "lent"
    shutil.copytree(taught, lent)
    toy = Toy({**TAUGHT, "teacher": str(lent)}, tmp_path / "run")
    distilled(toy).epoch_start(1)
    kept = {name: tensor.clone() for name, tensor in toy.objective.state_dict().items()}
    shutil.rmtree(lent)
    other = Toy({**TAUGHT, "teacher": str(lent)}, tmp_path / "resumed")
    other.objective.load_state_dict(kept)
    other.objective.epoch_start(2)
    assert all(torch.equal(kept[name], tensor) for name, tensor in other.objective.state_dict().items())


def test_capturable_finite_and_in_company(tmp_path: Path) -> None:
    for i, objective in enumerate((AT, {"kind": "awp", "around": AT})):
        toy = Toy(objective, tmp_path / f"a{i}")
        toy.objective.epoch_start(1)
        assert_capturable(toy)
        train_inside_a_generalist(objective, tmp_path / f"b{i}")
    toy = Toy(AT, tmp_path / "far")
    toy.objective.epoch_start(1)
    assert_finite_when_probabilities_underflow(toy)


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["average", "run"])
def test_a_short_training_on_digits_is_robust(teacher: str, tmp_path: Path) -> None:
    if teacher == "run":
        api.train("baseline-digits-at", out=tmp_path / "first", device="cpu")
    source = f", teacher: '{tmp_path / 'first'}'" if teacher == "run" else ""
    recipe = load_recipe("baseline-digits-at", overrides=[f"learners.0.objective={{kind: at-distil{source}}}"])
    api.train(recipe, out=tmp_path / "run", device="cpu")
    found = api.evaluate(tmp_path / "run", attacks=["natural", "pgd-20"], threats=["linf:0.1"], device="cpu")
    assert found["pgd-20/linf:0.1"].value >= 0.6
