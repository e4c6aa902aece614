"""The official CIFAR-10-C, CIFAR-100-C, CIFAR-10-P and CIFAR-100-P files of Hendrycks & Dietterich (2019).

The files are numpy arrays of bytes, one per corruption, and stay on disk: a batch reads only its own images. -C files
hold the test set at severity 1, then at severity 2, up to 5; -P files hold a sequence of frames for each test image.
Headers are checked before anything is read, and no pickle is ever loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from generalist.core.errors import DataError
from generalist.core.registry import unknown_name
from generalist.data.cifar import CLASSES_10, CLASSES_100
from generalist.data.corruptions import SEVERITIES
from generalist.data.sets import Batch, to_unit

Array = np.ndarray[Any, Any]
_IMAGE = (32, 32, 3)


@dataclass(frozen=True, eq=False)
class _Files:
    """Arrays on disk, the labels of the test set, and the device of the batches."""

    name: str
    classes: list[str]
    labels: Tensor
    """int64 [N]: the labels of the test set, in its order."""
    arrays: dict[str, Array]
    """By corruption: bytes [5 N,32,32,3] for -C, or [N,frames,32,32,3] for -P."""
    device: torch.device

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def names(self) -> list[str]:
        return sorted(self.arrays)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return 3, 32, 32

    def checksum(self) -> str:
        """SHA-256 of the files' names and pixels; files of one kind all have the same size. The labels are left out,
        as they are those of the test set."""
        digest = hashlib.sha256()
        for name in self.names:
            array = self.arrays[name]
            digest.update(f"{name} {array.shape}\n".encode())
            for rows in np.array_split(array, max(1, array.nbytes >> 26)):  # in parts, as files have a gigabyte
                digest.update(rows.tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> Self:
        """The same files, with batches on that device."""
        return replace(self, device=torch.device(device))

    def _array(self, name: str) -> Array:
        if name not in self.arrays:
            raise DataError(unknown_name(f"file of {self.name}", name, self.names))
        return self.arrays[name]

    def _rows(self, index: Tensor) -> Array:
        rows: Array = index.cpu().numpy()
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or len(rows) == 0:
            raise DataError(f"{self.name}: index must hold the numbers of some samples")
        if int(rows.min()) < 0 or int(rows.max()) >= len(self):
            raise DataError(f"{self.name}: index must lie in 0..{len(self) - 1}")
        return rows

    def _batch(self, pixels: Array, index: Tensor) -> Batch:
        """Bytes with the channels last as images in [0,1] with the channels before height and width."""
        x = torch.from_numpy(np.moveaxis(pixels, -1, -3).copy()).to(self.device)
        return Batch(x=to_unit(x), y=self.labels[index.cpu()].to(self.device), index=index.to(self.device))


@dataclass(frozen=True, eq=False)
class CifarC(_Files):
    """Corrupted test images at five severities. `load_cifar_c` makes one and checks it."""

    def batch(self, name: str, severity: int, index: Tensor) -> Batch:
        """The images `index` of the test set with that corruption."""
        if type(severity) is not int or severity not in SEVERITIES:
            raise DataError(f"severity must be a whole number from 1 to 5, not {severity!r}")
        rows = self._rows(index)
        return self._batch(self._array(name)[(severity - 1) * len(self) + rows], index)


@dataclass(frozen=True, eq=False)
class CifarP(_Files):
    """Sequences of perturbed test images. `load_cifar_p` makes one and checks it."""

    def sequences(self, name: str, index: Tensor) -> Batch:
        """The frames [B,F,3,32,32] of the test images `index`, as the x of a batch."""
        return self._batch(self._array(name)[self._rows(index)], index)


def load_cifar_c(root: Path, *, classes: Literal[10, 100] = 10, names: Sequence[str] | None = None) -> CifarC:
    """The official corrupted test set below `root`: the files of `names`, or all that are present."""
    directory = _locate(root, f"CIFAR-{classes}-C", "labels.npy")
    repeated = _labels(open_array(directory / "labels.npy"), classes, directory / "labels.npy")
    if len(repeated) % 5 or not torch.equal(repeated, repeated[: len(repeated) // 5].repeat(5)):
        raise DataError(f"{directory / 'labels.npy'} must hold the test set's labels five times: download it again")
    arrays = {}
    for path in _paths(directory, names):
        arrays[path.stem] = _checked(open_array(path), (len(repeated), *_IMAGE), path)
    labels = repeated[: len(repeated) // 5]
    return CifarC(f"cifar{classes}-c", _class_names(classes), labels, arrays, torch.device("cpu"))


def load_cifar_p(
    root: Path, *, classes: Literal[10, 100] = 10, names: Sequence[str] | None = None, labels: Tensor | None = None
) -> CifarP:
    """The official sequences below `root`: the files of `names`, or all that are present.

    The labels are those of the test set: from labels.npy if the folder has one, or as given.
    """
    directory = _locate(root, f"CIFAR-{classes}-P", "*.npy")
    own = directory / "labels.npy"
    if labels is None and not own.is_file():
        raise DataError(f"{directory} has no labels.npy: give the labels of CIFAR-{classes}'s test set")
    values = open_array(own) if labels is None else labels.cpu().numpy()
    targets = _labels(values, classes, own if labels is None else "labels")
    arrays = {}
    for path in _paths(directory, names):
        array = open_array(path)
        frames = array.shape[1] if array.ndim == 5 else 0
        if frames < 2:
            raise DataError(f"{path} must hold at least two frames an image, [N,frames,32,32,3]: download it again")
        arrays[path.stem] = _checked(array, (len(targets), frames, *_IMAGE), path)
    return CifarP(f"cifar{classes}-p", _class_names(classes), targets, arrays, torch.device("cpu"))


def open_array(path: Path) -> Array:
    """The array of a .npy file, left on disk. A file that is shorter or longer than its header says is refused."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
        expected = array.offset + array.nbytes
        size = path.stat().st_size
    except Exception as error:  # a crafted header can fail in any way, which must not look like a fault of ours
        raise DataError(f"cannot read {path} as a numpy array: {error}; download it again") from error
    if size != expected:
        raise DataError(f"{path} has {size} bytes where its header says {expected}: download it again")
    return array


