"""The dial: mixtures against training's own, end points, statistics, grids, fronts, suggestions, refusals."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import run_main
from training_helpers import L2, NATURAL, ROBUST, make_trainer, tiny_images, tiny_recipe

import generalist
from generalist import dial
from generalist.attacks.threats import Shrunk
from generalist.core.errors import DataError, GeneralistError, RunError
from generalist.core.files import write_text
from generalist.core.run import RunDirectory
from generalist.dial.curves import Measured, Point, Wish, grid, pareto, suggest
from generalist.dial.learners import Learners, gammas_of
from generalist.dial.turning import portions
from generalist.evaluation import Accuracy
from generalist.recipe import Recipe, to_yaml
from generalist.training.artefacts import load_weights, save_weights
from generalist.training.global_learner import mix as mix_vectors
from generalist.training.loop import Trainer

ROOT = Path(__file__).parents[1]
SHORT = [
    "train.epochs=16",
    "model.width=8",
    "learners.0.attack.steps=3",
    "validation.steps=5",
    "validation.every=16",
    "mixing.redistribution.every=1",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A short digits-d run: learners linf and natural, snapshots of epochs 10 (never redistributed so far) and 16."""
    return generalist.train("digits-d", overrides=SHORT, out=tmp_path_factory.mktemp("dial") / "run", device="cpu")


