"""The recipe's `data` section, and how it becomes data sets."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from generalist.core.errors import DataError
from generalist.core.files import clear_read_errors
from generalist.core.options import Number, Options
from generalist.core.registry import is_import_path, unknown_name
from generalist.data import cifar, digits, idx, svhn  # noqa: F401  (importing a format registers its data sets)
from generalist.data.augment import AugmentOptions
from generalist.data.dataset import load_dataset, memory_budget
from generalist.data.files import data_root, expanded
from generalist.data.folder import load_folder, make_resident
from generalist.data.sets import DATASETS, Images, ImageSet, check_joins, from_arrays

_SPECIAL = ["arrays", "folder"]
NAMED = 5
"""The number of corrupt files that a message names; environment.json lists all."""


class ExtraOptions(Options):
    """Further images to train on, labelled or pseudo-labelled, of the same size and classes."""

    file: str | None = None
    """An .npz file with arrays `images` (or `image`) and `labels` (or `label`). Give this or `name`, not both."""

    name: str | None = None
    """Another data set by its name; its train split is used."""

    ratio: Number = Field(gt=0, lt=1)
    """Share of each batch that is drawn from the extra images, between 0 and 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.file is None) == (self.name is None):
            raise ValueError("give the extra images as a `file` or as the `name` of a data set: one of the two")
        if self.name is not None and self.name not in DATASETS.names():
            raise ValueError(unknown_name("data set", self.name, DATASETS.names()))
        return self


class DataOptions(Options):
    """Which images to train and test on, and how training images are changed."""

    name: str = "digits"
    """digits, cifar10, cifar100, svhn, mnist, fashion-mnist, folder, arrays (given through the Python API), or a
    torch Dataset of your own as `package.module:thing` (a Dataset, or a function of "train" or "test")."""

    root: str | None = None
    """The directory with the data. Default: the environment variable GENERALIST_DATA, else ~/.cache/generalist. A
    folder data set needs it: the directory that has `train/`."""

    augmentation: AugmentOptions = AugmentOptions()
    """Random changes of training images; validation and test images are never changed."""

    extra: ExtraOptions | None = None
    """Further images mixed into each training batch; none by default."""

    resolution: int | None = Field(default=None, ge=1, le=4096)
    """Height and width in pixels to which a folder's images are resized; default: 224. Folders only."""

    center_crop: Number = Field(default=0.875, gt=0, le=1)
    """Share of the shorter side that the centre crop of evaluation keeps (224 of 256 by default). Folders only."""

    workers: int | None = Field(default=None, ge=1, le=256)
    """Threads or processes that decode a folder; default: one for each core that each of the job's processes on this
    machine has, at most 16. Folders only."""

    decoder: Literal["threads", "processes"] = "threads"
    """What decodes a folder's images. Threads start at once and copy nothing; processes pay off where thousands of
    images per second are needed and the threads' shared lock is the limit. Folders only."""

    corrupt: Literal["refuse", "skip"] = "refuse"
    """What to do with a folder's files that are not intact images (truncated, empty, not an image, too large).
    `refuse`: stop with the file's name when one is met. `skip`: read every file once before training, leave such files
    out, and say which; a cache below the data directory remembers them until a file changes. Folders only."""

    resident: Literal["auto"] | bool = "auto"
    """Whether all images are held in memory. `auto` streams folders and holds everything else; `true` decodes a folder
    once, after which crop, flip and cutout apply to it instead of random resized crops."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        known = sorted([*DATASETS.names(), *_SPECIAL])
        if name not in known and not is_import_path(name):
            hint = ", or an import path package.module:thing"
            if os.path.isdir(name):  # which, unlike pathlib, takes any text
                hint = "; images in a folder are `folder`, and the folder is the root: --data folder --root DIR of "
                hint += "evaluate, data.name=folder and data.root=DIR in a recipe"
            raise ValueError(unknown_name("data set", name, known) + hint)
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "folder" and self.root is None:
            raise ValueError("a folder needs `root`: the directory that has train/CLASS/image files")
        if self.extra is not None and self.extra.name == self.name:
            raise ValueError(
                f"extra.name: {self.name} is the training set itself, with its held-out images: leave it out"
            )
        if self.name != "folder":
            for name in ("resolution", "center_crop", "workers", "decoder", "corrupt"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"`{name}` is for `name: folder`, whose files are decoded: leave it out")
            if self.resident is False:
                raise ValueError("only `name: folder` can be streamed: leave `resident` out")
        elif self.resident is not True:
            if self.extra is not None:
                raise ValueError("extra images need all images in memory: set `resident: true`")
            if field := self.augmentation.needs_memory():
                instead = ", or learners' cutout" if field == "cutout" else ""
                raise ValueError(f"augmentation.{field} needs images in memory: set `resident: true`{instead}")
        return self

    @property
    def known_as(self) -> str:
        """What to call the set: its name, or for a folder that of its directory, as in /data/imagenet."""
        return Path(self.root).name.lower() if self.name == "folder" and self.root is not None else self.name


@dataclass(frozen=True)
class Splits:
    """What a recipe trains and tests on."""

    train: Images
    test: Images | None
    """None if the data set has no test split."""
    extra: ImageSet | None = None
    """Further training images; they are numbered after those of `train` (see `sets.join`)."""
    skipped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each split, the files that were left out because they cannot be read, with the reason."""

    def notes(self) -> list[str]:
        """A line about each split from which files were left out."""
        return [
            f"{split}: {len(files)} corrupt image(s) left out: {'; '.join(files[:NAMED])}"
            + (f"; and {len(files) - NAMED} more" if len(files) > NAMED else "")
            for split, files in self.skipped.items()
            if files
        ]


