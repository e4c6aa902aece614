"""Training on several processes: the same mathematics at every world size and layout, and one checkpoint for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_helpers import assert_same, result, run_on, with_parallel
from training_helpers import L2, NATURAL, ROBUST, make_trainer, stop_after, tiny_recipe, train

from generalist.core.errors import RecipeError
from generalist.recipe import Recipe, load_recipe, to_yaml
from generalist.training.artefacts import branch_files
from generalist.training.parallel_options import ParallelOptions, assign, mesh_shape

SHORT = {"epochs": 2, "checkpoint_epochs": 1}
REDISTRIBUTED = {"gamma": {"fractions": [0, 1], "values": [0.6, 0.3]}, "redistribution": {"every": 1, "start_epoch": 1}}
UNEVEN = {**SHORT, "batch_size": 7, "last_batch": "keep"}


def objectives() -> Recipe:
    """Objectives that do more than add up gradients over samples, or keep what they have seen."""
    awp = {**ROBUST, "name": "awp", "objective": {"kind": "awp", "around": "trades"}}
    agr = {**L2, "name": "agr", "objective": {"kind": "agr", "start": 0.0}, "averaging": {"decay": 0.9}}
    norms = {"kind": "e-at", "beside": [{"norm": "l2", "eps": 0.2}]}
    extreme = {**ROBUST, "name": "e-at", "objective": norms, "optimizer": {"lr": 0.01, "kind": "adam"}}
    masks = {"kind": "part", "rest": 0.05, "warmup": 0}
    part = {**ROBUST, "name": "part", "objective": masks, "cutout": 2, "label_smoothing": 0.1}
    return tiny_recipe([awp, agr, extreme, part], train=UNEVEN, mixing={**REDISTRIBUTED, "parts": True})


def published() -> Recipe:
    """Averages, truncated counts, and redistribution after every iteration."""
    return tiny_recipe(
        style="published-code",
        mixing={"redistribution": {"every": 1, "start_epoch": 2}},
        train={**SHORT, "batch_size": 8},
        validation={"every": 1, "images": 9},
    )


def train_mode() -> Recipe:
    """Attacks that see the statistics of the batch, in parts of different sizes."""
    attack = {"steps": 2, "batchnorm": "train"}
    return tiny_recipe([{**ROBUST, "attack": attack}, {**L2, "attack": attack}], train=UNEVEN, mixing=REDISTRIBUTED)


def taught() -> Recipe:
    """A learner that is taught by another's average, which nothing else brings to its process at an epoch's end."""
    robust = {**ROBUST, "objective": {"kind": "at-distil", "teacher": "#natural.average", "match": "logits"}}
    apart = {"epochs": 3, "checkpoint_epochs": 9, "batch_size": 8}
    natural = {**NATURAL, "averaging": {"decay": 0.5}}
    return tiny_recipe([robust, natural], train=apart, mixing={"redistribution": {"every": 0}}, validation={"every": 9})


RECIPES = {"objectives": objectives, "published": published, "train-mode": train_mode, "taught": taught}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"layout": "data"}, {"layout": "learners"}],
    4: [{"layout": "data"}, {"layout": "both"}],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every recipe, on one process."""
    out = tmp_path_factory.mktemp("alone")
    for name, recipe in RECIPES.items():
        train(recipe(), out / name)
    return out


def cases_for(world: int) -> dict[str, Recipe]:
    return {
        f"{name}-{options['layout']}": with_parallel(recipe(), **options)
        for name, recipe in RECIPES.items()
        for options in LAYOUTS[world]
    }


def test_two_processes_compute_what_one_computes(alone: Path, tmp_path: Path) -> None:
    """In both layouts; and a checkpoint of one world goes on in another."""
    cases = cases_for(2)
    stopped = {"down": with_parallel(objectives(), layout="learners")}  # to be gone on with by one process
    stop_after(objectives(), tmp_path / "up", epoch=1)  # to be gone on with by two that divide batches
    up = {"up": with_parallel(objectives(), layout="data")}
    local = {"local": with_parallel(train_mode(), layout="data", sync_batchnorm=False)}
    run_on(2, {**cases, **stopped, **up, **local}, tmp_path, stop=["down"])
    for case in cases:
        assert_same(tmp_path / case, alone / case.rpartition("-")[0])
    trainer = make_trainer(objectives(), tmp_path / "down")
    assert trainer.resume() and trainer.step == 3
    trainer.run()
    assert_same(tmp_path / "down", alone / "objectives")
    assert_same(tmp_path / "up", alone / "objectives")
    _check_local_statistics(tmp_path / "local", alone / "train-mode")