@pytest.fixture
def spare(run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy that a test may damage."""
    shutil.copytree(run.path, tmp_path / "spare")
    return RunDirectory(tmp_path / "spare")


SOURCES: tuple[dial.Source, ...] = ("raw", "averaged")


def tiny_run(path: Path, recipe: Recipe) -> tuple[RunDirectory, Trainer]:
    """A run in float64 with its learners still at hand."""
    trainer = make_trainer(recipe, path)
    trainer.run()
    write_text(RunDirectory(path).recipe, to_yaml(recipe))
    return RunDirectory(path), trainer


TINY_DATA: dict[str, Any] = {"train": tiny_images(24), "test": tiny_images(9, salt=1, name="test")}


def learner_state(run: RunDirectory, name: str, epoch: int) -> dict[str, torch.Tensor]:
    return load_weights(run.snapshots / str(epoch) / f"{name}.safetensors")[0]


# -- mixing -----------------------------------------------------------------------------------------------------------


def test_the_runs_own_last_gamma_gives_the_mixture_without_averaging(run: RunDirectory) -> None:
    gamma = run.read_metrics()[-1]["gamma"]
    assert set(gamma) == {"linf", "natural"} and 0.5 < gamma["linf"] < 0.7
    mixture = dial.mix(run, gamma, statistics="mixed", device="cpu")
    states = {name: learner_state(run, name, 16) for name in gamma}
    compared = 0
    for name, tensor in mixture.state.items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, states["linf"][name])
            continue
        expected = sum(share * states[learner][name].numpy().astype(np.float64) for learner, share in gamma.items())
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-6)
        assert not np.allclose(tensor.numpy(), states["linf"][name].numpy(), rtol=1e-5, atol=1e-6)
        compared += 1
    assert compared > 5


@pytest.mark.parametrize("source", ["raw", "averaged"])
def test_mixing_is_trainings_own(source: str, tmp_path: Path) -> None:
    averaging = {"averaging": {"decay": 0.5, "warmup": False}} if source == "averaged" else {}
    recipe = tiny_recipe([{**ROBUST, **averaging}, {**NATURAL, **averaging}], mixing={"source": source})
    run, trainer = tiny_run(tmp_path / "run", recipe)
    gammas = trainer.engine.gammas.tolist()
    assert gammas == pytest.approx(list(run.read_metrics()[-1]["gamma"].values()))
    expected = mix_vectors([learner.source(source)[0] for learner in trainer.learners], gammas)
    learners = dial.learners_of(run)
    state = dial.mixed_state(learners.states, gammas, lead=learners.lead)
    vector, counters = trainer.learners[0].flat.read(state)
    torch.testing.assert_close(vector, expected, rtol=1e-15, atol=1e-17)
    assert torch.equal(counters, trainer.learners[0].source(source)[1])
    # The global learner itself is an average over time: mixing must not be mistaken for it.
    assert not torch.allclose(vector, trainer.global_learner.vector, rtol=1e-6, atol=1e-8)
    raw = mix_vectors([learner.flat.vector for learner in trainer.learners], gammas)
    assert torch.allclose(vector, raw, rtol=1e-12, atol=1e-14) == (source == "raw")


def test_averages_can_be_mixed_though_training_mixed_raw_weights(tmp_path: Path) -> None:
    averaging = {"averaging": {"decay": 0.5, "warmup": False}}
    run, trainer = tiny_run(tmp_path / "run", tiny_recipe([{**ROBUST, **averaging}, {**NATURAL, **averaging}]))
    for source in SOURCES:
        learners = dial.learners_of(run, source=source)
        file = dial.mixture_file(learners, dict.fromkeys(learners.names, 0.5))
        assert file.name == {"raw": "gamma-0.50.safetensors", "averaged": "gamma-0.50-averaged.safetensors"}[source]
        for state, learner in zip(learners.states, trainer.learners, strict=True):
            assert torch.equal(learner.flat.read(state)[0], learner.source(source)[0])
        mixture = dial.Dial(learners, device="cpu").turn([0.5, 0.5], statistics="mixed")
        assert mixture.about["mix"]["source"] == source


def test_averages_that_no_learner_kept_are_refused(run: RunDirectory) -> None:
    with pytest.raises(RunError, match="kept no average of linf, natural: train with `averaging` in every learner"):
        dial.mix(run, 0.5, source="averaged")
    with pytest.raises(GeneralistError, match="source is raw, averaged or parts, not 'both'"):
        dial.mix(run, 0.5, source="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(("gamma", "name"), [(1.0, "linf"), (0.0, "natural"), (1 - 1e-12, "linf")])
def test_end_points_are_the_learners(run: RunDirectory, gamma: float, name: str) -> None:
    mixture = dial.mix(run, gamma, device="cpu")
    own = learner_state(run, name, 16)
    assert mixture.statistics == "mixed" and mixture.measured == {}
    assert mixture.state.keys() == own.keys()
    assert all(torch.equal(tensor, own[key]) for key, tensor in mixture.state.items())
    x = torch.linspace(0, 1, 5 * 64).reshape(5, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(mixture.model(x), generalist.load(run, which=name)(x))


def test_a_half_precision_snapshot_is_mixed_in_single_precision(spare: RunDirectory) -> None:
    for name in ("linf", "natural"):
        path = spare.snapshots / "16" / f"{name}.safetensors"
        save_weights(path, *load_weights(path), half=True)
    mixture = dial.mix(spare, 0.5, statistics="mixed", device="cpu")
    assert {tensor.dtype for tensor in mixture.state.values()} == {torch.float32, torch.int64}


def test_an_earlier_snapshot(run: RunDirectory) -> None:
    state = dial.mix(run, 1.0, epoch=10, device="cpu").state
    own = learner_state(run, "linf", 10)
    assert all(torch.equal(tensor, own[name]) for name, tensor in state.items())
    later = learner_state(run, "linf", 16)
    assert not any(torch.equal(tensor, later[name]) for name, tensor in state.items() if tensor.dim() > 1)


# -- shares -----------------------------------------------------------------------------------------------------------


def learners_like(recipe: Recipe) -> Learners:
    return Learners(RunDirectory(Path("run")), recipe, recipe.train.epochs, True, "raw", [], {}, {})


T_LIKE = [{**NATURAL, "name": "nat"}, L2, {**ROBUST, "name": "linf"}]
"""Not in the dial's order: the lead is the last."""


def test_the_dials_order_is_lead_then_threats_then_natural() -> None:
    assert learners_like(tiny_recipe(T_LIKE)).order == ["linf", "l2", "nat"]
    assert learners_like(tiny_recipe([NATURAL, ROBUST])).order == ["robust", "natural"]
    led = tiny_recipe([{**ROBUST, "name": "linf"}, {**L2, "optimizer": {"lr": 0.1}}], mixing={"lead": "l2"})
    assert learners_like(led).order == ["l2", "linf"]
    assert learners_like(generalist.recipe.load_recipe("digits-t")).order == ["linf", "l2", "natural"]


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        ([0.5, 0.2], [0.3, 0.2, 0.5]),
        ((0.7, 0.3), [0.0, 0.3, 0.7]),
        ({"linf": 0.25, "nat": 0.75}, [0.75, 0.0, 0.25]),
        (0.6, [0.1, 0.3, 0.6]),
        ([1], [0.0, 0.0, 1.0]),
    ],
)
def test_shares_of_three_learners(gamma: Any, expected: list[float]) -> None:
    recipe = tiny_recipe(T_LIKE, mixing={"shares": {"nat": 0.25, "l2": 0.75}})
    assert gammas_of(learners_like(recipe), gamma) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("gamma", "message"),
    [
        (1.2, r"share of robust would be 1\.2"),
        (-0.1, r"share of robust would be -0\.1"),
        (math.nan, "nan is not a share"),
        (True, "True is not a share"),
        ("0.8", "'0.8' is not a share"),
        ([0.5, 0.5], "2 shares for 2 learners; give 1, those of robust: natural gets the rest"),
        ([], "0 shares for 2 learners"),
        ({"robust": 0.5, "natural": 0.4}, "add up to 0.9; make it 1"),
        ({"robust": 0.5, "linf": 0.5}, "no learner 'linf'; the learners are robust, natural"),
    ],
)
def test_shares_outside_the_simplex_are_refused(gamma: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        gammas_of(learners_like(tiny_recipe()), gamma)


def test_two_shares_beyond_one_are_refused() -> None:
    with pytest.raises(RunError, match=r"share of nat would be -0\.2"):
        gammas_of(learners_like(tiny_recipe(T_LIKE)), [0.8, 0.4])


def test_one_share_is_not_enough_where_every_learner_has_a_schedule() -> None:
    recipe = tiny_recipe(T_LIKE, mixing={"gammas": {"nat": 0.2, "l2": 0.3, "linf": 0.5}})
    with pytest.raises(RunError, match="give 2, those of linf, l2: nat gets the rest"):
        gammas_of(learners_like(recipe), 0.5)


@pytest.mark.parametrize(
    ("count", "shares", "expected"),
    [
        (10, [0.8, 0.2], [8, 2]),
        (64, [0.8, 0.2], [51, 13]),
        (7, [1 / 3] * 3, [3, 2, 2]),
        (5, [1.0], [5]),
        (1, [0.4, 0.6], [0, 1]),
    ],
)
def test_portions(count: int, shares: list[float], expected: list[int]) -> None:
    assert portions(count, shares) == expected


# -- statistics -------------------------------------------------------------------------------------------------------


def test_reestimation_changes_statistics_alone(run: RunDirectory) -> None:
    mixed = dial.mix(run, 0.5, epoch=10, statistics="mixed", device="cpu")
    fresh = dial.mix(run, 0.5, epoch=10, statistics="reestimated", device="cpu")
    changed = {name for name, tensor in mixed.state.items() if not torch.equal(tensor, fresh.state[name])}
    assert changed and all(re.search(r"running_(mean|var)|num_batches", name) for name in changed)
    assert (mixed.statistics, fresh.statistics) == ("mixed", "reestimated")
    again = dial.mix(run, 0.5, epoch=10, statistics="reestimated", device="cpu")
    assert all(torch.equal(tensor, again.state[name]) for name, tensor in fresh.state.items())


def test_best_is_what_validates_better(run: RunDirectory) -> None:
    """Learners that were never redistributed are far apart, and mixed statistics fit the mixture badly."""
    best = dial.mix(run, 0.5, epoch=10, device="cpu")
    scores = {kind: accuracy["natural"].value + accuracy["linf:0.18"].value for kind, accuracy in best.measured.items()}
    assert scores.keys() == {"mixed", "reestimated"}
    assert best.statistics == max(scores, key=lambda kind: scores[kind]) == "reestimated"
    assert scores["reestimated"] > scores["mixed"]
    fresh = dial.mix(run, 0.5, epoch=10, statistics="reestimated", device="cpu")
    assert all(torch.equal(tensor, fresh.state[name]) for name, tensor in best.state.items())


def test_a_budget_that_is_written_as_a_fraction_is_measured(tmp_path: Path) -> None:
    """Its name has a slash of its own."""
    learners = [{**ROBUST, "threat": {"norm": "linf", "eps": 8 / 255}}, NATURAL]
    run, _ = tiny_run(tmp_path / "run", tiny_recipe(learners))
    mixture = dial.mix(run, 0.5, statistics="best", device="cpu", data=TINY_DATA)
    assert all(list(found) == ["natural", "linf:8/255"] for found in mixture.measured.values())
    assert len(mixture.measured) == 2


def test_images_for_statistics_are_augmented_training_images_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, trainer = tiny_run(tmp_path / "run", tiny_recipe())
    machine = dial.Dial(dial.learners_of(run), device="cpu", data=TINY_DATA)
    seen: list[torch.Tensor] = []
    model = machine.turn([0.5, 0.5], statistics="mixed").model
    monkeypatch.setattr("generalist.dial.turning.reestimate", lambda network, batches: seen.append([*batches]))
    machine.reestimated(model, [0.5, 0.5])
    natural, both = seen
    assert [len(batch) for batch in natural] == [6, 6, 6]
    held = {tuple(x.flatten().tolist()) for x in TINY_DATA["train"].batch(torch.tensor(sorted(trainer.held_out))).x}
    assert not held & {tuple(x.flatten().tolist()) for batch in natural for x in batch.float()}
    for plain, attacked in zip(natural, both, strict=True):
        moved = (attacked - plain).abs().amax((1, 2, 3))
        assert (moved[:3] > 0).all() and (moved[:3] <= 0.1 + 1e-7).all() and (moved[3:] == 0).all()
    seen.clear()
    machine.reestimated(model, [0.0, 1.0])
    assert len(seen) == 1  # natural images alone need no attack


def test_images_for_statistics_are_in_the_learners_own_augmentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"crop": 0, "flip": False}
    own = {**NATURAL, "augmentation": {"crop": 0, "flip": False, "erase": 1}, "cutout": 2}
    run, _ = tiny_run(tmp_path / "run", tiny_recipe([ROBUST, own], data={"augmentation": plain}))
    machine = dial.Dial(dial.learners_of(run), device="cpu", data=TINY_DATA)
    model = machine.turn([0.5, 0.5], statistics="mixed").model
    seen: list[list[torch.Tensor]] = []
    monkeypatch.setattr("generalist.dial.turning.reestimate", lambda network, batches: seen.append([*batches]))
    machine.reestimated(model, [0.0, 1.0])
    machine.reestimated(model, [0.5, 0.5])
    for task, [shared, mine] in {"own": seen[:2], "both": seen[2:]}.items():
        for before, after in zip(shared, mine, strict=True):
            blank = ((after == 0) & (before != 0)).all(1).sum((1, 2))
            first = 0 if task == "own" else 3
            assert (blank[first:] > 0).all() and blank[first:].max() > 4, "a square, and a rectangle"
            assert task == "own" or (before[:3] - after[:3]).abs().max() <= 0.1 + 1e-6, "the other learner's are whole"
            shown = after[first:] != 0
            assert torch.equal(after[first:][shown], before[first:][shown])