def _checked(array: Array, shape: tuple[int, ...], path: Path) -> Array:
    if array.dtype != np.uint8 or array.shape != shape:
        raise DataError(
            f"{path} must hold bytes of shape {list(shape)}, not {array.dtype} of shape {list(array.shape)}: "
            "download it again"
        )
    return array


def _labels(values: Array, classes: int, source: Path | str) -> Tensor:
    if values.ndim != 1 or values.dtype.kind not in "iu" or len(values) == 0:
        raise DataError(f"{source} must hold whole numbers, one for each image")
    if int(values.min()) < 0 or int(values.max()) >= classes:
        raise DataError(f"{source} has labels outside 0..{classes - 1}: these are not CIFAR-{classes}'s")
    return torch.from_numpy(values.astype(np.int64))


def _locate(root: Path, folder: str, pattern: str) -> Path:
    """The folder of the files: root/FOLDER as the archive unpacks, the same in lower case, or the root itself."""
    for directory in (root / folder, root / folder.lower(), root):
        if any(directory.glob(pattern)):
            return directory
    raise DataError(f"{folder} is not in {root}: unpack its authors' archive {folder}.tar there")


def _paths(directory: Path, names: Sequence[str] | None) -> list[Path]:
    found = sorted(path for path in directory.glob("*.npy") if path.stem != "labels")
    if names is None:
        if not found:
            raise DataError(f"{directory} has no files but labels.npy: unpack the archive again")
        return found
    known = {path.stem: path for path in found}
    for name in names:
        if name not in known:
            raise DataError(unknown_name(f"file in {directory}:", name, sorted(known)))
    return [known[name] for name in names]


def _class_names(classes: int) -> list[str]:
    return list(CLASSES_10 if classes == 10 else CLASSES_100)
