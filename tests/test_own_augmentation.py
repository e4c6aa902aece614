"""A learner with an augmentation of its own sees the shared batch's samples in its own way; the others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_helpers import (
    NATURAL,
    ROBUST,
    assert_engines_agree,
    batches_of,
    make_trainer,
    stopped_and_resumed,
    tiny_recipe,
    train,
)

from generalist.core.errors import GeneralistError
from generalist.data.sets import ImageSet
from generalist.objectives.part import PixelReweighted

SHARED = {"crop": 1, "flip": True}
PLAIN = {"crop": 0, "flip": False}


def test_one_learner_sees_plain_images(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_recipe([ROBUST, {**NATURAL, "augmentation": PLAIN}]), tmp_path)
    seen = batches_of(trainer)
    differ = 0
    for plain, shared in zip(seen["natural"], seen["robust"], strict=True):
        raw = trainer.train_images.batch(plain.index)
        assert torch.equal(plain.index, shared.index) and torch.equal(plain.y, shared.y)
        assert plain.x.dtype == shared.x.dtype == torch.float64
        assert torch.equal(plain.x, raw.x.double())
        differ += not torch.equal(shared.x, plain.x)
    assert differ == 12


def test_it_is_the_shared_one_where_it_says_the_same(tmp_path: Path) -> None:
    same = train(tiny_recipe([ROBUST, {**NATURAL, "augmentation": SHARED}]), tmp_path / "same")
    shared = train(tiny_recipe([ROBUST, NATURAL]), tmp_path / "shared")
    other = train(tiny_recipe([ROBUST, {**NATURAL, "augmentation": PLAIN}]), tmp_path / "other")
    assert torch.equal(same.global_learner.vector, shared.global_learner.vector)
    assert not torch.equal(other.learners[1].flat.vector, shared.learners[1].flat.vector)


def test_its_own_cutout_comes_on_top(tmp_path: Path) -> None:
    learner = {**NATURAL, "augmentation": PLAIN, "cutout": 2}
    trainer = make_trainer(tiny_recipe([learner]), tmp_path)
    for batch in batches_of(trainer)["natural"]:
        raw = trainer.train_images.batch(batch.index).x.double()
        hole = batch.x == 0
        assert torch.equal(batch.x[~hole], raw[~hole]) and 1 <= int(hole[0].sum()) <= 4


def test_masks_follow_it(tmp_path: Path) -> None:
    learner = {**ROBUST, "objective": "part", "augmentation": {"crop": 2, "flip": True}}
    objective = make_trainer(tiny_recipe([learner]), tmp_path).learners[0].objective
    assert isinstance(objective, PixelReweighted) and objective.learner.padding == 2


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    recipe = tiny_recipe([ROBUST, {**NATURAL, "augmentation": {"crop": 2, "erase": 0.5, "color": 0.3}}])
    whole = train(recipe, tmp_path / "whole")
    resumed = stopped_and_resumed(recipe, tmp_path / "parts", epoch=2)
    assert torch.equal(whole.global_learner.vector, resumed.global_learner.vector)


def test_one_that_loses_the_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GeneralistError, match=r"set learners\.1\.augmentation\.crop below 4"):
        make_trainer(tiny_recipe([ROBUST, {**NATURAL, "augmentation": {"crop": 4}}]), tmp_path)


def test_streamed_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageSet, "resident", False)
    with pytest.raises(GeneralistError, match=r"learners\.1\.augmentation.*data\.resident"):
        make_trainer(tiny_recipe([ROBUST, {**NATURAL, "augmentation": PLAIN}]), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_graph_equals_eager_in_float64(tmp_path: Path, compiled: str) -> None:
    own = 'learners.natural.augmentation={"crop": 0, "shift": 2, "erase": 0.5, "flip": false}'
    assert_engines_agree("digits-d", tmp_path, overrides=[own, f"train.compile={compiled}"], learner=1)
