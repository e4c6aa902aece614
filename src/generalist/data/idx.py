"""MNIST and Fashion-MNIST: the IDX format, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from generalist.core.errors import DataError
from generalist.data.files import find_file
from generalist.data.sets import DATASETS, ImageSet, from_arrays

_UNSIGNED_BYTE = 8
MAX_BYTES = 1 << 30
"""No IDX file of these data sets is anywhere near a gibibyte; a header that claims so is damaged."""

FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip
STEMS = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def read_idx(path: Path, *, dimensions: int) -> np.ndarray[Any, Any]:
    """The bytes of an IDX file as an array with that many dimensions. The header is checked before memory is taken."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            header = stream.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions:
                raise DataError(f"{path} ends inside its header: download it again")
            if header[:4] != bytes([0, 0, _UNSIGNED_BYTE, dimensions]):
                raise DataError(f"{path} is not an IDX file of bytes in {dimensions} dimensions: download it again")
            sizes = struct.unpack(f">{dimensions}I", header[4:])
            expected = math.prod(sizes)
            if not 0 < expected <= MAX_BYTES:
                raise DataError(f"{path} claims the sizes {sizes}: it is empty or damaged; download it again")
            content = stream.read(expected + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}; download it again") from error
    if len(content) != expected:
        more = "more" if len(content) > expected else "fewer"
        raise DataError(f"{path} has {more} bytes than its header says ({expected}): download it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(sizes)


@DATASETS.register("mnist")
def load_mnist(root: Path) -> tuple[ImageSet, ImageSet | None]:
    """60,000 training and 10,000 test images of handwritten digits [1,28,28]."""
    return _load(root, "mnist", [str(digit) for digit in range(10)])


@DATASETS.register("fashion-mnist")
def load_fashion_mnist(root: Path) -> tuple[ImageSet, ImageSet | None]:
    """60,000 training and 10,000 test images of clothes [1,28,28]."""
    return _load(root, "fashion-mnist", FASHION_CLASSES)


def _load(root: Path, name: str, classes: list[str]) -> tuple[ImageSet, ImageSet]:
    # The two data sets have the same file names, so the files are never looked up in the root itself.
    directory = find_file(root, name, [[STEMS[0]], [f"{STEMS[0]}.gz"]], own_only=True).parent
    images, labels, test_images, test_labels = (
        read_idx(_plain_or_gzip(directory, stem), dimensions=3 if "images" in stem else 1) for stem in STEMS
    )
    return (
        from_arrays(images, labels, classes=classes, name=name),
        from_arrays(test_images, test_labels, classes=classes, name=name),
    )


def _plain_or_gzip(directory: Path, stem: str) -> Path:
    plain = directory / stem
    return plain if plain.is_file() else directory / f"{stem}.gz"
