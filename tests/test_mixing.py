"""Whole runs of N learners, re-stated in numpy from the method's definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from training_helpers import (
    CLASSES,
    L2,
    NATURAL,
    ROBUST,
    Moment,
    TinyNet,
    Trace,
    make_trainer,
    spy_on,
    tiny_recipe,
    tiny_splits,
)

from generalist.core.run import RunDirectory
from generalist.recipe import Recipe
from generalist.training.artefacts import load_weights
from generalist.training.loop import Trainer
from generalist.training.measures import Regret, drift, ensemble, mixing_gap
from generalist.training.validation import Validation

TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
SPE = 3  # iterations an epoch
THIRDS = [0, 1 / 3, 2 / 3, 1]


def others(count: int) -> list[dict[str, Any]]:
    """`count` learners, the robust one among them but not first."""
    extra = [
        {**NATURAL, "name": "smooth", "label_smoothing": 0.1},
        {**NATURAL, "name": "adam", "optimizer": {"kind": "adam", "lr": 0.01}},
    ]
    return [NATURAL, ROBUST, L2, *extra][:count] if count > 1 else [ROBUST]


def run_spied(path: Path, recipe: Any, *, images: int = 24) -> tuple[Trainer, Trace]:
    trainer = make_trainer(recipe, path, splits=tiny_splits(count=images))
    assert trainer.steps_per_epoch == SPE
    trace = spy_on(trainer)
    trainer.run()
    return trainer, trace


def decay_at(k: int, decay: float, *, warmup: bool) -> float:
    return min(decay, (k + 1) / (k + 10)) if warmup else decay


def lead_gammas(names: list[str], shares: dict[str, float], end: float, epochs: int) -> list[dict[str, float]]:
    """The robust learner leads with (1, 1, 1, end); the others share the rest."""
    rows = []
    for k in range(epochs * SPE):
        gamma = float(np.interp(k / SPE / epochs, THIRDS, [1, 1, 1, end]))
        rest = {name: (1 - gamma) * shares[name] for name in names if name != "robust"}
        rows.append({"robust": gamma, **rest} if len(names) > 1 else {"robust": 1.0})
    return rows


def restated_global(
    trace: Trace, gammas: list[dict[str, float]], *, decay: float, warmup: bool, averaged: bool = False
) -> list[np.ndarray]:
    """theta_g <- d theta_g + (1 - d) sum_a gamma_a source_a."""
    theta, found = trace.start.copy(), []
    for k, row in enumerate(gammas):
        d = decay_at(k, decay, warmup=warmup)
        total = np.zeros_like(theta)
        for name, gamma in row.items():
            after = trace.after[name][k]
            total += gamma * (after.average if averaged else after.weights)  # type: ignore[operator]
        theta = d * theta + (1 - d) * total
        found.append(theta)
    return found


def check_global(trace: Trace, expected: list[np.ndarray]) -> None:
    assert len(trace.mixed) == len(expected) > 0
    for k, (ours, theirs) in enumerate(zip(trace.mixed, expected, strict=True)):
        np.testing.assert_allclose(ours, theirs, **TOLERANCE, err_msg=f"iteration {k}")


# -- mixing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("warmup", [True, False])
def test_the_global_learner_averages_the_mixed_learners(tmp_path: Path, count: int, warmup: bool) -> None:
    learners = others(count)
    names = [learner["name"] for learner in learners]
    mixing = {
        "gamma": {"fractions": [0, "1/3", "2/3", 1], "values": [1, 1, 1, 0.2]},
        "decay": 0.7,
        "warmup": warmup,
        "redistribution": {"every": 2, "start_epoch": 2},
    }
    trainer, trace = run_spied(tmp_path, tiny_recipe(learners, mixing=mixing))
    even = dict.fromkeys(names, 1 / max(count - 1, 1))
    check_global(trace, restated_global(trace, lead_gammas(names, even, 0.2, 4), decay=0.7, warmup=warmup))
    np.testing.assert_array_equal(trainer.global_learner.vector.numpy(), trace.mixed[-1])
    ends = [trace.after[name][-1].weights for name in names]
    assert all(np.abs(a - b).max() > 1e-4 for i, a in enumerate(ends) for b in ends[:i]), "the learners are different"


def test_shares_split_what_the_lead_leaves(tmp_path: Path) -> None:
    shares = {"natural": 0.75, "l2": 0.25}
    mixing = {"lead": "robust", "shares": shares, "decay": 0.9, "redistribution": {"every": 0}}
    _, trace = run_spied(tmp_path, tiny_recipe([NATURAL, ROBUST, L2], mixing=mixing))
    gammas = lead_gammas(["natural", "robust", "l2"], shares, 0.4, 4)
    check_global(trace, restated_global(trace, gammas, decay=0.9, warmup=True))


def test_every_learner_may_have_a_schedule_of_its_own(tmp_path: Path) -> None:
    schedules = {
        "robust": {"fractions": [0, 1], "values": [0.8, 0.1]},
        "natural": {"epochs": [0, 4], "values": [0.1, 0.5]},
        "l2": {"fractions": [0, 1], "values": [0.1, 0.4]},
    }
    recipe = tiny_recipe([ROBUST, NATURAL, L2], mixing={"gammas": schedules, "decay": 0.6, "warmup": False})
    _, trace = run_spied(tmp_path, recipe)
    gammas = [
        {"robust": 0.8 - 0.7 * s, "natural": 0.1 + 0.4 * s, "l2": 0.1 + 0.3 * s}
        for s in (k / SPE / 4 for k in range(4 * SPE))
    ]
    check_global(trace, restated_global(trace, gammas, decay=0.6, warmup=False))


def test_counters_follow_the_lead_and_learning_rates_their_schedules(tmp_path: Path) -> None:
    schedule = {"fractions": [0, 0.5, 1], "values": [1, 1, 0.1]}
    learners = [{**NATURAL, "schedule": schedule}, ROBUST]
    _, trace = run_spied(tmp_path, tiny_recipe(learners, mixing={"redistribution": {"every": 0}}))
    for k in range(4 * SPE):
        assert trace.mixed_counters[k].tolist() == trace.after["robust"][k].counters.tolist() == [k + 1]
        position = k / SPE / 4
        assert trace.lr["natural"][k] == pytest.approx(0.05 * np.interp(position, [0, 0.5, 1], [1, 1, 0.1]), abs=1e-15)
        assert trace.lr["robust"][k] == pytest.approx(0.02 * np.interp(position, THIRDS, [1, 1, 0.1, 0.01]), abs=1e-15)


# -- the learners' own averages ---------------------------------------------------------------------------------------


def restated_average(
    before: list[Moment], after: list[Moment], *, decay: float, warmup: bool, restarts: set[int]
) -> None:
    """e <- d e + (1 - d) theta; before the iterations in `restarts` it starts anew at the learner's weights."""
    average, count = before[0].weights.copy(), 0
    for k, (was, now) in enumerate(zip(before, after, strict=True)):
        if k in restarts:
            average, count = was.weights.copy(), 0
        assert was.average is not None and now.average is not None
        np.testing.assert_allclose(was.average, average, **TOLERANCE, err_msg=f"before iteration {k}")
        d = decay_at(count, decay, warmup=warmup)
        average = d * average + (1 - d) * now.weights
        count += 1
        np.testing.assert_allclose(now.average, average, **TOLERANCE, err_msg=f"after iteration {k}")


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_averages_follow_their_learners(tmp_path: Path, warmup: bool, reset: bool) -> None:
    averaging = {"decay": 0.8, "warmup": warmup}
    learners = [{**ROBUST, "averaging": averaging}, {**NATURAL, "averaging": averaging}]
    mixing = {
        "source": "averaged",
        "decay": 0.9,
        "redistribution": {"every": 1, "start_epoch": 2, "reset": reset},
    }
    _, trace = run_spied(tmp_path, tiny_recipe(learners, mixing=mixing))
    restarts = {2 * SPE, 3 * SPE} if reset else set()
    for name in ("robust", "natural"):
        restated_average(trace.before[name], trace.after[name], decay=0.8, warmup=warmup, restarts=restarts)
    gammas = lead_gammas(["robust", "natural"], {"natural": 1.0}, 0.4, 4)
    check_global(trace, restated_global(trace, gammas, decay=0.9, warmup=True, averaged=True))