def test_statistics_come_from_attacks_as_the_learners_train_on(tmp_path: Path) -> None:
    """Each threat with its own step, the objective's own start, and as much of eps as the attack had come to."""
    both = {"kind": "at-linf-l2", "beside": ["l2:0.3"]}
    learners = [
        {**ROBUST, "objective": both, "attack": {"steps": 2, "step": 0.02}},
        {**ROBUST, "name": "trades", "objective": "trades"},
        {**ROBUST, "name": "once", "objective": "fast-at", "attack": {"scale": {"epochs": [0, 4], "values": [0, 1]}}},
        NATURAL,
    ]
    options = {"mixing": {"redistribution": {"every": 0}}, "train": {"snapshots": {"every": 2}}}
    run, _ = tiny_run(tmp_path / "run", tiny_recipe(learners, **options))
    machine = dial.Dial(dial.learners_of(run, 2), device="cpu", data=TINY_DATA)
    first, second, trades, once, natural = machine._tasks([0.4, 0.2, 0.2, 0.2])
    assert [task.share for task in (first, second, trades, once, natural)] == [0.2, 0.2, 0.2, 0.2, 0.2]
    assert (str(first.threat), first.attack.step) == ("linf:0.1", 0.02)
    assert (str(second.threat), second.attack.step) == ("l2:0.3", None), "and not linf's"
    assert (trades.attack.start, first.attack.start) == ("gaussian", "uniform")
    assert (once.attack.steps, once.attack.step) == (1, 0.125)
    assert isinstance(once.threat, Shrunk) and float(once.threat.share) == 0.5, "it grows for 4 epochs"
    assert natural.threat is None