def load_splits(options: DataOptions, *, trust_code: bool = False, arrays: Any = None) -> Splits:
    """Load the data of `options`. `arrays` belongs to `name: arrays`: (images, labels), or a mapping from "train" and
    "test" to such pairs or to image sets."""
    if options.name == "folder":
        if arrays is not None:
            raise _unwanted(options)
        splits = _from_folder(options)
    else:
        splits = Splits(*_train_and_test(options, trust_code=trust_code, arrays=arrays))
    if splits.test is not None:
        check_joins(splits.train, splits.test, of="the test split of ")
    if options.extra is None:
        return splits
    return replace(splits, extra=_load_extra(options.extra, root=data_root(options.root), train=splits.train))


def _train_and_test(options: DataOptions, *, trust_code: bool, arrays: Any) -> tuple[Images, Images | None]:
    if options.name == "arrays":
        return _from_given(arrays)
    if arrays is not None:
        raise _unwanted(options)
    if is_import_path(options.name):
        limit = None if options.resident is True else memory_budget()
        return load_dataset(options.name, trust_code=trust_code, memory_limit=limit)
    return _load_named(options.name, data_root(options.root))


def _load_named(name: str, root: Path) -> tuple[ImageSet, ImageSet | None]:
    with clear_read_errors(root):
        return DATASETS.get(name)(root)


def _unwanted(options: DataOptions) -> DataError:
    return DataError(f"arrays were given, but the recipe says `data.name: {options.name}`: set it to arrays")


def _from_folder(options: DataOptions) -> Splits:
    root = data_root(options.root)
    with clear_read_errors(root):
        train, test = load_folder(
            root,
            resolution=options.resolution or 224,
            center=options.center_crop,
            workers=options.workers,
            decoder=options.decoder,
            corrupt=options.corrupt,
            cache=data_root(None) / "checked",
        )
    skipped = {"train": train.skipped, "test": test.skipped if test is not None else ()}
    if options.resident is not True:
        return Splits(train, test, skipped=skipped)
    return Splits(make_resident(train), make_resident(test) if test is not None else None, skipped=skipped)


def _from_given(arrays: Any) -> tuple[ImageSet, ImageSet | None]:
    if arrays is None:
        raise DataError("`data.name: arrays` needs images from the Python API: pass data=(images, labels)")
    parts = arrays if isinstance(arrays, Mapping) else {"train": arrays}
    if unknown := set(parts) - {"train", "test"}:
        raise DataError(f"arrays may have the splits train and test, not {sorted(map(str, unknown))[0]!r}")
    if "train" not in parts:
        raise DataError('arrays must have a split "train"')
    train = _given_set(parts["train"], None)
    test = parts.get("test")
    return train, None if test is None else _given_set(test, train.classes)


def _given_set(part: Any, classes: list[str] | None) -> ImageSet:
    if isinstance(part, ImageSet):
        return part
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise DataError(f"arrays must be (images, labels) or an ImageSet, not {type(part).__name__}")
    return from_arrays(part[0], part[1], classes=classes)


def _load_extra(options: ExtraOptions, *, root: Path, train: Images) -> ImageSet:
    if options.file is not None:
        extra = _load_npz(expanded(options.file), classes=train.classes)
    else:
        extra, _ = _load_named(str(options.name), root)
    check_joins(train, extra)
    return extra


def _load_npz(path: Path, *, classes: list[str]) -> ImageSet:
    remedy = "save it with numpy.savez(file, images=..., labels=...)"
    try:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise DataError(f"cannot read {path}: it is not a complete .npz file; {remedy}")
        # Pickled objects inside could run code: only plain arrays are read.
        with np.load(path, allow_pickle=False) as arrays:
            if (size := sum(member.file_size for member in arrays.zip.infolist())) > memory_budget():
                raise DataError(f"{path} unpacks to {size} bytes, more than half of this machine's memory: divide it")
            images, labels = (_array_of(arrays, names, path) for names in (("images", "image"), ("labels", "label")))
    except DataError:
        raise
    except Exception as error:  # a crafted file can fail in any way; none of them may pass for our own fault
        raise DataError(f"cannot read {path}: {error}; {remedy}") from error
    return from_arrays(images, labels, classes=classes, name=path.name)


def _array_of(arrays: Any, names: tuple[str, str], path: Path) -> Any:
    for name in names:
        if name in arrays.files:
            return arrays[name]
    raise DataError(f"{path} has no array {names[0]!r}; it has {', '.join(arrays.files[:10]) or 'nothing'}")
