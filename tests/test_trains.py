"""A learner that trains a part of the network: the rest keeps, bit for bit, what was handed to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_helpers import (
    L2,
    NATURAL,
    ROBUST,
    assert_engines_agree,
    fresh_model,
    make_trainer,
    spy_on,
    stopped_and_resumed,
    tiny_recipe,
    train,
)

from generalist.core.errors import GeneralistError
from generalist.training.learner import resting, resting_weights
from generalist.training.loop import Trainer

ALONE = {"redistribution": {"every": 0}}


def state(trainer: Trainer, learner: int = 0) -> dict[str, Tensor]:
    return trainer.learners[learner].flat.state_dict()


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The modules of which anything has changed."""
    return {name.partition(".")[0] for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def test_it_is_a_plain_loop_over_some_parameters(tmp_path: Path) -> None:
    learner = {**NATURAL, "trains": ["linear"], "schedule": {"fractions": [0, 1], "values": [1, 1]}}
    trainer = make_trainer(tiny_recipe([learner], mixing=ALONE), tmp_path)
    trace, model = spy_on(trainer), fresh_model(trainer)
    trainer.run()
    model.eval()  # BatchNorm by its running statistics; nothing else in it has modes
    optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for batch in trace.batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    expected = model.state_dict()
    for name, tensor in state(trainer).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("trains", [["linear"], ["norm"], ["conv", "linear"]])
def test_the_rest_stays_bit_for_bit(tmp_path: Path, kind: str, trains: list[str]) -> None:
    learner = {**ROBUST, "trains": trains, "optimizer": {"kind": kind, "lr": 0.02, "weight_decay": 0.1}}
    trainer = make_trainer(tiny_recipe([learner], mixing=ALONE), tmp_path)
    before = state(trainer)
    trainer.run()
    assert changed(before, state(trainer)) == set(trains)


def test_statistics_are_learnt_where_batchnorm_is_trained(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_recipe([{**ROBUST, "trains": ["norm"]}], mixing=ALONE), tmp_path)
    before = state(trainer)
    trainer.run()
    after = state(trainer)
    assert int(after["norm.num_batches_tracked"]) == int(before["norm.num_batches_tracked"]) + 12
    assert not torch.equal(after["norm.running_mean"], before["norm.running_mean"])


@pytest.mark.parametrize(
    ("objective", "kind"), [("ramp", "ramp"), ({"kind": "awp", "around": "ar-at"}, "ar-at")], ids=["ramp", "awp"]
)
def test_a_second_network_that_would_be_trained_whole_is_refused(objective: Any, kind: str) -> None:
    with pytest.raises(GeneralistError, match=f"'{kind}' trains a second network, all of it; leave `trains` out"):
        tiny_recipe([{**ROBUST, "objective": objective, "trains": ["linear"]}])


def test_an_attack_that_would_wake_the_rest_is_refused() -> None:
    with pytest.raises(GeneralistError, match="would put the resting part into training mode"):
        tiny_recipe([{**ROBUST, "attack": {"batchnorm": "train"}, "trains": ["linear"]}])


def test_a_weight_that_is_also_in_the_part_is_trained() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.tail = nn.Linear(4, 4), nn.Linear(4, 4)
            self.tail.weight = self.stem.weight

    model = Tied()
    fixed = resting_weights(model, resting(model, ["tail"], learner="one"))
    assert [id(tensor) for tensor in fixed] == [id(model.stem.bias)]


def test_an_objective_that_touches_the_weights_itself(tmp_path: Path) -> None:
    learner = {**ROBUST, "objective": {"kind": "awp", "around": "at"}, "trains": ["linear"]}
    trainer = make_trainer(tiny_recipe([learner], mixing=ALONE), tmp_path)
    before = state(trainer)
    trainer.run()
    assert changed(before, state(trainer)) == {"linear"}


def test_the_rest_is_the_global_learners_after_redistribution(tmp_path: Path) -> None:
    """Redistribution after epoch 2 of 3: from there on the natural learner's convolution is the global one of then."""
    recipe = tiny_recipe(
        [ROBUST, {**NATURAL, "trains": ["linear"]}],
        mixing={"gamma": 0.5, "redistribution": {"start_epoch": 2, "every": 2}},
        train={"epochs": 3},
    )
    trainer = make_trainer(recipe, tmp_path)
    start, trace = state(trainer, 1), spy_on(trainer)
    trainer.run()
    flat = trainer.learners[1].flat
    handed_out = flat.state_dict(torch.from_numpy(trace.mixed[5]), torch.from_numpy(trace.mixed_counters[5]))
    after = state(trainer, 1)
    assert "conv" in changed(start, after)
    assert changed(handed_out, after) == {"linear"}


def test_neighbours_train_all(tmp_path: Path) -> None:
    alone = train(tiny_recipe([ROBUST], mixing=ALONE), tmp_path / "alone")
    among = train(tiny_recipe([{**NATURAL, "trains": ["linear"]}, ROBUST], mixing=ALONE), tmp_path / "among")
    assert torch.equal(alone.learners[0].flat.vector, among.learners[1].flat.vector)


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    recipe = tiny_recipe([ROBUST, {**NATURAL, "trains": ["linear", "norm"]}, L2])
    whole = train(recipe, tmp_path / "whole")
    resumed = stopped_and_resumed(recipe, tmp_path / "parts", epoch=2)
    assert torch.equal(whole.global_learner.vector, resumed.global_learner.vector)
    assert torch.equal(whole.learners[1].flat.vector, resumed.learners[1].flat.vector)


def test_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GeneralistError, match=r"'natural': trains: .* no module 'head'; it has conv, norm, linear"):
        make_trainer(tiny_recipe([ROBUST, {**NATURAL, "trains": ["linear", "head"]}]), tmp_path)


def test_a_part_without_weights_is_refused() -> None:
    with pytest.raises(GeneralistError, match="no weights in 1"):
        resting(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["1"], learner="natural")


@pytest.mark.gpu
def test_graph_equals_eager_in_float64(tmp_path: Path) -> None:
    part = 'learners.natural.trains=["features.9", "features.10", "classifier"]'
    assert_engines_agree("digits-d", tmp_path, overrides=[part], learner=1)
