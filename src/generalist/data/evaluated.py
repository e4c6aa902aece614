"""The images of an evaluation: a run's own, or those given as `data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from torch.utils.data import Dataset

from generalist.core.errors import DataError, RunError
from generalist.data.dataset import materialise
from generalist.data.options import DataOptions, load_splits
from generalist.data.sets import Images, from_arrays


class Source(NamedTuple):
    """Images, their name, and the warnings that belong in a summary."""

    images: Images
    split: str
    warnings: tuple[str, ...] = ()


def images_of(data: Any, *, root: str | Path | None = None, resolution: int | None = None, trust_code: bool) -> Source:
    """The images that `data` stands for, and their name."""
    if isinstance(data, str):
        try:
            options = DataOptions(name=data, root=str(root) if root is not None else None, resolution=resolution)
        except ValidationError as error:
            raise DataError(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None
        return _test_split(options, trust_code=trust_code)
    if root is not None:
        raise RunError("root is the directory of a data set given by name: leave it out")
    if isinstance(data, tuple | list) and len(data) == 2:
        return Source(from_arrays(data[0], data[1]), "arrays")
    if isinstance(data, Dataset):
        return Source(materialise(data, name=type(data).__name__), type(data).__name__)
    if hasattr(data, "augmented"):
        images: Images = data
        return Source(images, images.name)
    raise RunError(f"data must be (images, labels), a torch Dataset or a data set's name, not {type(data).__name__}")


def own_images(options: DataOptions | None, *, trust_code: bool) -> Source:
    """The test images of a run's own data set."""
    if options is None or options.name == "arrays":
        raise RunError("the weights do not say which images they are for: name a data set, as in --data cifar10")
    return _test_split(options.model_copy(update={"extra": None}), trust_code=trust_code)


def _test_split(options: DataOptions, *, trust_code: bool) -> Source:
    splits = load_splits(options, trust_code=trust_code)
    notes = tuple(splits.notes())
    if splits.test is not None:
        return Source(splits.test, f"{options.name}-test", tuple(note for note in notes if note.startswith("test:")))
    training = "these are training images: the set has no test split"
    return Source(splits.train, f"{options.name}-train", (training, *notes))


def images_named(data: str) -> Images:
    """The test images of a data set by name, or its training images if it has no others."""
    return images_of(data, trust_code=False).images
