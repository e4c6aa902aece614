"""One epoch through every ImageNet recipe, on a small generated folder of 224-pixel images."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from generalist import load, train
from generalist.shipped import shipped_names

pytestmark = pytest.mark.slow

RECIPES = [name for name in shipped_names() if name.startswith("imagenet-")]
CHANGES = [
    "train.epochs=1",
    "train.batch_size=2",
    "train.precision=fp32",
    "train.checkpoint_minutes=60",
    "train.snapshots.dtype=fp16",
    "validation.images=2",
    "validation.steps=1",
    "data.workers=1",
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of three training and one validation image each: one of them bright, in both formats."""
    root = tmp_path_factory.mktemp("imagenet")
    noise = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 1)):
        for label in range(2):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 128, (240, 256, 3), dtype=np.uint8) + np.uint8(120 * label)
                suffix = "JPEG" if number % 2 else "png"
                Image.fromarray(pixels).save(folder / f"{number}.{suffix}")
    return root


def test_all_six_are_here() -> None:
    assert len(RECIPES) == 6


@pytest.mark.parametrize("name", RECIPES)
def test_one_epoch(name: str, images: Path, tmp_path: Path) -> None:
    learners = [part for part in ("linf", "l2") if part == "linf" or not name.endswith("-d")]
    steps = [f"learners.{learner}.attack.steps=1" for learner in learners]
    run = train(name, overrides=[f"data.root={images}", *CHANGES, *steps], out=tmp_path / "run", device="cpu")
    (record,) = run.read_metrics()
    assert set(record["train"]) >= set(learners)
    assert all(math.isfinite(values["loss"]) for values in record["train"].values())
    assert set(record["validation"]["accuracy"]) == {"global", *record["train"]}
    assert run.model.is_file() and run.last.is_file() and (run.snapshots / "1" / "linf.safetensors").is_file()
    logits = load(run, which="last")(torch.zeros(1, 3, 224, 224))
    assert logits.shape == (1, 2) and bool(logits.isfinite().all())
    shutil.rmtree(run.path)  # gigabytes of checkpoints
