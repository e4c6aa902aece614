"""Images without any data set: shape and classes of a real one, with random pixels.

The time of an iteration depends on no property of the images but their size, so a benchmark runs anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from generalist.core.errors import DataError
from generalist.core.random import integers
from generalist.data.options import DataOptions, Splits
from generalist.data.sets import ImageSet

_DRAWN = 256  # further images repeat these: drawing many large ones would take longer than the benchmark


@dataclass(frozen=True)
class Kind:
    """The shape and classes of a data set's images."""

    shape: tuple[int, int, int]
    classes: int


KINDS = {
    "digits": Kind((1, 8, 8), 10),
    "mnist": Kind((1, 28, 28), 10),
    "fashion-mnist": Kind((1, 28, 28), 10),
    "cifar10": Kind((3, 32, 32), 10),
    "cifar100": Kind((3, 32, 32), 100),
    "svhn": Kind((3, 32, 32), 10),
}
IMAGENET_CLASSES = 1000


def kind_of(options: DataOptions) -> Kind:
    """Shape and classes of the recipe's data; a folder is assumed to have ImageNet's classes."""
    if options.name == "folder":
        side = options.resolution or 224
        return Kind((3, side, side), IMAGENET_CLASSES)
    if options.name not in KINDS:
        raise DataError(f"the shape of data set {options.name!r} is not known here: measure on the data with --real")
    return KINDS[options.name]


def synthetic_splits(options: DataOptions, *, count: int) -> Splits:
    """A training set of `count` images; the classes take turns."""
    kind = kind_of(options)
    drawn = integers(256, 0, "bench/images", torch.arange(min(count, _DRAWN)), shape=kind.shape).to(torch.uint8)
    order = torch.arange(count)
    classes = [str(number) for number in range(kind.classes)]
    return Splits(ImageSet(drawn[order % len(drawn)], order % kind.classes, classes, options.name), None)
