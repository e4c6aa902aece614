"""SVHN, cropped digits: MATLAB files, read with scipy (the extra `generalist-at[svhn]`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from generalist.core.errors import DataError
from generalist.data.files import find_file
from generalist.data.sets import DATASETS, ImageSet, from_arrays

FILES = ("train_32x32.mat", "test_32x32.mat")
MOST_VALUES = 2**31
"""Values in one array of a file; SVHN's largest set has 1.6e9. A small compressed file can claim any number."""


@DATASETS.register("svhn")
def load_svhn(root: Path) -> tuple[ImageSet, ImageSet | None]:
    """73,257 training and 26,032 test images of house-number digits [3,32,32]."""
    directory = find_file(root, "svhn", [FILES]).parent
    return read_svhn(directory / FILES[0]), read_svhn(directory / FILES[1])


def read_svhn(path: Path) -> ImageSet:
    """One .mat file: X of shape [H,W,3,N] and y in 1..10, where 10 stands for the digit 0."""
    content = _read_mat(path)
    images, labels = content.get("X"), content.get("y")
    if not isinstance(images, np.ndarray) or not isinstance(labels, np.ndarray):
        raise DataError(f"{path} has no arrays X and y: download it again")
    if images.ndim != 4 or images.shape[2] != 3 or images.dtype != np.uint8:
        raise DataError(f"{path}: X must be uint8 [H,W,3,N], not {images.dtype} {images.shape}: download it again")
    labels = labels.reshape(-1)
    if labels.dtype.kind not in "iu" or labels.size == 0 or labels.min() < 1 or labels.max() > 10:
        raise DataError(f"{path}: the labels y must be 1..10: download it again")
    classes = [str(digit) for digit in range(10)]
    images = images.transpose(3, 2, 0, 1)
    return from_arrays(images, labels.astype(np.int64) % 10, classes=classes, name="svhn", layout="NCHW")


def _read_mat(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat, whosmat
    except ImportError as error:
        raise DataError("SVHN's files need scipy: pip install 'generalist-at[svhn]'") from error
    try:
        for name, shape, _ in whosmat(str(path)):
            if name in ("X", "y") and math.prod(shape) > MOST_VALUES:
                raise ValueError(f"{name} of shape {shape} is larger than any set of SVHN")
        content: dict[str, Any] = loadmat(str(path), variable_names=["X", "y"])
    except Exception as error:  # scipy's parser fails in many ways on a damaged file
        raise DataError(f"cannot read {path}: {error}; download it again") from error
    return content
