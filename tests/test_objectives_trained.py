"""The objectives at work: trained on digits through their shipped recipes, resumed, and inside a Generalist."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from training_helpers import FAST_AT, ROBUST, stopped_and_resumed, tiny_recipe
from training_helpers import train as train_tiny

from generalist import train
from generalist.core.schedule import Schedule
from generalist.recipe import Recipe, load_recipe, stage_recipe

THREAT = "linf:0.1"
OBJECTIVES: dict[str, Any] = {
    "at": "at",
    "at-half": "at-half",
    "trades-1": {"kind": "trades", "beta": 1},
    "trades-6": {"kind": "trades", "beta": 6},
    "mart": "mart",
    "fat": "fat",
    "iat": "iat",
    "rst": "rst",
    "score": {"kind": "score", "form": "trades"},
    "score-at": {"kind": "score", "form": "at"},
    "fast-at": "fast-at",
    "awp": {"kind": "awp", "around": "at"},
    "agr": "agr",
}
"""What each recipe's learner minimises."""

TINY: dict[str, Any] = {**OBJECTIVES, "awp-fat": {"kind": "awp", "around": "fat"}}
"""With a wrapper around what has a schedule of its own."""

NAMES = ("nt", *OBJECTIVES)
CIFAR = [
    (data, model, name) for data in ("cifar10", "cifar100") for model in ("resnet18", "wrn-32-10") for name in NAMES
]


# -- trained on digits ------------------------------------------------------------------------------------------------

Trained = Callable[[str], dict[str, float]]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The last accuracies of a recipe's own learner on held-out digits; each recipe is trained once."""
    known: dict[str, dict[str, float]] = {}

    def accuracies(name: str) -> dict[str, float]:
        if name not in known:
            run = train(f"baseline-digits-{name}", out=tmp_path_factory.mktemp(name) / "run", device="cpu")
            found = run.read_metrics()[-1]["validation"]["accuracy"]
            known[name] = found["natural" if name == "nt" else "linf"]
        return known[name]

    return accuracies


@pytest.mark.parametrize(
    "name", [name if name in ("at", "trades-6") else pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES]
)
def test_a_seconds_long_training_is_robust(trained: Trained, name: str) -> None:
    natural = trained("nt")
    robust = trained(name)
    assert robust[THREAT] >= 0.60
    assert robust[THREAT] >= natural[THREAT] + 0.30
    assert robust["natural"] >= 0.85


def test_natural_training_is_accurate_and_not_robust(trained: Trained) -> None:
    assert trained("nt")["natural"] >= 0.95 and trained("nt")[THREAT] <= 0.30


# -- resumed, and beside another learner ------------------------------------------------------------------------------


def learner(objective: Any) -> dict[str, Any]:
    fields = {**ROBUST, "objective": objective}
    return {key: value for key, value in fields.items() if objective != FAST_AT or key != "attack"}


@pytest.mark.parametrize("name", TINY)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, name: str) -> None:
    """Stopped after epoch 2 of 4: fat's tau and agr's steering change after that."""
    recipe = tiny_recipe([learner(TINY[name])], train={"epochs": 4})
    whole = train_tiny(recipe, tmp_path / "whole")
    resumed = stopped_and_resumed(recipe, tmp_path / "early", epoch=2)
    assert torch.equal(resumed.learners[0].flat.vector, whole.learners[0].flat.vector)


@pytest.mark.parametrize("name", TINY)
def test_mixed_precision(tmp_path: Path, name: str) -> None:
    """bf16 forward passes and attacks; weights stay fp32, and near those of fp32 after an epoch."""
    ends = [
        train_tiny(
            tiny_recipe([learner(TINY[name])], train={"epochs": 1, "precision": precision}), tmp_path / precision
        )
        .learners[0]
        .flat.vector
        for precision in ("fp32", "bf16")
    ]
    assert all(end.dtype == torch.float32 and bool(end.isfinite().all()) for end in ends)
    assert 0 < float((ends[0] - ends[1]).abs().max()) < 0.1


def test_no_two_objectives_do_the_same(tmp_path: Path) -> None:
    ends = {
        name: train_tiny(tiny_recipe([learner(objective)], train={"epochs": 1}), tmp_path / name)
        .learners[0]
        .flat.vector
        for name, objective in TINY.items()
    }
    alike = [(a, b) for a in ends for b in ends if a < b and torch.equal(ends[a], ends[b])]
    assert alike == []


# -- the family of recipes --------------------------------------------------------------------------------------------


def only_learner(recipe: Recipe) -> Any:
    (found,) = recipe.learners
    return found


@pytest.mark.parametrize("name", NAMES)
def test_digits_recipes_differ_in_the_method_alone(name: str) -> None:
    recipe, at = load_recipe(f"baseline-digits-{name}"), load_recipe("baseline-digits-at")
    same = ("data", "model", "train", "validation", "mixing")
    assert [getattr(recipe, part) for part in same] == [getattr(at, part) for part in same]
    assert only_learner(recipe).optimizer == only_learner(at).optimizer
    wanted = "nt" if name == "nt" else OBJECTIVES[name]
    assert only_learner(recipe).objective.kind == (wanted if isinstance(wanted, str) else wanted["kind"])