# -- redistribution ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "start_epoch", "due"),
    [(1, 1, {1, 2, 3, 4}), (2, 1, {2, 4}), (2, 3, {4}), (3, 2, {3}), (5, 1, set()), (0, 1, set()), (1, 5, set())],
)
@pytest.mark.parametrize("reset", [True, False])
def test_redistribution(tmp_path: Path, every: int, start_epoch: int, due: set[int], reset: bool) -> None:
    mixing = {"decay": 0.5, "redistribution": {"every": every, "start_epoch": start_epoch, "reset": reset}}
    recipe = tiny_recipe(mixing=mixing, train={"epochs": 5, "batch_size": 6, "precision": "fp64"})
    trainer, trace = run_spied(tmp_path, recipe)
    for name in ("robust", "natural"):
        before, after = trace.before[name], trace.after[name]
        for k in range(1, 5 * SPE):
            sent = k % SPE == 0 and k // SPE in due
            np.testing.assert_array_equal(before[k].weights, trace.mixed[k - 1] if sent else after[k - 1].weights)
            kept = np.zeros_like(after[k - 1].momentum) if sent and reset else after[k - 1].momentum
            np.testing.assert_array_equal(before[k].momentum, kept)
        learner = next(learner for learner in trainer.learners if learner.name == name)
        np.testing.assert_array_equal(learner.flat.vector.numpy(), after[-1].weights)  # never after the last epoch
        assert np.abs(after[-1].weights - trace.mixed[-1]).max() > 1e-6
    assert {r["epoch"] for r in RunDirectory(tmp_path).read_metrics() if r["redistributed"]} == due


