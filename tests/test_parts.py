"""Each learner's part of the global learner (`mixing.parts`): what it is, what keeps it, and the dial that mixes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_decay_schedule import JUMPING, same
from test_dial import tiny_run
from training_helpers import (
    L2,
    NATURAL,
    ROBUST,
    assert_engines_agree,
    make_trainer,
    spy_on,
    stopped_and_resumed,
    tiny_recipe,
    train,
)

from generalist import api, dial
from generalist.core.errors import RecipeError, RunError
from generalist.core.run import RunDirectory
from generalist.recipe import Recipe, to_yaml
from generalist.training.artefacts import artefact_file, branch_files, load_weights, save_weights
from generalist.training.loop import Trainer

LATE = {"epochs": [0, 2, 3], "values": [1, 1, 0.4]}
"""Up to epoch 2 the lead learner alone is mixed."""


def recipe(learners: Any = None, *, train_options: dict[str, Any] | None = None, **mixing: Any) -> Recipe:
    options = {"parts": True, "gamma": LATE, "decay": 0.7, "redistribution": {"every": 2, "start_epoch": 2}, **mixing}
    return tiny_recipe(learners or [NATURAL, ROBUST], mixing=options, train=train_options or {})


def parts_of(trainer: Trainer) -> tuple[list[np.ndarray], list[float]]:
    parts = [learner.part for learner in trainer.learners]
    assert all(parts)
    return [part.vector.numpy().copy() for part in parts if part], [float(part.share) for part in parts if part]


def assert_they_make_the_global_learner(trainer: Trainer) -> None:
    vectors, shares = parts_of(trainer)
    assert sum(shares) == pytest.approx(1, abs=1e-12)
    whole = sum(share * vector for share, vector in zip(shares, vectors, strict=True))
    np.testing.assert_allclose(whole, trainer.global_learner.vector.numpy(), rtol=0, atol=1e-12)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no warm-up": {"warmup": False},
    "decay that changes, down to 0": {"decay": JUMPING, "warmup": False},
    "own averages": {"source": "averaged"},
    "every iteration": {"redistribution": {"every": 1, "start_epoch": 3, "when": "every-iteration"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("count", [2, 3])
def test_a_part_is_the_average_of_what_a_learner_has_given(tmp_path: Path, variant: str, count: int) -> None:
    """Restated in numpy: sources weighted by (1 - d_k) gamma_a(k) and all d that followed; the start is the lead's."""
    averaging = {"averaging": {"decay": 0.5}} if variant == "own averages" else {}
    learners = [{**each, **averaging} for each in (NATURAL, ROBUST, L2)[:count]]
    trainer = make_trainer(recipe(learners, **VARIANTS[variant]), tmp_path)
    trace, mixing = spy_on(trainer), trainer.job.mixing
    trainer.run()
    names = [learner.name for learner in trainer.learners]
    sums = {name: np.zeros_like(trace.start) for name in names}
    shares = dict.fromkeys(names, 0.0) | {"robust": 1.0}
    sums["robust"] += trace.start
    steps = len(trace.mixed)
    for k in range(steps):
        position = k / trainer.steps_per_epoch
        d = mixing.decay_at(position, trainer.job.train.epochs)
        d = min(d, (k + 1) / (k + 10)) if mixing.warmup else d
        for name, gamma in zip(names, trainer.job.gammas_at(position), strict=True):
            after = trace.after[name][k]
            given = after.average if averaging else after.weights
            assert given is not None
            sums[name] = d * sums[name] + (1 - d) * gamma * given
            shares[name] = d * shares[name] + (1 - d) * gamma
    assert steps == 12 and 0 < shares["natural"] < 1
    vectors, found = parts_of(trainer)
    assert found == pytest.approx(list(shares.values()), abs=1e-12)
    for name, vector in zip(names, vectors, strict=True):
        np.testing.assert_allclose(vector, sums[name] / shares[name], rtol=0, atol=1e-11, err_msg=name)
    assert_they_make_the_global_learner(trainer)


def test_one_who_has_given_nothing_has_no_share(tmp_path: Path) -> None:
    trainer = make_trainer(recipe(train_options={"epochs": 2}, gamma=1), tmp_path)
    start = trainer.global_learner.vector.clone()
    trainer.run()
    vectors, shares = parts_of(trainer)
    assert shares == [0, 1]
    np.testing.assert_array_equal(vectors[0], start.numpy())
    np.testing.assert_array_equal(vectors[1], trainer.global_learner.vector.numpy())


