"""Labelled images: the form of every data set once it is loaded, and of its batches."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from generalist.core.compiling import for_the_compiler
from generalist.core.errors import DataError
from generalist.core.random import Key
from generalist.core.registry import Registry
from generalist.data.augment import AugmentOptions, apply, draw

AHEAD = 2
"""Batches of a streamed set that are prepared ahead: while one is copied, the other keeps the decoder busy."""
MAX_CLASSES = 100_000
"""A larger label is a mistake, and would make a classifier of that size."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Images float32 [B,C,H,W] in [0,1] with their labels, all on one device."""

    x: Tensor
    y: Tensor
    index: Tensor
    """Each sample's index in its set: the key of all randomness about it."""
    augmentation: dict[str, Tensor] = field(default_factory=dict)
    """What was drawn for each sample (top, left, flip, ...); empty if nothing was changed."""


class Images(Protocol):
    """What training and evaluation need from a data set, resident or streamed."""

    @property
    def name(self) -> str: ...
    @property
    def classes(self) -> list[str]: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def resident(self) -> bool: ...
    def __len__(self) -> int: ...
    def to(self, device: torch.device | str) -> Self: ...
    def checksum(self) -> str: ...
    def batch(self, index: Tensor) -> Batch: ...
    def augmented(self, index: Tensor, *, epoch: Key, seed: int, options: AugmentOptions) -> Batch: ...


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images that are held in the device's memory as a whole. `from_arrays` makes one and checks it."""

    images: Tensor
    """uint8, or float32 in [0,1], of shape [N,C,H,W]."""
    labels: Tensor
    """int64 of shape [N], each below the number of classes."""
    classes: list[str]
    """The classes' names; a label is a position in this list."""
    name: str
    named: bool = True
    """Whether `classes` were given. False if they were inferred from the labels, which may lack some."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def resident(self) -> bool:
        return True

    def to(self, device: torch.device | str) -> ImageSet:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def checksum(self) -> str:
        """SHA-256 of images, labels and class names, in hex; the same on every device."""
        images, labels = self.images.cpu().contiguous(), self.labels.cpu().contiguous()
        digest = hashlib.sha256(f"{images.dtype} {tuple(images.shape)} {self.classes!r}".encode())
        digest.update(images.numpy().data)
        digest.update(labels.numpy().data)
        return digest.hexdigest()

    def batch(self, index: Tensor) -> Batch:
        """The images without augmentation."""
        index = index.to(self.images.device)
        return Batch(x=to_unit(self.images[index]), y=self.labels[index], index=index)

    def augmented(self, index: Tensor, *, epoch: Key, seed: int, options: AugmentOptions) -> Batch:
        """The images with the changes that (seed, sample, epoch) draw for them."""
        _, height, width = self.shape
        options.check_fits(height, width)
        index = index.to(self.images.device)
        drawn = draw(index, height=height, width=width, epoch=epoch, seed=seed, options=options)
        x = to_unit(apply(self.images[index], drawn, options))
        return Batch(x=x, y=self.labels[index], index=index, augmentation=drawn)


Loader = Callable[[Path], tuple[ImageSet, ImageSet | None]]
"""Reads a data set's train and test split from below a root directory."""

DATASETS: Registry[Loader] = Registry("data set")


@for_the_compiler(torch.compiler.disable)
def to_unit(images: Tensor) -> Tensor:
    """uint8 as float32 in [0,1]; floats as they are. Never compiled: compiled divisions round differently."""
    if images.dtype != torch.uint8:
        return images
    # Dividing by a tensor divides; dividing by a number multiplies by its rounded reciprocal on CUDA, and
    # then CPU and GPU would differ in the last bit.
    return images.to(torch.float32) / torch.full((), 255.0, device=images.device)


def iterate(
    images: Images, batches: Sequence[Tensor], *, epoch: Key = 0, seed: int = 0, options: AugmentOptions | None = None
) -> Iterator[Batch]:
    """Each batch in turn, augmented if options are given; a streamed set decodes the next ones at the same time."""

    def load(index: Tensor) -> Batch:
        if options is None:
            return images.batch(index)
        return images.augmented(index, epoch=epoch, seed=seed, options=options)

    if images.resident:
        yield from map(load, batches)
        return
    with ThreadPoolExecutor(max_workers=AHEAD, thread_name_prefix="prefetch") as workers:
        ahead = deque(workers.submit(load, index) for index in batches[:AHEAD])
        try:
            for following in range(AHEAD, len(batches) + AHEAD):
                if not ahead:
                    return
                current = ahead.popleft().result()
                if following < len(batches):
                    ahead.append(workers.submit(load, batches[following]))
                yield current
        finally:
            for waiting in ahead:  # a caller that stops early does not wait for images that it no longer needs
                waiting.cancel()


def check_joins(first: Images, second: Images, *, of: str = "") -> None:
    """Refuse a second set whose images or classes do not match the first's."""
    name = f"{of}{second.name}"
    if first.shape != second.shape:
        raise DataError(f"{name} has images of {second.shape}, but {first.name} of {first.shape}: resize them")
    if len(second.classes) > len(first.classes):
        raise DataError(f"{name} has {len(second.classes)} classes, but {first.name} has {len(first.classes)}")
    if _named(first) and _named(second) and first.classes != second.classes:
        ours, theirs = next(pair for pair in zip_longest(first.classes, second.classes) if pair[0] != pair[1])
        raise DataError(f"{name} has the class {theirs!r} where {first.name} has {ours!r}: renumber its labels")


