"""Memory: what the state of training takes, and that nothing is kept from one iteration to the next."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import NATURAL, ROBUST, make_trainer, tiny_recipe

from generalist.training.loop import Listener


def live_bytes() -> int:
    """Bytes of all storages that some tensor still holds, each counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        # Exactly these: isinstance wakes lazy deprecated things, and a compiler's stand-ins have no memory.
        # Sparse tensors, which other tests hold, have no storage of their own: it belongs to their parts.
        if type(thing) not in (torch.Tensor, torch.nn.Parameter):
            continue
        if thing.device.type != "meta" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("averaging", [None, {"decay": 0.999}])
def test_the_state_is_as_large_as_the_method_needs(tmp_path: Path, averaging: dict[str, Any] | None) -> None:
    learners = [{**ROBUST, "averaging": averaging}, {**NATURAL, "averaging": averaging}]
    recipe = tiny_recipe(learners, model={"name": "resnet18"}, train={"precision": "fp32"})
    before = live_bytes()
    trainer = make_trainer(recipe, tmp_path)
    taken = live_bytes() - before
    parameters = sum(parameter.numel() for parameter in trainer.learners[0].model.parameters())
    assert parameters > 11_000_000
    per_learner = 3 + (averaging is not None)  # weights, gradients, momenta, and the average
    expected = 4 * parameters * (2 * per_learner + 1)
    assert taken == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
def test_two_thousand_iterations_leave_nothing_behind(tmp_path: Path) -> None:
    measured: dict[int, int] = {}

    def iteration(done: int, total: int) -> None:
        if done in (20, 2000):
            measured[done] = live_bytes()

    learners = [
        {**ROBUST, "attack": {"steps": 1}, "averaging": {"decay": 0.9}},
        {**NATURAL, "optimizer": {"kind": "adam", "lr": 0.001}},
    ]
    recipe = tiny_recipe(
        learners,
        data={"augmentation": {"crop": 0, "flip": False}},
        mixing={"redistribution": {"every": 2, "start_epoch": 2}},
        train={"epochs": 100, "batch_size": 1, "checkpoint_epochs": 50, "last_batch": "drop"},
        validation={"images": 4, "every": 10, "steps": 1},
    )
    trainer = make_trainer(recipe, tmp_path, listener=Listener(iteration=iteration))
    assert trainer.steps_per_epoch == 20
    trainer.run()
    assert measured[20] > 0
    assert measured[2000] == measured[20]