def test_a_network_without_batchnorm_has_nothing_to_choose(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):
        def __init__(self, *, num_classes: int, in_channels: int) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16 * in_channels, num_classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.linear(x.flatten(1))
            return logits

    if "plain-linear" not in generalist.models.MODELS.names():
        generalist.models.MODELS.register("plain-linear")(Plain)
    recipe = tiny_recipe(model={"name": "plain-linear"}, data={"augmentation": {"crop": 0, "flip": False}})
    run, _ = tiny_run(tmp_path / "run", recipe)
    assert dial.mix(run, 0.5, data=TINY_DATA, device="cpu").statistics == "mixed"
    with pytest.raises(RunError, match="no BatchNorm statistics"):
        dial.mix(run, 0.5, statistics="reestimated", data=TINY_DATA, device="cpu")


def test_a_run_on_arrays_needs_its_own_images_again(tmp_path: Path) -> None:
    run, _ = tiny_run(tmp_path / "run", tiny_recipe())
    assert dial.mix(run, 0.5, statistics="mixed", device="cpu").statistics == "mixed"
    assert generalist.mix(run, 0.5, data=TINY_DATA, device="cpu")(torch.zeros(2, 1, 4, 4)).shape == (2, 3)
    with pytest.raises(RunError, match="give them again as `data`"):
        dial.mix(run, 0.5, device="cpu")
    with pytest.raises(DataError, match="other images than these"):
        dial.mix(run, 0.5, data={"train": tiny_images(24, salt=5)}, device="cpu")


# -- files and the API ------------------------------------------------------------------------------------------------


def test_a_written_mixture_is_a_weights_file_like_any_other(run: RunDirectory, tmp_path: Path) -> None:
    mixture = dial.mix(run, 0.8, device="cpu")
    mixture.save(tmp_path / "mine.safetensors")
    state, about = load_weights(tmp_path / "mine.safetensors")
    header = load_weights(run.model)[1]
    assert about.keys() - {"mix"} == header.keys() - {"updates"}
    assert about["mix"] == {"gamma": mixture.gammas, "statistics": mixture.statistics, "source": "raw"}
    assert all(torch.equal(tensor, mixture.state[name]) for name, tensor in state.items())
    x = torch.linspace(0, 1, 3 * 64).reshape(3, 1, 8, 8)
    with torch.no_grad():
        loaded, direct = generalist.load(tmp_path / "mine.safetensors")(x), mixture.model(x)
        assert torch.equal(loaded, direct)
        assert torch.equal(generalist.mix(str(run.path), gamma=0.8, device="cpu")(x), direct)


def test_files_are_named_after_the_shares() -> None:
    learners = learners_like(tiny_recipe(T_LIKE))
    named = dial.mixture_file(learners, {"nat": 0.3, "l2": 0.2, "linf": 0.5})
    assert named == Path("run/mix/gamma-0.50-0.20.safetensors")
    other = dial.mixture_file(learners, {"nat": 0.3, "l2": 0.2, "linf": 0.5}, "mixed")
    assert other.name == "gamma-0.50-0.20-mixed-statistics.safetensors"
    earlier = replace(learners_like(tiny_recipe()), last=False, epoch=7)
    third = dial.mixture_file(earlier, {"robust": 1 / 3, "natural": 2 / 3})
    assert third.name == "gamma-0.3333333333333333-epoch-7.safetensors"
    near = [dial.mixture_file(earlier, {"robust": share, "natural": 1 - share}) for share in (0.12345671, 0.12345699)]
    assert near[0] != near[1]


# -- grids, fronts, suggestions ---------------------------------------------------------------------------------------