@pytest.mark.parametrize(("data", "model", "name"), CIFAR)
def test_cifar_recipes_have_the_papers_budget(data: str, model: str, name: str) -> None:
    recipe = load_recipe(f"baseline-{data}-{model}-{name}")
    found, wide = only_learner(recipe), model == "wrn-32-10"
    assert (recipe.data.name, recipe.model.name) == (data, model)
    assert (recipe.train.batch_size, recipe.train.precision) == (128, "bf16")
    assert found.objective.kind == only_learner(load_recipe(f"baseline-digits-{name}")).objective.kind
    if name == "fast-at":
        assert recipe.train.epochs == 15 and (found.optimizer.lr, found.optimizer.weight_decay) == (0.2, 5e-4)
        assert [found.schedule.at(epoch, 15) for epoch in (0, 3, 6, 15)] == [0, 0.5, 1, 0]
        return
    assert recipe.train.epochs == 120
    if name == "nt":
        assert found.threat is None and (found.optimizer.lr, found.optimizer.weight_decay) == (0.1, 5e-4)
        return
    assert str(found.threat) == "linf:8/255" and found.attack.steps == 10
    assert (found.attack.step or found.threat.build().default_step(10)) == pytest.approx(2 / 255)
    assert (found.optimizer.lr, found.optimizer.weight_decay) == ((0.1, 7e-4) if wide else (0.01, 3.5e-3))


def test_constants_of_the_methods() -> None:
    def options(name: str, model: str = "wrn-32-10") -> Any:
        return only_learner(load_recipe(f"baseline-cifar10-{model}-{name}")).objective

    assert (options("trades-1").beta, options("trades-6").beta) == (1, 6)
    assert (options("mart").weight, options("mart", "resnet18").weight) == (6, 5)
    assert options("rst").beta == 0.5 and options("fast-at").alpha == 1.25 and options("fat").noise == 0.001
    assert (options("score").weight, options("score").clip, options("score-at").clip) == (6, 0.3, 0.4)
    assert (options("awp").rho, options("awp").around.kind) == (0.005, "at")
    assert (options("agr").start, options("agr").clip) == (0.75, 0.1)


@pytest.mark.parametrize(("data", "model", "name"), CIFAR)
def test_attacks_start_where_those_of_the_authors_code_do(data: str, model: str, name: str) -> None:
    """In the recipes, and where a learner is given the objective and nothing is said of the attack."""
    small_noise = {"trades-1", "trades-6", "mart", "rst", "score"}
    wanted = "gaussian" if name in small_noise else "uniform"
    found = only_learner(load_recipe(f"baseline-{data}-{model}-{name}"))
    assert found.own_attack().start == wanted
    inside = load_recipe("digits-d").learners[0].model_copy(update={"objective": found.objective})
    assert inside.attack.start is None and inside.own_attack().start == wanted


@pytest.mark.parametrize("model", ["resnet50", "wrn-50-2"])
def test_imagenet_at(model: str) -> None:
    recipe = load_recipe(f"baseline-imagenet-{model}-at")
    found = only_learner(recipe)
    assert str(found.threat) == "linf:4/255" and found.attack.steps == 3
    assert found.attack.step == pytest.approx(2 / 3 * 4 / 255)
    rates = [found.optimizer.lr * found.schedule.at(epoch, recipe.train.epochs) for epoch in (0, 29, 30, 59, 60, 89)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_imagenet_fast_at_grows_its_images_in_stages() -> None:
    whole = load_recipe("baseline-imagenet-resnet50-fast-at")
    stages = [stage_recipe(whole, stage, trust_code=False) for stage in whole.stages]
    assert [stage.data.resolution for stage in stages] == [128, 224, 288]
    assert [stage.train.epochs for stage in stages] == [6, 6, 3]
    assert [stage.start for stage in whole.stages] == ["fresh", "small", "medium"]
    ends = [(rate(stage, 0), rate(stage, stage.train.epochs)) for stage in stages]
    assert [*ends[0], *ends[1], *ends[2]] == pytest.approx([0, 0.04, 0.04, 0.004, 0.004, 0.0004])
    assert rate(stages[0], 1) == pytest.approx(0.4)
    for stage in stages:
        found = only_learner(stage)
        assert found.threat.eps * found.objective.alpha == pytest.approx(5 / 255)


def rate(recipe: Recipe, epoch: float) -> float:
    schedule: Schedule = only_learner(recipe).schedule
    return recipe.learning_rate(only_learner(recipe)) * schedule.at(epoch, recipe.train.epochs)


def test_fast_at_runs_through_its_stages(tmp_path: Path) -> None:
    """The ImageNet recipe with its numbers made small: three stages, each at its own size, each from the one before."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 1)):
        for label in range(2):
            folder = tmp_path / "images" / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 128, (40, 44, 3), dtype=np.uint8) + np.uint8(120 * label)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    raw = load_recipe("baseline-imagenet-resnet50-fast-at").model_dump(mode="json")
    raw["data"] |= {"root": str(tmp_path / "images"), "workers": 1}
    raw["model"] |= {"name": "small", "width": 4}
    raw["validation"] |= {"images": 2, "steps": 1}
    raw["train"] |= {"precision": "fp32"}
    for stage, side in zip(raw["stages"], (16, 24, 32), strict=True):
        stage["change"]["data"]["resolution"] = side
        stage["change"]["train"] = {"epochs": 1, "batch_size": 3}
    run = train(raw, out=tmp_path / "run", device="cpu")
    records = [each.read_metrics()[-1] for each in (run.stage("small"), run.stage("medium"), run)]
    assert all(math.isfinite(record["train"]["linf"]["loss"]) for record in records)
    sides = [load_recipe(each.recipe).data.resolution for each in (run.stage("small"), run.stage("medium"))]
    assert sides == [16, 24]
