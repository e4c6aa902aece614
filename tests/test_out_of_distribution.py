"""Corruptions and perturbations as part of an evaluation: chosen, measured, kept, and refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import generalist
from generalist.core.errors import GeneralistError
from generalist.data.corruptions import COMMON, EXTRA
from generalist.data.evaluated import images_named
from generalist.data.sets import from_arrays
from generalist.evaluation.corruptions import STABILITY, evaluate_corruptions
from generalist.evaluation.out_of_distribution import FILE, Shift, parse_shift


def linear(inputs: int, classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def evaluate(out: Path | None = None, **settings: Any) -> dict[str, Any]:
    model = linear(64, 10)
    return generalist.evaluate(model, "digits", attacks=["natural"], samples=40, out=out, **settings).summary


def test_families_and_names() -> None:
    assert parse_shift("common", False, None).corruptions == tuple(COMMON)
    every = (*COMMON, *EXTRA)
    assert parse_shift("all", True, None) == Shift(every, STABILITY, grouped=frozenset(every))
    mixed = parse_shift(["fog", "extra", "fog", "spatter"], ["tilt"], None)
    assert mixed == Shift(("fog", *EXTRA), ("tilt",), grouped=frozenset(EXTRA) - {"spatter"})
    assert not parse_shift(None, False, None)


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (("fogg", False, None), "did you mean 'fog'"),
        ((None, ["tilted"], None), "did you mean 'tilt'"),
        ((None, False, "somewhere"), "--corruptions or --perturbations"),
    ],
)
def test_wrong_wishes(wish: tuple[Any, Any, Any], reason: str) -> None:
    with pytest.raises(GeneralistError, match=reason):
        parse_shift(*wish)


def test_result_is_that_of_the_function_and_is_kept(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, corruptions=["contrast", "fog"], perturbations=["brightness"], seed=3)
    found = summary["out_of_distribution"]
    images = images_named("digits")
    index = generalist.api.subset(len(images), 40, 3)
    expected = evaluate_corruptions(linear(64, 10), images, names=["contrast", "fog"], index=index, seed=3)
    assert found["corruptions"] == json.loads(json.dumps(expected.to_dict()))
    assert found["corruptions"]["generated"] is True
    assert list(found["perturbations"]["sequences"]) == ["brightness"]
    assert json.loads((Path(summary["directory"]) / FILE).read_text()) == found
    assert "out_of_distribution" not in json.loads((Path(summary["directory"]) / "summary.json").read_text())


def test_shards_are_refused() -> None:
    with pytest.raises(GeneralistError, match="leave the shards out"):
        evaluate(corruptions="fog", shards="1/2")


def test_what_the_images_do_not_allow_is_told_before_the_attacks(tmp_path: Path) -> None:
    """Not after hours of AutoAttack: nothing has run, and nothing was written."""
    for wish, reason in (
        ({"corruptions": ["fog", "saturate"]}, "saturate needs images of three channels"),
        ({"corruptions": ["all", "saturate"]}, "saturate needs images of three channels"),
        ({"corruptions": "fog", "official": tmp_path}, "CIFAR-10 and -100"),
        ({"perturbations": True, "official": tmp_path}, "CIFAR-10 and -100"),
    ):
        with pytest.raises(GeneralistError, match=reason):
            evaluate(tmp_path / "out", **wish)
    assert not (tmp_path / "out").exists()


def test_groups_leave_out_what_grey_images_cannot_have(tmp_path: Path) -> None:
    summary = evaluate(tmp_path, corruptions="extra")
    found = summary["out_of_distribution"]
    assert list(found["corruptions"]["corruptions"]) == ["speckle_noise", "gaussian_blur", "spatter"]
    note = "corruptions left out, as grey images have no colours: saturate"
    assert found["notes"] == [note] and note in summary["notes"]
    assert note in json.loads((Path(summary["directory"]) / "summary.json").read_text())["notes"]
    common = evaluate(corruptions="common")
    assert common["out_of_distribution"]["notes"] == common["notes"] == []


def test_groups_are_whole_on_images_with_colours() -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)
    found = generalist.evaluate(linear(192, 2), (images, [0, 1, 0, 1]), attacks=["natural"], corruptions="extra")
    assert list(found.summary["out_of_distribution"]["corruptions"]["corruptions"]) == list(EXTRA)
    assert found.summary["notes"] == []


def official(folder: Path, labels: np.ndarray[Any, Any]) -> None:
    """A folder as the official one: darker at every severity."""
    (folder / "CIFAR-10-C").mkdir(parents=True)
    pixels = np.concatenate([np.full((len(labels), 32, 32, 3), 250 - 40 * s, dtype=np.uint8) for s in range(5)])
    np.save(folder / "CIFAR-10-C" / "fog.npy", pixels)
    np.save(folder / "CIFAR-10-C" / "labels.npy", np.tile(labels, 5))


def test_official_files_are_read_instead(tmp_path: Path) -> None:
    labels = np.arange(20) % 10
    official(tmp_path, labels)
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)
    mine = from_arrays(images, labels, classes=[str(i) for i in range(10)])
    settings: dict[str, Any] = {"attacks": ["natural"], "corruptions": "fog", "official": tmp_path}
    found = generalist.evaluate(linear(3072, 10), mine, **settings).summary["out_of_distribution"]["corruptions"]
    assert (found["generated"], found["source"]) == (False, "official files")
    # Every image of a severity is the same, so exactly the 2 of 20 whose label is the answer are right.
    assert {row["correct"] for row in found["corruptions"]["fog"]["severities"].values()} == {2}
    with pytest.raises(GeneralistError, match="other images"):
        generalist.evaluate(
            linear(3072, 10), from_arrays(images, labels[::-1].copy(), classes=mine.classes), **settings
        )
    with pytest.raises(GeneralistError, match="CIFAR-10 and -100"):
        evaluate(corruptions="fog", official=tmp_path)