def test_redistribution_may_leave_each_learner_its_own_batchnorm(tmp_path: Path) -> None:
    redistribution = {"every": 2, "start_epoch": 2, "batchnorm": "own"}
    recipe = tiny_recipe(mixing={"decay": 0.5, "redistribution": redistribution})
    trainer, trace = run_spied(tmp_path, recipe)
    flat, sent = trainer.learners[0].flat, 2 * SPE
    own = np.zeros(flat.size, dtype=bool)
    for slot in flat.slots:
        layer = flat.module.get_submodule(slot.name.rpartition(".")[0])
        own[slot.offset : slot.offset + slot.shape.numel()] = isinstance(layer, torch.nn.BatchNorm2d)
    assert own.any() and not own.all()
    for name in ("robust", "natural"):
        before, after, mixed = trace.before[name][sent].weights, trace.after[name][sent - 1].weights, trace.mixed
        np.testing.assert_array_equal(before, np.where(own, after, mixed[sent - 1]))
        assert np.abs(after - mixed[sent - 1])[own].max() > 1e-6, "which is not the global learner's"


def test_the_papers_epochs() -> None:
    redistribution = tiny_recipe(style="paper").mixing.redistribution
    due = [epoch for epoch in range(1, 121) if redistribution.due(epoch, 120)]
    assert due == [75, 80, 85, 90, 95, 100, 105, 110, 115]
    published = tiny_recipe(style="published-code").mixing.redistribution
    assert [epoch for epoch in range(1, 121) if published.due(epoch, 120)] == [*due, 120]


@pytest.mark.parametrize(
    ("epochs", "due"), [(2, {1}), (10, {6, 7, 8, 9}), (15, set(range(9, 15))), (48, set(range(30, 48, 2)))]
)
def test_short_training_redistributes_as_often_for_its_length(epochs: int, due: set[int]) -> None:
    """Each epoch at most, lest gamma move to learners that have gone apart."""
    redistribution = tiny_recipe().mixing.redistribution
    assert {epoch for epoch in range(1, epochs + 1) if redistribution.due(epoch, epochs)} == due
    assert redistribution.interval(200) == 5


def test_one_learner_restarts_from_its_average_only_where_the_recipe_says_so() -> None:
    def due(recipe: Recipe) -> list[int]:
        return [epoch for epoch in range(1, 5) if recipe.redistribution().due(epoch, 4)]

    assert due(tiny_recipe([NATURAL])) == []
    assert due(tiny_recipe([NATURAL], mixing={"redistribution": {"every": 1}})) == [3]
    assert due(tiny_recipe([ROBUST, NATURAL])) == [3]


# -- the end of an epoch ----------------------------------------------------------------------------------------------