def test_grids() -> None:
    assert grid(2, 3) == [(0.0, 1.0), (0.5, 0.5), (1.0, 0.0)]
    assert [row[0] for row in grid(2, 11)] == pytest.approx([i / 10 for i in range(11)])
    triangle = grid(3, 3)
    assert triangle == [(0, 0, 1), (0, 0.5, 0.5), (0, 1, 0), (0.5, 0, 0.5), (0.5, 0.5, 0), (1, 0, 0)]
    four = grid(4, 3)
    assert len(four) == 4 + 6 + 1 and (0.25,) * 4 in four and sum(sorted(row)[-1] == 1 for row in four) == 4
    assert len(grid(3, 11)) == 66 and len(grid(5, 4)) == 5 + 10 * 2 + 1
    for rows in (triangle, four, grid(6, 5)):
        assert all(sum(row) == pytest.approx(1) and min(row) >= 0 for row in rows)
        assert len(set(rows)) == len(rows) and [row[0] for row in rows] == sorted(row[0] for row in rows)
    for wrong in (1, 0, -3, 102):
        with pytest.raises(GeneralistError, match="2 to 101 points"):
            grid(2, wrong)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_pareto_front_by_brute_force(width: int) -> None:
    draws = generalist.core.random.integers(4, 3, f"front/{width}", shape=(40, width)).numpy()
    rows = [tuple(float(value) for value in row) for row in draws]
    expected = []
    for mine in rows:
        better = [other for other in rows if np.all(np.array(other) >= mine) and other != mine]
        expected.append(not better)
    assert pareto(rows) == expected
    assert 0 < sum(expected) < len(rows)


def point(share: float, natural: float, *robust: float) -> Point:
    found = {"natural": natural, **{f"linf:0.{i}": value for i, value in enumerate(robust, 1)}}
    validation = {name: Measured.of(Accuracy(round(1000 * value), 1000)) for name, value in found.items()}
    return Point(gamma={"linf": share, "natural": 1 - share}, statistics="mixed", validation=validation)


TABLE = [
    point(0, 0.95, 0.02),
    point(0.25, 0.93, 0.30),
    point(0.5, 0.90, 0.41),
    point(0.75, 0.86, 0.47),
    point(1, 0.84, 0.50),
]


@pytest.mark.parametrize(
    ("wish", "share", "granted"),
    [
        ({"natural_at_least": 0.89}, 0.5, True),
        ({"natural_at_least": 0.90}, 0.5, True),
        ({"natural_at_least": 0.901}, 0.25, True),
        ({"natural_at_least": 0}, 1, True),
        ({"robust_at_least": 0.46}, 0.75, True),
        ({"robust_at_least": 0.1, "natural_at_least": 0.8}, 1, True),
        ({"robust_at_least": 0.45, "natural_at_least": 0.85}, 0.75, True),
        ({"natural_at_least": 0.97}, 0, False),
        ({"robust_at_least": 0.6}, 1, False),
        ({"robust_at_least": 0.46, "natural_at_least": 0.89}, 0.75, False),
    ],
)
def test_suggestions_by_hand(wish: dict[str, float], share: float, granted: bool) -> None:
    found = suggest(TABLE, Wish(**wish))
    assert found.gamma["linf"] == share and found.granted == granted
    assert found.text.startswith("the most" if granted else "no point of this curve has")


def test_what_was_asked_for_to_the_digit_is_granted() -> None:
    """99.9 / 100 is a little more than 999 / 1000."""
    for tenth in range(1001):
        have = point(1, tenth / 1000, 0.1)
        assert suggest([have], Wish(natural_at_least=(tenth / 10) / 100)).granted
        assert not suggest([have], Wish(natural_at_least=min(1, tenth / 1000 + 1e-6))).granted or tenth == 1000


def test_a_suggestion_says_what_it_found() -> None:
    text = suggest(TABLE, Wish(natural_at_least=0.89)).text
    assert text == (
        "the most robust point with natural accuracy of at least 89.00%: gamma linf 0.5, natural 0.5 "
        "(natural 90.00%, robust 41.00%)"
    )


def test_robust_means_every_threat() -> None:
    table = [point(0.2, 0.9, 0.6, 0.2), point(0.6, 0.88, 0.4, 0.35), point(1, 0.8, 0.5, 0.3)]
    assert suggest(table, Wish(natural_at_least=0.5)).gamma["linf"] == 0.6
    assert not suggest(table, Wish(robust_at_least=0.36)).granted


# -- the curve --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits_curve(run: RunDirectory) -> dial.Curve:
    return dial.curve(run, 6, natural_at_least=0.5, device="cpu")


TOLERANCE = 0.04
"""Two standard deviations of the difference of two accuracies of 0.95 on 200 images, if these were independent; they
are the same images, so the noise is smaller."""


def test_natural_accuracy_falls_as_robustness_is_dialled_in(digits_curve: dial.Curve) -> None:
    assert [point.gamma["linf"] for point in digits_curve.points] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    natural = [point.natural for point in digits_curve.points]
    assert all(later <= earlier + TOLERANCE for earlier, later in pairwise(natural)), natural
    assert min(natural) > 0.8
    robust = [point.robust for point in digits_curve.points]
    assert robust[-1] > robust[0]


def test_the_curves_ends_are_the_learners(run: RunDirectory, digits_curve: dial.Curve) -> None:
    """The natural accuracy that training's own validation found for them."""
    last = run.read_metrics()[-1]["validation"]["accuracy"]
    first, end = digits_curve.points[0], digits_curve.points[-1]
    assert first.natural == pytest.approx(last["natural"]["natural"])
    assert end.natural == pytest.approx(last["linf"]["natural"])
    assert end.robust == pytest.approx(last["linf"]["linf:0.18"], abs=0.03)  # other random starts