def test_training_is_as_without_them(tmp_path: Path) -> None:
    without = train(recipe(parts=False), tmp_path / "without")
    having = train(recipe(), tmp_path / "having").live_tensors()
    assert all(torch.equal(tensor, having[name]) for name, tensor in without.live_tensors().items())
    assert set(having) - set(without.live_tensors()) == {
        f"learner.{name}.part.{what}" for name in ("natural", "robust") for what in ("weights", "counters", "share")
    }


def test_they_go_along_with_what_an_epochs_end_moves(tmp_path: Path) -> None:
    ramp = {**ROBUST, "objective": {"kind": "ramp", "beside": [{"norm": "l2", "eps": 0.2}]}}
    trainer = make_trainer(recipe([NATURAL, ramp], gamma=0.6), tmp_path)
    moved = []
    follow = trainer.global_learner.follow

    def spied(learners: Any, moves: Any, gammas: Any, *, steps: int) -> None:
        follow(learners, moves, gammas, steps=steps)
        moved.append(any(bool(move.any()) for move in moves.values()))
        assert_they_make_the_global_learner(trainer)

    trainer.global_learner.follow = spied  # type: ignore[method-assign]
    trainer.run()
    assert any(moved)


def test_a_run_that_was_stopped_goes_on_with_them(tmp_path: Path) -> None:
    whole = train(recipe(), tmp_path / "whole")
    resumed = stopped_and_resumed(recipe(), tmp_path / "stopped", epoch=3)
    assert same(whole, resumed)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    options = {"snapshots": {"every": 1}}
    run, _ = tiny_run(tmp_path_factory.mktemp("parts") / "source", recipe(train_options=options))
    return run


def branch(source: RunDirectory, wanted: str, out: Path, *, names: tuple[str, ...] = ("natural", "robust")) -> Trainer:
    options = recipe(train_options={"start_epoch": 3}, warmup=False)
    trainer = make_trainer(options, out)
    trainer.start_from(branch_files(f"{source.path}@{wanted}", names))
    return trainer


def test_a_branch_goes_on_with_them(source: RunDirectory, tmp_path: Path) -> None:
    trainer = branch(source, "3", tmp_path / "branch")
    vectors, shares = parts_of(trainer)
    assert 0 < shares[0] < 1
    for name, vector in zip(("natural", "robust"), vectors, strict=True):
        state, about = load_weights(source.snapshots / "3" / f"{name}.part.safetensors")
        assert about["share"] == shares[trainer.learners[0].name != name]
        np.testing.assert_array_equal(vector, trainer.learners[0].flat.read(state)[0].numpy())
    assert_they_make_the_global_learner(trainer)
    trainer.run()
    assert_they_make_the_global_learner(trainer)


def test_a_branch_of_the_global_learner_alone_begins_with_it(source: RunDirectory, tmp_path: Path) -> None:
    trainer = branch(source, "3", tmp_path / "branch", names=())
    vectors, shares = parts_of(trainer)
    assert shares == pytest.approx([0.6, 0.4]), "gamma at that epoch"
    assert all(np.array_equal(vector, trainer.global_learner.vector.numpy()) for vector in vectors)
    trainer.run()
    assert_they_make_the_global_learner(trainer)


def test_learners_from_places_of_their_own_begin_as_their_own_parts(source: RunDirectory, tmp_path: Path) -> None:
    files = {name: source.snapshots / "3" / f"{name}.safetensors" for name in ("natural", "robust")}
    trainer = make_trainer(recipe(gamma=0.7), tmp_path / "branch")
    trainer.start_from(files)
    assert_they_make_the_global_learner(trainer)
    vectors, shares = parts_of(trainer)
    assert shares == pytest.approx([0.3, 0.7])
    np.testing.assert_array_equal(vectors[0], trainer.learners[0].flat.vector.numpy())