def network(state: dict[str, torch.Tensor]) -> TinyNet:
    model = TinyNet(num_classes=CLASSES, in_channels=1).double()
    model.load_state_dict(state)
    return model.eval()


def mixed_state(states: dict[str, dict[str, torch.Tensor]], gammas: dict[str, float]) -> dict[str, torch.Tensor]:
    names = list(states["robust"])
    return {
        key: sum((gammas[a] * states[a][key] for a in states), torch.zeros_like(states["robust"][key])).to(
            states["robust"][key].dtype
        )
        if states["robust"][key].is_floating_point()
        else states["robust"][key]
        for key in names
    }


def test_a_task_is_measured_alike_whichever_images_share_a_batch(tmp_path: Path) -> None:
    """Its threat is not validated, so the training attack finds its loss; not with the batch's own statistics."""
    robust = {**ROBUST, "attack": {**ROBUST["attack"], "batchnorm": "train"}}
    losses = []
    for size in (2, 6):
        options = {"threats": [], "batch_size": size}
        trainer = make_trainer(tiny_recipe([robust, NATURAL], validation=options), tmp_path / str(size))
        trainer.run()
        losses.append([record["task_loss"] for record in trainer.directory.read_metrics()])
    for one, other in zip(*losses, strict=True):
        assert one == pytest.approx(other, abs=1e-12)


def test_an_epoch_ends_in_order_and_its_measures_are_those_of_the_definition(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        mixing={"decay": 0.5, "redistribution": {"every": 1, "start_epoch": 1}},
        train={"epochs": 4, "batch_size": 6, "precision": "fp64", "snapshots": {"every": 1}},
    )
    trainer, trace = run_spied(tmp_path, recipe)
    batch = trainer.validator.images.batch(torch.cat(trainer.validator.batches))
    x, y = batch.x.double(), batch.y
    losses: dict[str, list[float]] = {"robust": [], "natural": []}
    for record in RunDirectory(tmp_path).read_metrics():
        epoch = record["epoch"]
        last = epoch * SPE - 1
        folder = tmp_path / "snapshots" / str(epoch)
        states = {name: load_weights(folder / f"{name}.safetensors")[0] for name in ("robust", "natural")}
        shared = load_weights(folder / "global.safetensors")[0]
        flat = trainer.learners[0].flat
        for name, state in states.items():  # the snapshot holds the learners from before redistribution
            np.testing.assert_array_equal(flat.read(state)[0].numpy(), trace.after[name][last].weights)
        np.testing.assert_array_equal(flat.read(shared)[0].numpy(), trace.mixed[last])

        gammas = record["gamma"]
        gamma = float(np.interp(last / SPE / 4, THIRDS, [1, 1, 1, 0.4]))
        assert gammas == pytest.approx({"robust": gamma, "natural": 1 - gamma}, abs=1e-12)
        weights = [name for name, _ in TinyNet(num_classes=CLASSES, in_channels=1).named_parameters()]
        moved = sum(
            gammas[a] * sum(float((states[a][name] - shared[name]).square().sum()) for name in weights) for a in states
        )
        validation = record["validation"]
        assert moved > 1e-8
        assert validation["drift"] == pytest.approx(moved, abs=1e-12)

        with torch.no_grad():
            logits = {name: network(state)(x) for name, state in states.items()}
            both = gammas["robust"] * logits["robust"] + gammas["natural"] * logits["natural"]
            gap = (network(mixed_state(states, gammas))(x) - both).norm(dim=1).mean()
            assert validation["mixing_gap"] == pytest.approx(float(gap), abs=1e-11)
            assert validation["ensemble"] == float((both.argmax(1) == y).double().mean())
            for name, found in {**logits, "global": network(shared)(x)}.items():
                assert validation["accuracy"][name]["natural"] == float((found.argmax(1) == y).double().mean())
            assert record["task_loss"]["natural"] == pytest.approx(
                float(F.cross_entropy(logits["natural"], y)), abs=1e-12
            )
        assert record["task_loss"]["robust"] > float(F.cross_entropy(logits["robust"], y))
        each = F.cross_entropy(logits["natural"], y, reduction="none").clamp(0, 1)
        assert record["clipped_loss"]["natural"] == pytest.approx(float(each.mean()), abs=1e-12)
        assert record["clipped_loss"]["robust"] <= min(1.0, record["task_loss"]["robust"])
        for name in losses:
            losses[name].append(record["clipped_loss"][name])
        regret = np.mean([sum(loss - min(history) for loss in history) for history in losses.values()])
        assert record["regret"] == pytest.approx(float(regret), abs=1e-12)
        assert record["regret_rounds"] == epoch


