"""The stability experiment at a tiny size, and its arithmetic by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from generalist.core.errors import DataError
from generalist.data.digits import load_digits
from generalist.data.sets import ImageSet, to_unit
from generalist.experiments import stability
from generalist.experiments.stability import (
    ENSEMBLE,
    GLOBAL,
    MIXED,
    Change,
    Points,
    compare,
    outcome,
    replaced,
    run_once,
)

EPOCHS, IMAGES = 2, 64


@pytest.fixture(scope="module")
def digits() -> tuple[ImageSet, ImageSet, ImageSet]:
    pool, test = load_digits()
    base = ImageSet(pool.images[:IMAGES], pool.labels[:IMAGES], pool.classes, pool.name)
    return base, pool, ImageSet(test.images[:40], test.labels[:40], test.classes, test.name)


def test_equal_data_change_nothing_and_one_example_changes_every_network(
    tmp_path: Path, digits: tuple[ImageSet, ImageSet, ImageSet]
) -> None:
    base, pool, test = digits
    points = Points(to_unit(test.images), test.labels)
    other = replaced(base, 3, pool, IMAGES + 5)
    data = {"first": base, "again": base, "other": other}
    runs = {name: run_once(part, test, tmp_path / name, epochs=EPOCHS, every=0) for name, part in data.items()}
    first, again, changed = (outcome(run, points) for run in runs.values())
    assert set(first.losses) == {"linf", "natural", "l2", ENSEMBLE, MIXED, GLOBAL}
    same = compare(first, again)
    assert all(not difference.any() for difference in same.differences.values())
    assert same.weighted() == 0
    change = compare(first, changed)
    assert all(difference.max() > 0 for difference in change.differences.values())
    assert change.drift > 0


def test_only_one_example_is_replaced(digits: tuple[ImageSet, ImageSet, ImageSet]) -> None:
    base, pool, _ = digits
    other = replaced(base, 3, pool, IMAGES + 5)
    differs = (other.images != base.images).flatten(1).any(1)
    assert differs.nonzero().flatten().tolist() == [3]
    assert torch.equal(other.images[3], pool.images[IMAGES + 5]) and other.labels[3] == pool.labels[IMAGES + 5]
    assert torch.equal(base.images, pool.images[:IMAGES])


def test_the_bound_by_hand() -> None:
    differences = {"a": [1.0, 0.0], "b": [0.0, 2.0], ENSEMBLE: [0.1, 1.7], MIXED: [1.2, 2.1], GLOBAL: [0.5, 1.0]}
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in differences.items()}
    change = Change({"a": 0.25, "b": 0.75}, tensors, torch.tensor([0.3, 0.4]), drift=0.5)
    assert math.isclose(change.weighted(), 0.25 * 1 + 0.75 * 2)
    assert math.isclose(change.constant(MIXED), (2.1 - 1.75) / 0.5)
    assert change.constant(GLOBAL) == 0
    assert torch.allclose(change.lemma_excess(), torch.tensor([0.1 - 0.25, 1.7 - 1.5], dtype=torch.float64))
    assert Change(change.gammas, tensors, change.mixing_terms, drift=0.0).constant(MIXED) == math.inf


def test_the_table_has_every_network(tmp_path: Path) -> None:
    changes = stability.measure(tmp_path, images=IMAGES, epochs=1, pairs=1)
    assert {kind: len(found) for kind, found in changes.items()} == {"natural": 1, "attacked": 1}
    shown = stability.rows(changes)
    assert len([name for name in shown if "learner, gamma" in name]) == 3
    assert {MIXED, GLOBAL, ENSEMBLE, "drift (mean)"} <= shown.keys()
    assert all(len(cells) == 4 for cells in shown.values())
    assert stability.table({"here": changes}).row_count == len(shown) + 1


def test_a_training_set_without_replacements_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="images must be 1 to"):
        stability.measure(tmp_path, images=1297)