def test_a_branch_with_fewer_learners_makes_its_global_learner_anew(tmp_path: Path) -> None:
    """The parts of some of a run's learners are not all of its global learner."""
    early = {"epochs": [0, 1], "values": [1, 0.4]}
    three, _ = tiny_run(tmp_path / "three", recipe([NATURAL, ROBUST, L2], gamma=early))
    trainer = branch(three, "4", tmp_path / "two")
    assert_they_make_the_global_learner(trainer)
    vectors, _ = parts_of(trainer)
    assert all(np.array_equal(vector, trainer.global_learner.vector.numpy()) for vector in vectors)


@pytest.mark.parametrize("share", [None, "much", True, -0.1, 2, float("nan")])
def test_a_part_without_a_share_is_damaged(source: RunDirectory, tmp_path: Path, share: Any) -> None:
    names = {"natural": "natural.part", "robust": "robust.part"}
    files = {"global": source.snapshots / "3" / "global.safetensors"}
    for name, stem in names.items():
        state, about = load_weights(source.snapshots / "3" / f"{stem}.safetensors")
        files |= {name: source.snapshots / "3" / f"{name}.safetensors", stem: tmp_path / f"{stem}.safetensors"}
        save_weights(files[stem], state, {**about, "share": share})
    with pytest.raises(RunError, match=r"part\.safetensors is damaged: its header says no share"):
        make_trainer(recipe(), tmp_path / "branch").start_from(files)


# -- the dial ---------------------------------------------------------------------------------------------------------


def test_the_dial_mixes_them_and_finds_the_runs_own_network(source: RunDirectory) -> None:
    learners = dial.learners_of(source)
    assert learners.source == "parts" and sum(learners.own_gamma.values()) == pytest.approx(1, abs=1e-12)
    assert learners.own_gamma != pytest.approx(learners.recipe.gammas_at(4)), "what was given before counts as well"
    turned = dial.Dial(learners, device="cpu").turn(list(learners.own_gamma.values()), statistics="mixed")
    own, _ = load_weights(source.last)
    for name, tensor in turned.state.items():
        torch.testing.assert_close(tensor, own[name], rtol=0, atol=1e-12)
    assert turned.about["mix"]["source"] == "parts" and "share" not in turned.about
    raw = dial.learners_of(source, source="raw")
    assert list(raw.own_gamma.values()) == raw.recipe.gammas_at(4)
    assert dial.mixture_file(raw, raw.own_gamma).name.endswith("-raw.safetensors")
    assert not dial.mixture_file(learners, learners.own_gamma).name.endswith("-parts.safetensors")


def test_a_learner_that_has_given_nothing_yet_has_no_part_to_mix(source: RunDirectory) -> None:
    """Its part is what it began from: mixed by any share it would spoil the network."""
    with pytest.raises(RunError, match=r"by epoch 2 natural has given nothing .* mix raw, or choose another epoch"):
        dial.learners_of(source, 2)
    assert dial.learners_of(source, 2, source="raw").own_gamma == {"natural": 0.0, "robust": 1.0}
    for asked in (
        lambda: artefact_file(f"{source.path}@2#natural.part", "x"),
        lambda: api.load(source, which="natural.part@2"),
    ):
        with pytest.raises(RunError, match=r"2/natural\.part\.safetensors: by then the learner had given nothing"):
            asked()


def test_a_run_without_them_says_so(tmp_path: Path) -> None:
    run, _ = tiny_run(tmp_path / "run", recipe(parts=False))
    assert dial.learners_of(run).source == "raw"
    with pytest.raises(RunError, match=r"kept no parts of its global learner: train with `mixing\.parts=true`"):
        dial.learners_of(run, source="parts")


def test_a_part_is_a_place_to_start_from(source: RunDirectory, tmp_path: Path) -> None:
    source.recipe.write_text(to_yaml(recipe()))
    files = branch_files(f"{source.path}@4", ["robust.part"])
    assert files["robust.part"].is_file()


def test_one_learner_has_no_use_for_them() -> None:
    with pytest.raises(RecipeError, match=r"mixing\.parts: .*one learner"):
        recipe([ROBUST])


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_graph_equals_eager_in_float64(tmp_path: Path, compiled: str) -> None:
    overrides = ["mixing.parts=true", "mixing.gamma=0.7", f"train.compile={compiled}"]
    assert_engines_agree("digits-d", tmp_path, overrides=[*overrides, "mixing.redistribution.every=1"], learner=0)