def test_the_best_epoch_is_the_one_with_the_highest_sum(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        train={"epochs": 8, "batch_size": 6, "precision": "fp64", "snapshots": {"every": 1}},
        validation={"images": 9, "every": 1, "steps": 1},
    )
    trainer = make_trainer(recipe, tmp_path)
    trainer.run()
    records = RunDirectory(tmp_path).read_metrics()
    scores = [sum(record["validation"]["accuracy"]["global"].values()) for record in records]  # natural and one threat
    best = int(np.argmax(scores)) + 1
    assert [record["best_epoch"] for record in records][-1] == best
    kept, about = load_weights(tmp_path / "model.safetensors")
    assert about["epoch"] == best
    snapshot, _ = load_weights(tmp_path / "snapshots" / str(best) / "global.safetensors")
    assert all(torch.equal(kept[name], snapshot[name]) for name in kept)
    last, about = load_weights(tmp_path / "last.safetensors")
    assert about["epoch"] == 8
    assert torch.equal(trainer.learners[0].flat.read(last)[0], trainer.global_learner.vector)


@pytest.mark.parametrize(
    ("options", "found", "best"),
    [
        ({"rule": "natural"}, [(0.5, 0.4), (0.7, 0.1), (0.6, 0.3)], 2),
        ({"rule": "robust"}, [(0.5, 0.4), (0.7, 0.1), (0.6, 0.3)], 1),
        ({"rule": "last"}, [(0.5, 0.4), (0.7, 0.1), (0.6, 0.3)], 3),
        ({"min_natural": 0.6}, [(0.5, 0.4), (0.7, 0.0), (0.6, 0.2)], 3),
        ({"min_natural": 0.6, "rule": "last"}, [(0.5, 0.4), (0.7, 0.0), (0.5, 0.4)], 2),
        ({"start": 0.6}, [(0.9, 0.8), (0.5, 0.4), (0.6, 0.2)], 2),
        ({"start": 1, "min_natural": 0.6}, [(0.9, 0.8), (0.8, 0.4), (0.6, 0.2)], 3),
        ({"start": 0.5, "min_natural": 0.6}, [(0.9, 0.8), (0.5, 0.4), (0.4, 0.3)], 2),
        ({"start": 0.5, "min_natural": 0.6}, [(0.1, 0.0), (0.5, 0.4), (0.6, 0.3)], 3),
        ({"min_natural": 0.9}, [(0.3, 0.3), (0.8, 0.1), (0.7, 0.4)], 2),
        ({"min_natural": 0.9, "rule": "last"}, [(0.3, 0.3), (0.8, 0.1), (0.7, 0.4)], 2),
    ],
)
def test_the_rule_and_the_least_natural_accuracy_choose_the_epoch(
    tmp_path: Path, options: dict[str, Any], found: list[tuple[float, float]], best: int
) -> None:
    """Where no epoch may be the best, the nearest to being allowed is kept, and not the first, whatever it is."""
    trainer = make_trainer(tiny_recipe([ROBUST], train={"epochs": 3}, validation=options), tmp_path)
    accuracies = iter({"natural": natural, "linf:0.1": robust} for natural, robust in found)

    def validate(*of: Any) -> Validation:
        return Validation({"global": next(accuracies)}, {}, {"robust": 0.5}, ensemble=0.0, drift=0.0, gap=0.0)

    trainer.validator = validate  # type: ignore[assignment]
    trainer.run()
    about = load_weights(trainer.directory.model)[1]
    assert about["epoch"] == trainer.directory.read_metrics()[-1]["best_epoch"] == best
    before = max(trainer.job.validation.first_epoch(3), 1) - 1
    below = options.get("min_natural", 0) > max(natural for natural, _ in found[before:])
    assert ("min_natural" in about.get("warning", "")) == below
    said = ["min_natural" in record.get("warning", "") for record in trainer.directory.read_metrics()]
    assert said[-1] == below and not any(said[:before]), "while the newest stands in, none is the nearest"
    assert "warning" not in load_weights(trainer.directory.last)[1], "that is not the best"


