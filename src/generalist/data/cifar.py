"""CIFAR-10 and CIFAR-100 in their python (pickle) and binary layouts.

Unpickling can run any code, so the pickles are read by an unpickler that knows only four names, and these are stand-ins
that only store what they are given: a crafted file can describe bytes, but not act.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from generalist.core.errors import DataError
from generalist.data.files import find_file
from generalist.data.sets import DATASETS, ImageSet, from_arrays

PIXELS = 3 * 32 * 32
MAX_BYTES = 1 << 28
"""The largest file of either data set has 155 MB; a larger one is not what its name says."""

CLASSES_10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CLASSES_100 = [
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
]  # fmt: skip

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class _Array:
    """Stands in for numpy.ndarray while a pickle is read: stores the state that would have been set."""

    state: Any = None

    def __init__(self, *ignored: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype:
    """Stands in for numpy.dtype: stores the type's code."""

    def __init__(self, code: Any = None, *ignored: Any) -> None:
        self.code = code

    def __setstate__(self, state: Any) -> None:
        pass


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _RestrictedUnpickler(pickle._Unpickler):
    """In Python: a file of nine bytes can make the C unpickler allocate a table of gigabytes (LONG_BINPUT)."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.left = len(content)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("_codecs", "encode"):
            return self._encode
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}, which no CIFAR file needs")
        return _ALLOWED[module_name, global_name]

    def _encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        """How Python 3 writes bytes in an old pickle protocol. A text is stored once, and encoded once."""
        if encoding != "latin1" or not isinstance(text, str):
            raise pickle.UnpicklingError("only latin1 text is expected")
        self.left -= len(text)
        if self.left < 0:
            raise pickle.UnpicklingError("it encodes more text than it has")
        return text.encode("latin1")


def read_pickle(path: Path, *, label_key: bytes, classes: int) -> Arrays:
    """Images uint8 [N,3,32,32] and labels of a file in the python layout."""
    content = _read(path)
    try:
        entries = _RestrictedUnpickler(content).load()
    except Exception as error:  # a crafted pickle can fail in any way, which must not look like a fault of ours
        raise DataError(f"{path} is not a CIFAR file: {error}; download it again") from error
    if not isinstance(entries, dict):
        raise DataError(f"{path} is not a CIFAR file: download it again")
    images = _unpickled_images(entries.get(b"data"), path)
    labels = entries.get(label_key)
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < classes for label in labels):
        raise DataError(f"{path}: {label_key.decode()} must be a list of numbers below {classes}: download it again")
    if len(labels) != len(images):
        raise DataError(f"{path} has {len(images)} images but {len(labels)} labels: download it again")
    return images, np.asarray(labels, dtype=np.int64)


def _unpickled_images(data: Any, path: Path) -> np.ndarray[Any, Any]:
    """The array behind a stand-in, if it holds plain bytes of whole images in C order."""
    state = data.state if isinstance(data, _Array) else None
    if not isinstance(state, tuple) or len(state) != 5:
        raise DataError(f"{path} has no array `data`: download it again")
    _, shape, dtype, fortran, raw = state
    code = dtype.code if isinstance(dtype, _Dtype) else None
    plain = code in (b"u1", "u1") and not fortran and isinstance(raw, bytes)
    if not plain or len(raw) == 0 or shape != (len(raw) // PIXELS, PIXELS) or len(raw) % PIXELS:
        raise DataError(f"{path}: `data` must be uint8 of shape [N,{PIXELS}]: download it again")
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, 3, 32, 32)


def read_binary(path: Path, *, label_bytes: int, classes: int) -> Arrays:
    """Images and labels of a file in the binary layout; the last label byte is the fine label."""
    content = np.frombuffer(_read(path), dtype=np.uint8)
    record = label_bytes + PIXELS
    if content.size == 0 or content.size % record:
        raise DataError(f"{path} has {content.size} bytes, not a multiple of {record}: download it again")
    rows = content.reshape(-1, record)
    labels = rows[:, label_bytes - 1].astype(np.int64)
    if labels.max() >= classes:
        raise DataError(f"{path} has the label {labels.max()}, but only {classes} classes: download it again")
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path} is larger than any CIFAR file: download it again")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; download the data set again") from error


@DATASETS.register("cifar10")
def load_cifar10(root: Path) -> tuple[ImageSet, ImageSet | None]:
    """50,000 training and 10,000 test images of 10 classes [3,32,32]."""
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    directory, binary = _locate(root, "cifar10", names, ["cifar-10-batches-py", "cifar-10-batches-bin"])
    if binary:
        parts = [read_binary(directory / f"{name}.bin", label_bytes=1, classes=10) for name in names]
    else:
        parts = [read_pickle(directory / name, label_key=b"labels", classes=10) for name in names]
    return _image_set(parts[:5], CLASSES_10, "cifar10"), _image_set(parts[5:], CLASSES_10, "cifar10")


@DATASETS.register("cifar100")
def load_cifar100(root: Path) -> tuple[ImageSet, ImageSet | None]:
    """50,000 training and 10,000 test images of the 100 fine classes [3,32,32]."""
    directory, binary = _locate(root, "cifar100", ["train", "test"], ["cifar-100-python", "cifar-100-binary"])
    if binary:
        parts = [read_binary(directory / f"{name}.bin", label_bytes=2, classes=100) for name in ("train", "test")]
    else:
        parts = [read_pickle(directory / name, label_key=b"fine_labels", classes=100) for name in ("train", "test")]
    return _image_set(parts[:1], CLASSES_100, "cifar100"), _image_set(parts[1:], CLASSES_100, "cifar100")


def _locate(root: Path, name: str, names: list[str], folders: list[str]) -> tuple[Path, bool]:
    """The directory of the data set (one of the folders, or the root), and whether it has the binary layout."""
    layouts = [[f"{folder}/{file}{end}" for file in names] for folder in [*folders, "."] for end in ("", ".bin")]
    found = find_file(root, name, layouts)
    return found.parent, found.suffix == ".bin"


def _image_set(parts: list[Arrays], classes: list[str], name: str) -> ImageSet:
    images, labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    return from_arrays(images, labels, classes=classes, name=name, layout="NCHW")