def test_curve_json_is_the_curve(run: RunDirectory, digits_curve: dial.Curve) -> None:
    assert dial.read_curve(run) == digits_curve
    raw = json.loads((run.path / "mix" / "curve.json").read_text())
    assert (
        raw["epoch"] == 16 and raw["split"] == "held-out" and raw["points"][0]["validation"]["natural"]["total"] == 200
    )
    assert [point["pareto"] for point in raw["points"]] == pareto([[p.natural, p.robust] for p in digits_curve.points])
    assert raw["own_gamma"]["linf"] == pytest.approx(0.6)
    assert raw["suggestion"]["granted"] is True and len(raw["notes"]) == 1
    assert not list(run.path.glob("mix/.*"))


def test_test_images_are_reported_and_never_chosen_on(run: RunDirectory) -> None:
    calls: list[tuple[int, int]] = []
    found = dial.curve(
        run,
        2,
        test=True,
        samples=50,
        steps=1,
        device="cpu",
        listener=lambda done, total, _: calls.append((done, total)),
    )
    assert calls == [(1, 2), (2, 2)] and found.suggestion is None and found.steps == 1
    assert all(p.test and p.test["natural"].total == p.validation["natural"].total == 50 for p in found.points)
    assert any("optimistic" in note and "test" in note for note in found.notes)
    natural = generalist.evaluate(generalist.load(run, which="natural"), "digits", attacks="natural", samples=50)
    assert found.points[0].test and found.points[0].test["natural"].correct == natural["natural"].correct


def test_a_run_that_validates_on_test_images_says_so(tmp_path: Path) -> None:
    run, _ = tiny_run(tmp_path / "run", tiny_recipe(validation={"split": "test", "images": 9}))
    found = dial.curve(run, 2, data=TINY_DATA, device="cpu")
    assert found.split == "test" and any("optimistic" in note for note in found.notes)


@pytest.mark.parametrize("count", [3, 4])
def test_curves_of_more_learners(count: int, tmp_path: Path) -> None:
    learners = [NATURAL, ROBUST, L2, {**L2, "name": "other"}][:count]
    run, _ = tiny_run(tmp_path / "run", tiny_recipe(learners, train={"epochs": 2}))
    found = dial.curve(run, 3, data=TINY_DATA, device="cpu", robust_at_least=0.0)
    assert len(found.points) == {3: 6, 4: 11}[count]
    order = ["robust", "l2", "other", "natural"] if count == 4 else ["robust", "l2", "natural"]
    assert all(list(p.gamma) == order and list(p.validation) == ["natural", "linf:0.1", "l2:0.3"] for p in found.points)
    read = dial.read_curve(run)
    assert read == found and found.suggestion and found.suggestion.granted
    assert list(read.own_gamma) == order and all(list(p.gamma) == order for p in read.points), "not by the alphabet"


