"""What holds for every objective that is registered, those to come included: inside D and T, and within awp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from objectives_toy import make_toy
from training_helpers import (
    FAST_AT,
    L2,
    NATURAL,
    ROBUST,
    make_trainer,
    stop_after,
    stopped_and_resumed,
    tiny_recipe,
    train,
)

import generalist.objectives as objectives
from generalist.core.errors import RecipeError
from generalist.objectives.base import OBJECTIVES, class_of
from generalist.training.learner_options import LearnerOptions

PACKAGE = objectives.__name__ + "."
KINDS = sorted(kind for kind in OBJECTIVES if OBJECTIVES.get(kind).__module__.startswith(PACKAGE))


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two runs for a curve to go between."""
    found = []
    for i, learner in enumerate(({**ROBUST, "name": "one"}, {**L2, "name": "one"})):
        run = train(tiny_recipe([learner]), tmp_path_factory.mktemp(f"end{i}"))
        run.directory.recipe.write_text("{}")
        found.append(str(run.directory.path))
    return found


def learner(kind: str, ends: list[str], *, wrapped: bool = False) -> dict[str, Any]:
    objective: dict[str, Any] = {"kind": kind}
    if kind == "rmc":
        objective |= {"ends": ends, "points": 2, "statistics": 6}
    if kind == "hat":
        objective |= {"teacher": ends[0]}
    without = ("attack",) if kind == FAST_AT else () if OBJECTIVES.get(kind).adversarial else ("threat", "attack")
    fields = {key: value for key, value in ROBUST.items() if key not in without}
    return {**fields, "objective": {"kind": "awp", "around": objective, "rho": 0.1} if wrapped else objective}


def test_all_of_them_are_here() -> None:
    assert {"nt", "at", "at-half", "trades", "mart", "fat", "iat", "rst", "score", "agr", "part", "awp"} <= set(KINDS)
    assert {"at-linf-l2", "at-max", "msd", "e-at", "rmc", "ramp", "fast-at", "hat"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_d_it_learns_what_it_would_learn_alone(tmp_path: Path, ends: list[str], kind: str) -> None:
    short = {"train": {"epochs": 2}, "mixing": {"redistribution": {"every": 0}}}
    own = learner(kind, ends)
    together = train(tiny_recipe([own, NATURAL], **short), tmp_path / "together")
    alone = train(tiny_recipe([own], **short), tmp_path / "alone")
    assert torch.equal(together.learners[0].flat.vector, alone.learners[0].flat.vector)
    assert not torch.equal(together.global_learner.vector, alone.global_learner.vector)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_t_it_goes_on_from_the_global_learner(tmp_path: Path, ends: list[str], kind: str) -> None:
    """Three epochs, redistributed after the first two: all learners set out from one network."""
    often = {"decay": 0.5, "gamma": 0.5, "redistribution": {"every": 1, "start_epoch": 1}}
    recipe = tiny_recipe([learner(kind, ends), NATURAL, L2], train={"epochs": 3}, mixing=often)
    stop_after(recipe, tmp_path, epoch=2)
    trainer = make_trainer(recipe, tmp_path)
    assert trainer.resume()
    mixed = trainer.global_learner.vector.clone()
    assert all(torch.equal(each.flat.vector, mixed) for each in trainer.learners)
    trainer.run()
    moved = [(each.flat.vector - mixed).abs().max() for each in trainer.learners]
    assert min(moved) > 1e-4 and bool(trainer.global_learner.vector.isfinite().all())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "awp"])
def test_awp_goes_around_it_and_resumes(tmp_path: Path, ends: list[str], kind: str) -> None:
    short = {"train": {"epochs": 2}, "mixing": {"redistribution": {"every": 0}}}
    recipe = tiny_recipe([learner(kind, ends, wrapped=True)], **short)
    whole = train(recipe, tmp_path / "whole")
    plain = train(tiny_recipe([learner(kind, ends)], **short), tmp_path / "plain")
    assert (whole.learners[0].flat.vector - plain.learners[0].flat.vector).abs().max() > 1e-6
    resumed = stopped_and_resumed(recipe, tmp_path / "early", epoch=1)
    assert torch.equal(resumed.learners[0].flat.vector, whole.learners[0].flat.vector)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("awp", "hat", "rmc")])  # they wrap others
def test_attacks_each_is_true_of_those_that_hand_out_attacked_images(
    tmp_path: Path, ends: list[str], kind: str
) -> None:
    options = learner(kind, ends)
    without = {} if "threat" in options else {"threat": None, "attack": None}
    toy = make_toy(options["objective"], tmp_path, scalars={"tau": 0.0}, **without)
    toy.objective.epoch_start(1)
    progress = replace(toy.progress, variant=toy.objective.variants[0])
    made = toy.objective.prepare(toy.batch, progress).made
    images = made.get("adversarial", toy.batch.x)  # iat has some of that name, mixed with others
    moved = (images - toy.batch.x).flatten(1).norm(dim=1)
    assert toy.objective.attacks_each == (0 < float(moved.max()) <= 128 / 255)


def test_nothing_goes_around_itself() -> None:
    for inside in ("awp", {"kind": "rmc", "ends": ["a", "b"], "around": {"kind": "awp", "around": "at"}}):
        with pytest.raises(RecipeError, match="'awp' is around itself; once is enough"):
            tiny_recipe([{**ROBUST, "objective": {"kind": "awp", "around": inside}}])


@pytest.mark.parametrize(
    ("objective", "start"),
    [
        ("at", "uniform"),
        ("trades", "gaussian"),
        ("mart", "gaussian"),
        ("rst", "gaussian"),
        ("score", "gaussian"),
        ({"kind": "score", "form": "at"}, "uniform"),
        ("msd", "none"),
        ({"kind": "awp", "around": "trades"}, "gaussian"),
        ({"kind": "rmc", "ends": ["a", "b"]}, "none"),
    ],
)
def test_attacks_start_where_the_authors_do_unless_the_recipe_says_otherwise(objective: Any, start: str) -> None:
    learner = LearnerOptions.model_validate({**ROBUST, "objective": objective})
    assert learner.attack.start is None and learner.own_attack().start == start
    said = LearnerOptions.model_validate({**ROBUST, "attack": {"start": "uniform"}, "objective": objective})
    assert said.own_attack().start == "uniform"


def test_what_chooses_among_networks_is_not_redistributed_alone() -> None:
    rmc = {**ROBUST, "objective": {"kind": "awp", "around": {"kind": "rmc", "ends": ["a", "b"]}}}
    often = {"redistribution": {"every": 1}}
    assert class_of(tiny_recipe([rmc]).learners[0].objective).__name__ == "AdversarialWeightPerturbation"
    tiny_recipe([rmc, NATURAL], mixing=often)
    with pytest.raises(RecipeError, match=r"redistribution\.every: 'awp' alone would restart from the one network"):
        tiny_recipe([rmc], mixing=often)