def _named(images: Images) -> bool:
    return not isinstance(images, ImageSet) or images.named


def join(first: ImageSet, second: ImageSet) -> ImageSet:
    """One set of both: the second's samples come after the first's, under the first's classes."""
    check_joins(first, second)
    same = first.images.dtype == second.images.dtype
    parts = [s.images if same else to_unit(s.images) for s in (first, second)]
    labels = torch.cat([first.labels, second.labels.to(first.labels.device)])
    images = torch.cat([parts[0], parts[1].to(parts[0].device)])
    return replace(first, images=images, labels=labels, name=f"{first.name}+{second.name}")


def from_arrays(
    images: Any,
    labels: Any,
    *,
    classes: Sequence[str] | None = None,
    name: str = "arrays",
    layout: Literal["auto", "NCHW", "NHWC"] = "auto",
) -> ImageSet:
    """An image set of numpy arrays or torch tensors: uint8 in 0..255, or floats in [0,1].

    Images are [N,H,W] (grey), [N,C,H,W] or [N,H,W,C]. The channel axis is axis 1 or the last one, whichever has size 1
    or 3; if both or neither do, set `layout`.
    """
    pixels = _pixels(as_array(images, "images", name), name=name, layout=layout)
    targets = _targets(as_array(labels, "labels", name), count=len(pixels), name=name)
    names = _class_names(classes, largest=int(targets.max()), name=name)
    return ImageSet(
        images=torch.from_numpy(pixels),
        labels=torch.from_numpy(targets),
        classes=names,
        name=name,
        named=classes is not None,
    )


def as_array(values: Any, what: str, name: str) -> np.ndarray[Any, Any]:
    """An array or a tensor (of any device) as an array."""
    if isinstance(values, Tensor) and values.dtype == torch.bfloat16:
        values = values.float()
    try:
        return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # a tensor that is sparse, on no device, of 8-bit floats
        raise DataError(f"{name}: {what} must be one array or tensor, not {type(values).__name__}: {error}") from error


def _pixels(array: np.ndarray[Any, Any], *, name: str, layout: str) -> np.ndarray[Any, Any]:
    """A checked copy of shape [N,C,H,W], uint8 or float32: the caller's array may change afterwards."""
    array = _channels_first(array, name=name, layout=layout)
    if array.size == 0:
        raise DataError(f"{name}: the images are empty (shape {array.shape})")
    if array.dtype == np.uint8:
        return np.array(array, order="C")
    if array.dtype.kind != "f":
        raise DataError(f"{name}: images must be uint8 (0..255) or floats in [0,1], not {array.dtype}: convert them")
    pixels = np.array(array, dtype=np.float32, order="C")
    low, high = float(pixels.min()), float(pixels.max())  # nan where any is nan
    if not np.isfinite([low, high]).all():
        raise DataError(f"{name}: images contain nan or inf: remove those images")
    if low < 0 or high > 1:
        raise DataError(
            f"{name}: float images must lie in [0,1], not in [{low:g}, {high:g}]: "
            "undo the normalisation, or divide by 255"
        )
    return pixels


def _channels_first(array: np.ndarray[Any, Any], *, name: str, layout: str) -> np.ndarray[Any, Any]:
    if array.ndim == 3:
        return array[:, None]
    if array.ndim != 4:
        raise DataError(f"{name}: images must be [N,H,W], [N,C,H,W] or [N,H,W,C], not of shape {array.shape}")
    if layout == "auto":
        first, last = (array.shape[axis] in (1, 3) for axis in (1, 3))
        if first == last:
            raise DataError(
                f"{name}: in shape {array.shape} the channels may be axis 1 or the last: "
                'say which with layout="NCHW" or layout="NHWC"'
            )
        layout = "NCHW" if first else "NHWC"
    return array if layout == "NCHW" else array.transpose(0, 3, 1, 2)


def _targets(array: np.ndarray[Any, Any], *, count: int, name: str) -> np.ndarray[Any, Any]:
    if array.ndim != 1 or len(array) != count:
        raise DataError(f"{name}: {count} images need labels of shape [{count}], not of shape {list(array.shape)}")
    if array.dtype.kind not in "iu":
        raise DataError(f"{name}: labels must be integers (class numbers from 0), not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= MAX_CLASSES:
        raise DataError(f"{name}: labels must lie in 0..{MAX_CLASSES - 1}, but range over {low}..{high}: renumber them")
    return array.astype(np.int64)


def _class_names(classes: Sequence[str] | None, *, largest: int, name: str) -> list[str]:
    if classes is None:
        return [str(number) for number in range(largest + 1)]
    names = list(classes)
    if not all(isinstance(label, str) for label in names) or len(set(names)) != len(names):
        raise DataError(f"{name}: class names must be different strings")
    if largest >= len(names):
        raise DataError(f"{name}: label {largest} has no name among the {len(names)} classes: labels start at 0")
    return names