# -- the published code's column --------------------------------------------------------------------------------------


def test_the_published_code_by_hand(tmp_path: Path) -> None:
    """An average of averages, integers truncated, learners overwritten after every iteration of the due epochs."""
    recipe = tiny_recipe(
        [{**ROBUST, "threat": {"norm": "linf"}}, {**NATURAL}],
        style="published-code",
        mixing={"redistribution": {"every": 2, "start_epoch": 3}},
        train={"epochs": 6, "batch_size": 6, "precision": "fp64"},
    )
    trainer, trace = run_spied(tmp_path, recipe, images=18)  # nothing is held out: selection is on the test set
    names = ["robust", "natural"]
    theta, counter = trace.start.copy(), 0
    average = {name: trace.start.copy() for name in names}
    average_counter = dict.fromkeys(names, 0)
    seen_counters = set()
    for k in range(6 * SPE):
        d = min(0.999, (k + 1) / (k + 10))
        gamma = float(np.interp(k / SPE / 6, THIRDS, [1, 1, 1, 0.4]))
        for name in names:
            now = trace.after[name][k]
            average[name] = d * average[name] + (1 - d) * now.weights
            average_counter[name] = int(d * average_counter[name] + (1 - d) * int(now.counters[0]))
            np.testing.assert_allclose(now.average, average[name], **TOLERANCE)
            assert now.average_counters is not None and now.average_counters.tolist() == [average_counter[name]]
        theta = d * theta + (1 - d) * (gamma * average["robust"] + (1 - gamma) * average["natural"])
        blend = gamma * average_counter["robust"] + (1 - gamma) * average_counter["natural"]
        counter = int(d * counter + (1 - d) * blend)
        seen_counters.add(counter)
        np.testing.assert_allclose(trace.mixed[k], theta, **TOLERANCE, err_msg=f"iteration {k}")
        assert trace.mixed_counters[k].tolist() == [counter]
        sent = k // SPE + 1 in {4, 6}
        for name in names:
            after = trace.after[name][k]
            if k + 1 < 6 * SPE:
                following = trace.before[name][k + 1]
                np.testing.assert_array_equal(following.momentum, after.momentum)
                assert following.average is not None and after.average is not None
                np.testing.assert_array_equal(following.average, after.average)
                weights, counts = following.weights, following.counters
            else:
                learner = next(learner for learner in trainer.learners if learner.name == name)
                weights, counts = learner.flat.vector.numpy(), learner.flat.counters.numpy()
            np.testing.assert_array_equal(weights, trace.mixed[k] if sent else after.weights)
            assert counts.tolist() == ([counter] if sent else after.counters.tolist())
    assert len(seen_counters) > 1, "the integer counters moved"
    buffers = trainer.learners[0].flat.slots[-1]
    assert buffers.name == "norm.running_var"
    assert float(np.abs(theta[buffers.offset] - trace.start[buffers.offset])) > 1e-3, "BatchNorm's buffers are mixed"


# -- the measures alone -----------------------------------------------------------------------------------------------


def test_measures_of_small_numbers() -> None:
    a, b, center = torch.tensor([1.0, 2.0]), torch.tensor([0.0, -1.0]), torch.tensor([0.0, 1.0])
    assert drift([a, b], center, [0.25, 0.75]) == pytest.approx(0.25 * 2 + 0.75 * 4)
    logits = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 4.0]])]
    assert ensemble(logits, [0.5, 0.5]).tolist() == [[0.5, 2.0]]
    assert mixing_gap(torch.tensor([[3.5, 6.0]]), logits, [0.5, 0.5]).tolist() == [5.0]
    assert logits[0].tolist() == [[1.0, 0.0]], "the logits are not changed"


def test_regret_is_the_mean_of_learners_against_their_best() -> None:
    regret = Regret()
    for first, second in [(1.0, 0.5), (0.4, 0.25), (0.6, 0.25)]:
        regret.add({"a": first, "b": second})
    assert regret.value() == pytest.approx(((1 - 0.4) + 0 + (0.6 - 0.4) + 0.25) / 2)
    assert regret.rounds() == 3
