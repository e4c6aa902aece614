"""The 1,797 handwritten digits of 8x8 pixels that come with the package: no download, seconds to train on.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, CC BY 4.0
(see THIRD_PARTY.md). The test part of the original; its values 0..16 are stored as round(v * 255 / 16).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np

from generalist.data.sets import DATASETS, ImageSet, from_arrays
from generalist.data.split import hold_out

TEST_COUNT = 500
SPLIT_SEED = 0  # fixed, as the test split is part of the data set's definition instead of a recipe's


def load_digits() -> tuple[ImageSet, ImageSet]:
    """1,297 training and 500 test images [1,8,8]; the test split has 50 of each digit."""
    source = resources.files("generalist.data") / "digits.npz"
    with source.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        whole = from_arrays(arrays["images"], arrays["labels"].astype(np.int64), name="digits")
    train, test = hold_out(whole.labels, count=TEST_COUNT, classes=10, seed=SPLIT_SEED)
    return (
        ImageSet(whole.images[train], whole.labels[train], whole.classes, "digits"),
        ImageSet(whole.images[test], whole.labels[test], whole.classes, "digits"),
    )


@DATASETS.register("digits")
def load(root: Path) -> tuple[ImageSet, ImageSet | None]:
    """The embedded digits; nothing is read from the root."""
    return load_digits()
