"""A short run is a whole one in small: what a recipe times follows `train.epochs`, for every method of the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from several_norms_helpers import recipe_of
from training_helpers import make_trainer

from generalist.core.errors import RecipeError
from generalist.core.run import RunDirectory
from generalist.core.schedule import Schedule
from generalist.objectives.base import build_objective
from generalist.objectives.part import PixelReweighted
from generalist.recipe import Recipe, load_recipe, stage_recipe
from generalist.shipped import shipped_names
from generalist.stage_plans import plan_runs
from generalist.training.learner_options import LearnerOptions

FAMILY = "cifar10-resnet18"
BEST = [f"{FAMILY}-d", f"{FAMILY}-d-linf-l2", f"{FAMILY}-t"]
GENERALISTS = [f"{name}-plain" for name in BEST]
NAMES = [name for name in shipped_names() if name.startswith(f"baseline-{FAMILY}-")] + GENERALISTS + BEST


def runs(name: str, epochs: int | None) -> list[Recipe]:
    """The recipes of all stages, at so many epochs or at the recipe's own."""
    recipe = load_recipe(name, overrides=[f"train.epochs={epochs}"] if epochs else [])
    plans = plan_runs(recipe, RunDirectory(Path("run")), start=None, trust_code=False)
    return [plan.recipe for plan in plans]


def timed(recipe: Recipe) -> Iterator[Schedule]:
    """Everything of a recipe that changes during training."""
    yield recipe.mixing.gamma
    for learner in recipe.learners:
        yield learner.schedule
        if learner.attack.scale is not None:
            yield learner.attack.scale
        yield from schedules_of(learner)


def schedules_of(learner: LearnerOptions) -> list[Schedule]:
    inner: Any = getattr(learner.objective, "around", None)
    options = [learner.objective, *([inner] if inner is not None else [])]
    return [schedule for each in options for schedule in build_objective(each).schedules().values()]


def test_the_family_is_whole() -> None:
    assert len(NAMES) == 21 + 3 + 3


@pytest.mark.parametrize("epochs", [15, 30])
@pytest.mark.parametrize("name", NAMES)
def test_what_changes_in_training_keeps_its_place(name: str, epochs: int) -> None:
    for whole, short in zip(runs(name, None), runs(name, epochs), strict=True):
        own, few = whole.train.epochs, short.train.epochs
        for before, after in zip(timed(whole), timed(short), strict=True):
            assert before.epochs is None, "breakpoints in epochs would stay where they are"
            for place in (0, 0.2, 0.4, 0.45, 0.6, 0.8, 0.99, 1):
                assert after.at(place * few, few) == pytest.approx(before.at(place * own, own), abs=1e-9)
        assert short.mixing.redistribution.start_epoch is None and short.train.start_epoch == 0
        assert short.model_copy(update={"train": whole.train}) == whole, "nothing but the epochs differs"


@pytest.mark.parametrize(("epochs", "expected"), [(None, [120, 120, 60]), (30, [30, 30, 15]), (15, [15, 15, 8])])
def test_the_ends_and_the_curve_of_rmc_shrink_together(epochs: int | None, expected: list[int]) -> None:
    assert [run.train.epochs for run in runs(f"baseline-{FAMILY}-rmc", epochs)] == expected


@pytest.mark.parametrize(("epochs", "expected"), [(120, 20), (30, 5), (15, 3), (1, 0)])
def test_part_s_warm_up_is_a_share_of_training(tmp_path: Path, epochs: int, expected: int) -> None:
    objective = load_recipe(f"baseline-{FAMILY}-part").learners[0].objective.model_dump()
    trainer = make_trainer(recipe_of(objective, epochs=epochs), tmp_path)
    part = trainer.learners[0].objective
    assert isinstance(part, PixelReweighted) and part.warmup == expected
    part.epoch_start(expected)
    assert bool(part.masks.all()), "no map yet"
    part.epoch_start(expected + 1)
    assert not bool(part.masks.all())


PLAIN = {120: range(75, 120, 5), 60: range(39, 60, 3), 15: range(9, 15)}
TUNED = {155: range(120, 155, 5), 62: range(48, 62, 3), 15: range(12, 15)}


@pytest.mark.parametrize(
    ("name", "epochs", "expected"),
    [(name, *each) for names, due in ((GENERALISTS, PLAIN), (BEST, TUNED)) for name in names for each in due.items()],
)
def test_short_generalists_still_redistribute(name: str, epochs: int, expected: range) -> None:
    (recipe,) = runs(name, epochs)
    redistribution = recipe.mixing.redistribution
    assert [epoch for epoch in range(1, epochs + 1) if redistribution.due(epoch, epochs)] == list(expected)


def test_a_stage_s_length_is_rounded_and_never_nothing() -> None:
    def lengths(epochs: int, *lengths: float | str) -> list[int]:
        stages = [{"name": f"s{i}", "length": length} for i, length in enumerate(lengths)]
        recipe = load_recipe({**load_recipe("digits-d").model_dump(mode="json"), "stages": stages})
        recipe = load_recipe(recipe, overrides=[f"train.epochs={epochs}"])
        return [stage_recipe(recipe, stage, trust_code=False).train.epochs for stage in recipe.stages]

    assert lengths(10, 1, "1/4", 0.001, 3) == [10, 3, 1, 30]
    with pytest.raises(RecipeError, match=r"stages\.s0\.change\.train\.epochs"):
        lengths(1_000_000, 1000)


def test_a_stage_has_one_length() -> None:
    stage = {"name": "a", "length": 2, "change": {"train": {"epochs": 3}}}
    with pytest.raises(RecipeError, match=r"a: both `length` and `change\.train\.epochs`"):
        load_recipe("digits-d", overrides=[f"stages=[{stage!r}]"])
    odd = {"name": "a", "length": 2, "change": {"train": 5}}
    recipe = load_recipe("digits-d", overrides=[f"stages=[{odd!r}]"])
    with pytest.raises(RecipeError, match=r"stages\.a\.change\.train"):
        stage_recipe(recipe, recipe.stages[0], trust_code=False)