def test_stages_mix_the_last_one(tmp_path: Path) -> None:
    recipe = tiny_recipe().model_dump(mode="json")
    recipe["train"]["epochs"] = 1
    change = {"learners": [{**recipe["learners"][0], "name": "later"}, recipe["learners"][1]]}
    recipe["stages"] = [{"name": "first"}, {"name": "second", "change": change}]
    run = generalist.train(recipe, out=tmp_path / "run", device="cpu", data=TINY_DATA)
    assert dial.learners_of(run).names == ["later", "natural"]
    assert dial.learners_of(run.stage("first")).names == ["robust", "natural"]


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(args: list[str], monkeypatch: Any, capsys: Any) -> str:
    code, out, err = run_main(["mix", *args], monkeypatch, capsys)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    return str(err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either --gamma for one model or --curve for many"),
        (["--gamma", "0.5", "--curve", "3"], "give either --gamma"),
        (["--gamma", "1.5"], "shares lie in [0, 1]"),
        (["--gamma", "-0.5"], "shares lie in [0, 1]"),
        (["--gamma", "0.5,0.5"], "2 shares for 2 learners; give 1, those of linf: natural gets the rest"),
        (["--gamma", "half"], "'half' is not a share"),
        (["--gamma", "1/0"], "denominator"),
        (["--gamma", "0.5", "--epoch", "3"], "no snapshot of epoch 3; kept: 10, 16"),
        (["--gamma", "0.5", "--epoch", "-1"], "no snapshot of epoch -1"),
        (["--gamma", "0.5", "--test"], "--test belongs to --curve"),
        (["--gamma", "0.5", "--steps", "3"], "--steps belongs to --curve"),
        (["--gamma", "0.5", "--samples", "0"], "--samples belongs to --curve"),
        (["--gamma", "0.5", "--robust-at-least", "0"], "--robust-at-least belongs to --curve"),
        (["--gamma", "0.5", "--statistics", "both"], "best, mixed or reestimated"),
        (["--gamma", "0.5", "--source", "both"], "source is raw, averaged or parts, not 'both'"),
        (["--gamma", "0.5", "--source", "averaged"], "kept no average of linf, natural"),
        (["--curve", "3", "--source", "averaged"], "kept no average of linf, natural"),
        (["--gamma", "0.5", "--device", "tpu"], "unknown device"),
        (["--curve", "1"], "2 to 101 points"),
        (["--curve", "3", "--out", "x"], "--out belongs to --gamma"),
        (["--curve", "3", "--natural-at-least", "0.89"], "write 89 and not 0.89"),
        (["--curve", "3", "--robust-at-least", "146"], "in percent"),
        (["--curve", "3", "--natural-at-least", "nan"], "in percent"),
        (["--curve", "3", "--samples", "0"], "ask for 1 or more"),
        (["--curve", "3", "--steps", "0"], "steps"),
    ],
)
def test_mistakes_end_in_a_line(
    args: list[str],
    message: str,
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in refused([str(run.path), *args], monkeypatch, capsys)


def test_runs_that_cannot_be_mixed(
    spare: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [str(spare.path), "--gamma", "0.5"]
    assert "is not a run directory" in refused([str(tmp_path / "none"), "--gamma", "0.5"], monkeypatch, capsys)
    shutil.copy(spare.snapshots / "16" / "linf.safetensors", spare.snapshots / "16" / "natural.safetensors")
    assert "all equal after epoch 16" in refused(where, monkeypatch, capsys)
    (spare.snapshots / "16" / "natural.safetensors").write_bytes(b"nonsense")
    assert "not a complete safetensors file" in refused(where, monkeypatch, capsys)
    (spare.snapshots / "16" / "natural.safetensors").unlink()
    assert "there is no weights file" in refused(where, monkeypatch, capsys)
    (spare.snapshots / "16" / "global.safetensors").unlink()  # an unfinished snapshot: the one before it counts
    assert dial.learners_of(spare).epoch == 10
    shutil.rmtree(spare.snapshots)
    message = refused(where, monkeypatch, capsys)
    assert "has no snapshots" in message and f"generalist train {spare.path} --resume" in message


def test_learners_of_different_architecture_are_refused(spare: RunDirectory) -> None:
    path = spare.snapshots / "16" / "natural.safetensors"
    state, about = load_weights(path)
    name = next(iter(state))
    save_weights(path, {**state, name: state[name][..., :1].contiguous()}, about)
    with pytest.raises(RunError, match="differ in architecture"):
        dial.learners_of(spare)


def test_one_learner_cannot_be_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = tiny_run(tmp_path / "run", tiny_recipe([ROBUST], train={"epochs": 1}))
    assert "has one learner" in refused([str(run.path), "--gamma", "0.5"], monkeypatch, capsys)


def test_a_wish_for_robustness_needs_a_threat(tmp_path: Path) -> None:
    other = {**NATURAL, "name": "other", "optimizer": {"lr": 0.1}}
    run, _ = tiny_run(tmp_path / "run", tiny_recipe([NATURAL, other], train={"epochs": 1}))
    with pytest.raises(RunError, match="measures no threat"):
        dial.curve(run, 2, robust_at_least=0.3, data=TINY_DATA, device="cpu")
    found = dial.curve(run, 2, natural_at_least=0.0, data=TINY_DATA, device="cpu")
    assert all(list(p.validation) == ["natural"] for p in found.points) and found.suggestion


@pytest.mark.parametrize("text", ["", "{}", '{"points": []}', "[1]", '{"points": 1e999}'])
def test_a_damaged_curve_is_refused(text: str, spare: RunDirectory) -> None:
    shutil.rmtree(spare.path / "mix", ignore_errors=True)
    with pytest.raises(RunError, match=r"has no curve.*--curve 11"):
        dial.read_curve(spare)
    write_text(spare.path / "mix" / "curve.json", text)
    with pytest.raises(RunError, match="is damaged"):
        dial.read_curve(spare)


def _untested(raw: dict[str, Any]) -> None:
    raw["points"][0]["test"] = None


def _less_tested(raw: dict[str, Any]) -> None:
    for point in raw["points"]:
        del point["test"]["natural"]


def _of_others(raw: dict[str, Any]) -> None:
    raw["own_gamma"] = {"linf": 0.5, "l2": 0.5}


def _more_than_all(raw: dict[str, Any]) -> None:
    raw["points"][0]["validation"]["natural"]["correct"] = 10**6


@pytest.mark.parametrize("damage", [_untested, _less_tested, _of_others, _more_than_all])
def test_a_curve_that_contradicts_itself_is_refused(damage: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    run, _ = tiny_run(tmp_path / "run", tiny_recipe(train={"epochs": 1}))
    dial.curve(run, 2, test=True, data=TINY_DATA, device="cpu")
    file = run.path / "mix" / "curve.json"
    raw = json.loads(file.read_text())
    dial.read_curve(run)
    damage(raw)
    file.write_text(json.dumps(raw))
    with pytest.raises(RunError, match="is damaged"):
        dial.read_curve(run)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_model_that_evaluates(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(["mix", str(run.path), "--gamma", "4/5", "--device", "cpu"], monkeypatch, capsys)
    assert (code, err) == (0, "")
    file = run.path / "mix" / "gamma-0.80.safetensors"
    assert f"weights: {file}" in out and "gamma: linf 0.8, natural 0.2" in out and "reestimated statistics" in out
    args = ["evaluate", str(file), "--attacks", "natural,pgd-2", "--samples", "40", "--json"]
    code, out, err = run_main(args, monkeypatch, capsys)
    summary = json.loads(out)
    assert (code, err) == (0, "") and summary["subject"] == "gamma-0.80" and summary["samples"] == 40
    assert summary["identity"]["threats"] == ["linf:0.18"]
    args = ["mix", str(run.path), "--gamma", "1", "--out", str(tmp_path / "own.safetensors"), "--json"]
    code, out, err = run_main(args, monkeypatch, capsys)
    found = json.loads(out)
    assert (code, err) == (0, "") and found["gamma"] == {"linf": 1.0, "natural": 0.0} and found["epoch"] == 16
    assert found["file"] == str(tmp_path / "own.safetensors") and Path(found["file"]).is_file()
    assert "exists already" in refused(args[1:], monkeypatch, capsys)


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(dial.Dial, "turn", None)
    out = str(tmp_path / "file" / "x.safetensors")
    assert "cannot write" in refused([str(run.path), "--gamma", "0.8", "--out", out], monkeypatch, capsys)


def test_the_command_shows_the_curve(
    spare: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["mix", str(spare.path), "--curve", "3", "--samples", "60", "--steps", "2", "--device", "cpu"]
    args += ["--statistics", "mixed", "--natural-at-least", "50"]
    code, out, err = run_main([*args, "--test"], monkeypatch, capsys)
    assert (code, err) == (0, "")
    found = dial.read_curve(spare)
    assert "[3/3] gamma linf 1, natural 0: natural" in out and "\x1b" not in out
    rows = [line for line in out.splitlines() if re.search(r"│ \d\.\d\d, \d\.\d\d", line)]
    assert ["│ *" in row for row in rows] == [point.pareto for point in found.points] * 2
    assert "on the test images" in out and "optimistic" in out
    assert found.suggestion and found.suggestion.text in out
    assert re.search(rf"make it with: generalist mix \S+ --gamma {found.suggestion.gamma['linf']:g} --epoch 16", out)
    code, out, err = run_main([*args, "--json"], monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert dial.Curve.model_validate_json(out) == dial.read_curve(spare)


def test_the_command_that_a_curve_suggests_makes_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the run's own dial would mix something else."""
    overrides = [*FAST_TRAINING, "mixing.parts=true", "mixing.gamma=0.6"]
    run = generalist.train("digits-d", overrides=overrides, out=tmp_path / "run", device="cpu")
    args = ["mix", str(run.path), "--curve", "2", "--source", "raw", "--samples", "60", "--steps", "1"]
    code, out, _ = run_main([*args, "--natural-at-least", "0"], monkeypatch, capsys)
    made = re.search(r"make it with: generalist (.*)", out)
    assert code == 0 and made
    code, out, _ = run_main([*shlex.split(made[1]), "--json"], monkeypatch, capsys)
    assert code == 0 and load_weights(Path(json.loads(out)["file"]))[1]["mix"]["source"] == "raw"


FAST_TRAINING = ["model.width=4", "train.epochs=2", "validation.images=60", "validation.steps=1"]


def test_the_command_says_when_no_point_will_do(
    spare: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["mix", str(spare.path), "--curve", "2", "--samples", "60", "--steps", "1", "--robust-at-least", "100"]
    code, out, _ = run_main(args, monkeypatch, capsys)
    assert code == 0 and "no point of this curve has robust accuracy of at least 100.00%; the nearest: gamma" in out


FAST = ["model.width=4", "train.batch_size=600", "learners.0.attack.steps=1"]
FAST += ["validation.every=50", "validation.steps=1", "validation.images=60", "train.checkpoint_epochs=50"]


@pytest.mark.slow
def test_every_command_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a smaller network and few iterations, so that it takes seconds."""
    text = (ROOT / "docs" / "dial.md").read_text()
    blocks = re.findall(r"^```(?:console|sh)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("generalist ")]
    assert {words[0] for words in commands} == {"train", "mix", "evaluate"} and len(commands) >= 7
    monkeypatch.chdir(tmp_path)
    for words in commands:
        changes = [word for change in FAST for word in ("--set", change)] if words[0] == "train" else []
        code, _, err = run_main([*words, *changes], monkeypatch, capsys)
        assert (code, err) == (0, ""), words
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    exec(compile(code, "docs/dial.md", "exec", dont_inherit=True), {"__name__": "dial"})
    assert "natural" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_dial_turns_on_a_gpu(run: RunDirectory) -> None:
    here = dial.mix(run, 0.5, epoch=10, statistics="reestimated", device="cpu")
    there = dial.mix(run, 0.5, epoch=10, statistics="reestimated", device="cuda")
    assert next(there.model.parameters()).device.type == "cuda"
    for name, tensor in here.state.items():
        assert there.state[name].device.type == "cpu"
        torch.testing.assert_close(there.state[name], tensor, rtol=0.05, atol=0.02)  # attacks round differently there
    found = dial.curve(run, 2, device="cuda")
    assert found.points[1].natural == pytest.approx(dial.curve(run, 2, device="cpu").points[1].natural, abs=0.02)


def test_a_snapshot_in_types_that_nobody_computes_with_is_refused(spare: RunDirectory) -> None:
    for name in ("linf", "natural"):
        file = spare.snapshots / "16" / f"{name}.safetensors"
        state, about = load_weights(file)
        first = next(name for name, tensor in state.items() if tensor.is_floating_point())
        save_weights(file, state | {first: state[first].to(torch.float8_e4m3fn)}, about)
    with pytest.raises(RunError, match=r"is damaged: '.*' holds torch\.float8_e4m3fn"):
        dial.learners_of(spare)


def test_a_curve_that_cannot_be_kept_is_not_measured(spare: RunDirectory) -> None:
    shutil.rmtree(spare.path / "mix", ignore_errors=True)
    (spare.path / "mix").write_text("a file in its place")
    measured: list[int] = []
    with pytest.raises(GeneralistError, match="cannot write"):
        dial.curve(spare, 2, samples=10, steps=1, listener=lambda done, total, point: measured.append(done))
    assert measured == []