@pytest.mark.slow
def test_recorded_iterations_of_two_processes(tmp_path: Path) -> None:
    """With what ranks send while they record and replay; the recording itself is replaced."""
    cases = {}
    for counters in ("copy", "truncate"):
        decay = {"fractions": [0, 1], "values": [0.9, 0.3]}
        mixing = {**REDISTRIBUTED, "counters": counters, "decay": decay, "parts": True}
        recipe = tiny_recipe([ROBUST, L2], train=SHORT, mixing=mixing)
        train(recipe, tmp_path / counters)
        recorded = recipe.model_copy(update={"train": recipe.train.model_copy(update={"engine": "graph"})})
        cases |= {f"{counters}-{layout}": with_parallel(recorded, layout=layout) for layout in ("data", "learners")}
    run_on(2, cases, tmp_path)
    for case in cases:
        assert_same(tmp_path / case, tmp_path / case.partition("-")[0])


def _check_local_statistics(path: Path, whole: Path) -> None:
    """Each rank normalises by its own part: near to, but not what one process computes; counts alike."""
    (tensors, records), (expected, wanted) = result(path), result(whole)
    losses, wanted_losses = ([record["task_loss"]["robust"] for record in each] for each in (records, wanted))
    assert losses != wanted_losses and losses == pytest.approx(wanted_losses, rel=0.3)
    assert torch.equal(tensors["live.learner.robust.counters"], expected["live.learner.robust.counters"])


@pytest.mark.slow
def test_two_processes_start_from_other_weights_as_one_does(tmp_path: Path) -> None:
    """Learners with differing weights, and a global learner that is not their mean."""
    train(train_mode(), tmp_path / "start")
    (tmp_path / "start" / "recipe.yaml").write_text(to_yaml(train_mode()))
    trainer = make_trainer(train_mode(), tmp_path / "alone")
    trainer.start_from(branch_files(str(tmp_path / "start"), ["robust", "l2"]))
    trainer.run()
    run_on(2, {"learners": with_parallel(train_mode(), layout="learners")}, tmp_path)
    assert_same(tmp_path / "learners", tmp_path / "alone")


@pytest.mark.slow
def test_four_processes_compute_what_one_computes(alone: Path, tmp_path: Path) -> None:
    """Batches of 7 and 4 in four parts, and two groups of two ranks; and a checkpoint by learners goes on in both."""
    run_on(2, {"across": with_parallel(objectives(), layout="learners")}, tmp_path, stop=["across"])
    cases = cases_for(4)
    run_on(4, {**cases, "across": with_parallel(objectives(), layout="both")}, tmp_path)
    for case in cases:
        assert_same(tmp_path / case, alone / case.rpartition("-")[0])
    assert_same(tmp_path / "across", alone / "objectives")


# -- who does what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "costs", "world", "shape"),
    [
        ({}, [11, 11], 1, (1, 1)),
        ({}, [11, 11], 2, (2, 1)),  # nothing travels
        ({}, [11, 1], 2, (1, 2)),  # the natural learner's rank would wait most of the time
        ({}, [11, 11], 8, (2, 4)),
        ({}, [11], 4, (1, 4)),
        ({}, [11, 11, 1], 3, (1, 3)),
        ({"layout": "data"}, [11, 11], 4, (1, 4)),
        ({"layout": "learners"}, [11, 1, 11], 2, (2, 1)),
        ({"layout": "both"}, [11, 11, 1], 6, (3, 2)),
        ({"mesh": [2, 3]}, [11, 11, 1], 6, (2, 3)),
        ({"mesh": [2, 3]}, [11, 11, 1], 1, (1, 1)),  # a run of several processes goes on in one
    ],
)
def test_the_mesh(options: dict[str, Any], costs: list[float], world: int, shape: tuple[int, int]) -> None:
    assert mesh_shape(ParallelOptions.model_validate(options), costs, world) == shape


@pytest.mark.parametrize(
    ("options", "world", "words"),
    [
        ({"layout": "learners"}, 4, "2 learners cannot occupy 4 ranks"),
        ({"layout": "both"}, 3, "3 ranks do not make equal groups"),
        ({"mesh": [2, 2]}, 2, "2 x 2 does not fit 2 processes"),
        ({"mesh": [0, 2]}, 2, "0 x 2 does not fit 2 processes"),
        ({"mesh": [3, 1]}, 3, "3 groups are more than there are learners"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(options: dict[str, Any], world: int, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        mesh_shape(ParallelOptions.model_validate(options), [11, 1], world)


@pytest.mark.parametrize("seconds", ["0", "1e-3", "1e7", "1e300", "inf"])
def test_a_timeout_that_no_clock_can_count_is_refused(seconds: str) -> None:
    """PyTorch counts milliseconds in 32 bits; beyond, ranks would not wait at all."""
    with pytest.raises(RecipeError, match=r"train\.parallel\.timeout"):
        load_recipe("digits-d", overrides=[f"train.parallel.timeout={seconds}"])


def test_dear_learners_lie_apart() -> None:
    owners = assign([11, 1, 11], 2)
    assert owners[0] != owners[2]
    assert assign([11, 1, 11], 1) == [0, 0, 0]
    assert sorted(assign([5, 4, 3], 3)) == [0, 1, 2]
