"""A user's own torch Dataset, given by import path and read into memory as a whole."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from generalist.core.errors import DataError, with_place
from generalist.core.registry import import_object
from generalist.data.pixels import to_eight_bits
from generalist.data.sets import ImageSet, as_array, from_arrays


def load_dataset(path: str, *, trust_code: bool, memory_limit: int | None = None) -> tuple[ImageSet, ImageSet | None]:
    """The Dataset at `package.module:thing`, or the results of thing("train") and thing("test") (None: no test split).

    Items are (image, label), with a PIL image or a uint8 or float array or tensor of shape [H,W], [C,H,W] or [H,W,C].
    `memory_limit` (bytes; None: no limit) refuses a data set that would not fit.
    """
    thing = import_object(path, trust_code=trust_code)
    if isinstance(thing, Dataset):
        return materialise(thing, name=path, memory_limit=memory_limit), None
    if not callable(thing):
        raise DataError(f"{path} is a {type(thing).__name__}; it must be a Dataset or a function of the split's name")
    train, test = _split(thing, path, "train"), _split(thing, path, "test")
    if train is None:
        raise DataError(f'{path}("train") gave None: it must give a Dataset')
    first = materialise(train, name=path, memory_limit=memory_limit)
    if test is None:
        return first, None
    return first, materialise(test, name=path, memory_limit=memory_limit, classes=first.classes)


def materialise(
    dataset: Any, *, name: str, memory_limit: int | None = None, classes: list[str] | None = None
) -> ImageSet:
    """Read every item of a map-style Dataset into an image set."""
    try:
        count = len(dataset)
    except TypeError as error:
        raise DataError(f"{name}: the data set has no length; write a map-style Dataset with __len__") from error
    if count < 1:
        raise DataError(f"{name}: the data set is empty")
    first, _ = _item(dataset, 0, name)
    if memory_limit is not None and first.nbytes * count > memory_limit:
        raise DataError(
            f"{name}: {count} images of {first.nbytes} bytes do not fit into memory: "
            "use `name: folder`, which streams, or insist with `resident: true`"
        )
    images = np.empty((count, *first.shape), first.dtype)
    labels: list[int] = []
    for position in range(count):
        image, label = _item(dataset, position, name)
        if (image.shape, image.dtype) != (images.shape[1:], images.dtype):
            raise DataError(
                f"{name}: item {position} is {image.dtype} {image.shape}, but item 0 is {images.dtype} "
                f"{images.shape[1:]}: give every image one size and type"
            )
        images[position] = image
        labels.append(label)
    return from_arrays(images, np.asarray(labels), classes=_classes(dataset, classes, name=name), name=name)


def _classes(dataset: Any, known: list[str] | None, *, name: str) -> list[str] | None:
    """The data set's own names; they must equal those already known, because labels are numbers of classes."""
    own = getattr(dataset, "classes", None)
    try:
        names = [str(entry) for entry in own] if own is not None else None
    except TypeError as error:
        raise DataError(f"{name}: the data set's `classes` must be the classes' names, not {own!r:.80}") from error
    if known is not None and names is not None and names != known:
        raise DataError(
            f"{name}: the test split's classes, {', '.join(names)[:80]}, are not those of the train split, "
            f"{', '.join(known)[:80]}: number them alike"
        )
    return known or names


def memory_budget() -> int:
    """Bytes that a data set may take on its own: half of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _split(thing: Any, path: str, split: str) -> Any:
    try:
        return thing(split)
    except TypeError as error:
        raise DataError(f'{path} cannot be called with the split\'s name "{split}": {error}') from error
    except Exception as error:  # it is somebody's program, and may fail in any way
        raise DataError(f'{path}("{split}") fails: {with_place(error)}') from error


def _item(dataset: Any, position: int, name: str) -> tuple[np.ndarray[Any, Any], int]:
    try:
        item = dataset[position]
    except Exception as error:  # it is somebody's program, and may fail in any way
        raise DataError(f"{name}: item {position} fails: {with_place(error)}") from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(f"{name}: item {position} must be (image, label), not {type(item).__name__}")
    image, label = item
    return _as_array(image, position, name), _as_label(label, position, name)


def _as_array(image: Any, position: int, name: str) -> np.ndarray[Any, Any]:
    if isinstance(image, Image.Image):
        image = to_eight_bits(image, f"{name}: the image of item {position}")
        return np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    if isinstance(image, Tensor | np.ndarray):
        return as_array(image, f"the image of item {position}", name)
    raise DataError(
        f"{name}: the image of item {position} is a {type(image).__name__}: give a PIL image, an array or a tensor"
    )


def _as_label(label: Any, position: int, name: str) -> int:
    if isinstance(label, Tensor):
        label = label.detach().cpu().numpy()
    if isinstance(label, np.ndarray) and label.size == 1:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int | np.integer):
        raise DataError(f"{name}: the label of item {position} must be a class number, not {label!r:.80}")
    return int(label)
