"""Images in one folder per class (root/train/CLASS/*.jpg, root/val or root/test), decoded when they are needed.

Training crops are random resized crops whose corner, size and mirroring are drawn from (seed, sample, epoch);
evaluation resizes the shorter side and takes the centre. Exactly the requested samples are decoded, whichever rank
asks. Files that are not intact images are refused when they are met, or left out from the start if asked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from generalist.core.errors import DataError
from generalist.core.files import clear_read_errors
from generalist.core.random import Key, integers, uniform
from generalist.data.augment import AugmentOptions
from generalist.data.corrupt import find_problems
from generalist.data.decode import Crop, Decoder, DecoderKind, Job, center_box, default_workers, random_box
from generalist.data.sets import Batch, ImageSet, from_arrays, to_unit

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
RESIDENT_CHUNK = 1024
"""Images that are decoded at once when a whole split is decoded."""
_TRIES = 10  # draws of a random resized crop before it falls back to the centre


@dataclass(frozen=True, eq=False)
class FolderImages:
    """One split of a folder: a list of files, decoded to [3, resolution, resolution] when a batch is requested."""

    files: list[Path]
    labels: Tensor
    classes: list[str]
    name: str
    resolution: int
    center: float
    """Share of the shorter side that evaluation's centre crop keeps."""
    decoder: Decoder
    skipped: tuple[str, ...] = ()
    """Files that were left out because they cannot be read, each with the reason."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.resolution, self.resolution

    @property
    def resident(self) -> bool:
        return False

    def to(self, device: torch.device | str) -> FolderImages:
        """The same files, with batches on `device`."""
        return replace(self, labels=self.labels.to(device), device=torch.device(device))

    def checksum(self) -> str:
        """SHA-256 of the files' names and sizes, as reading every image would take longer than an epoch."""
        digest = hashlib.sha256(f"{self.resolution} {self.center} {self.classes!r}\n".encode())
        for path in self.files:
            with clear_read_errors(path):
                size = path.stat().st_size
            digest.update(f"{path.parent.name}/{path.name} {size}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def batch(self, index: Tensor) -> Batch:
        """Images with the shorter side resized and the centre cropped."""
        crops = [partial(center_box, share=self.center)] * len(index)
        return self._decode(index, crops, torch.zeros(len(index), dtype=torch.bool), changed=False)

    def augmented(self, index: Tensor, *, epoch: Key, seed: int, options: AugmentOptions) -> Batch:
        """A random resized crop of each image, mirrored at random."""
        index = index.cpu()
        epoch = epoch.cpu() if isinstance(epoch, Tensor) else epoch
        draws = uniform(seed, "augment/resized-crop", index, epoch, shape=(_TRIES, 4))
        flip = (
            integers(2, seed, "augment/flip", index, epoch).bool() if options.flip else torch.zeros_like(index).bool()
        )
        crops = [partial(random_box, draws=sample, options=options) for sample in draws.tolist()]
        return self._decode(index, crops, flip, changed=True)

    def _decode(self, index: Tensor, crops: Sequence[Crop], flip: Tensor, *, changed: bool) -> Batch:
        jobs = [
            Job(self.files[sample], crop, mirrored)
            for sample, crop, mirrored in zip(index.tolist(), crops, flip.tolist(), strict=True)
        ]
        decoded = self.decoder(jobs, resolution=self.resolution)
        x = to_unit(self._moved(torch.from_numpy(np.stack([pixels for pixels, _ in decoded]))))
        index = index.to(self.device)
        drawn: dict[str, Tensor] = {}
        if changed:
            boxes = torch.tensor([box for _, box in decoded], dtype=torch.float32)
            drawn = {"flip": flip.to(self.device), "box": boxes.to(self.device)}
        return Batch(x=x, y=self.labels[index], index=index, augmentation=drawn)

    def _moved(self, pixels: Tensor) -> Tensor:
        """Pixels on the device. The copy from pinned memory runs while the host goes on to the next batch."""
        if self.device.type == "cuda":
            return pixels.pin_memory().to(self.device, non_blocking=True)
        return pixels.to(self.device)


def load_folder(
    root: Path,
    *,
    resolution: int,
    center: float = 0.875,
    workers: int | None = None,
    decoder: DecoderKind = "threads",
    corrupt: Literal["refuse", "skip"] = "refuse",
    cache: Path | None = None,
) -> tuple[FolderImages, FolderImages | None]:
    """The train split, and that in `val` or `test` if there is one.

    `corrupt: skip` reads every file once and leaves out those that are not intact images; `cache` is a directory in
    which the result is stored.
    """
    if not root.is_dir():
        place = "" if root.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"data.root: there is no folder {root}{place}; name the one with train/CLASS/ and val/CLASS/ in it, as by "
            "--set data.root=DIR"
        )
    if not (root / "train").is_dir():
        raise DataError(f"{root} has no folder `train`: the layout is root/train/CLASS/image.jpg, root/val/CLASS/...")
    pool = Decoder(workers or default_workers(), decoder)

    def split(name: str, classes: list[str] | None) -> FolderImages:
        found = _scan(root, name, classes, resolution=resolution, center=center, decoder=pool)
        return _without_corrupt(found, root, cache) if corrupt == "skip" else found

    train = split("train", None)
    _check_classes(root / "train", train)
    for name in ("val", "test"):
        _refuse_dangling(root / name)
    held = next((name for name in ("val", "test") if (root / name).is_dir()), None)
    return train, split(held, train.classes) if held is not None else None


def _without_corrupt(images: FolderImages, root: Path, cache: Path | None) -> FolderImages:
    """The split without the files that cannot be read."""
    names = [str(path.relative_to(root)) for path in images.files]
    problems = find_problems(names, images.files, images.decoder.problems, cache=cache)
    if len(problems) == len(names):
        raise DataError(f"{images.name}: none of {len(names)} images can be read: {names[0]}: {problems[names[0]]}")
    good = [position for position, name in enumerate(names) if name not in problems]
    return replace(
        images,
        files=[images.files[position] for position in good],
        labels=images.labels[good],
        skipped=tuple(_as_text(f"{name}: {problem}") for name, problem in sorted(problems.items())),
    )


def make_resident(images: FolderImages) -> ImageSet:
    """Decode a whole split once into memory, as evaluation sees it."""
    whole = np.empty((len(images), *images.shape), dtype=np.uint8)
    crop = partial(center_box, share=images.center)
    for start in range(0, len(images), RESIDENT_CHUNK):
        jobs = [Job(path, crop) for path in images.files[start : start + RESIDENT_CHUNK]]
        for position, (pixels, _) in enumerate(images.decoder(jobs, resolution=images.resolution), start):
            whole[position] = pixels
    return from_arrays(whole, images.labels.cpu(), classes=images.classes, name=images.name, layout="NCHW")


def _scan(
    root: Path, split: str, classes: list[str] | None, *, resolution: int, center: float, decoder: Decoder
) -> FolderImages:
    folder = root / split
    _refuse_leaving(folder, root)
    found = sorted(entry.name for entry in folder.iterdir() if _is_class(entry, root))
    if odd := [name for name in found if name != _as_text(name)]:
        raise DataError(f"{folder}: the name of the class {_as_text(odd[0])!r} is not UTF-8 text: rename the folder")
    if classes is None:
        classes = found
    if unknown := sorted(set(found) - set(classes)):
        raise DataError(f"{folder} has the class {unknown[0]!r}, which {root / 'train'} does not have")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if name not in found:
            continue
        inside = sorted(p for p in (folder / name).iterdir() if _is_image(p, root))
        files += inside
        labels += [label] * len(inside)
    if not files:
        raise DataError(f"{folder} has no images: the layout is {split}/CLASS/image with {', '.join(sorted(SUFFIXES))}")
    return FolderImages(files, torch.tensor(labels), classes, f"folder:{root.name}", resolution, center, decoder)


def _check_classes(folder: Path, images: FolderImages) -> None:
    """Refuse an empty class and a single class: a network learns nothing from either."""
    if len(images.classes) < 2:
        alone = images.classes[0]
        raise DataError(f"{folder} has one class, {alone!r}: a classifier needs two, each in a folder of its own")
    if empty := sorted(set(range(len(images.classes))) - set(images.labels.tolist())):
        whole = " that can be read" if images.skipped else ""
        raise DataError(f"{folder / images.classes[empty[0]]} has no images{whole}: add some, or remove the folder")


def _is_class(path: Path, root: Path) -> bool:
    """Whether it is a class's folder. An image next to those would be left out unnoticed, so it is refused."""
    if _is_hidden(path):
        return False
    if path.is_file():
        if path.suffix.lower() in SUFFIXES:
            raise DataError(f"{path} is next to the class folders: move it into one of them, or remove it")
        return False
    _refuse_leaving(path, root)
    _refuse_dangling(path)
    return path.is_dir()


def _refuse_dangling(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path} is a broken link: fix or remove it")


def _is_image(path: Path, root: Path) -> bool:
    """Whether it is an image, by its name. A folder of images would be left out unnoticed, so it is refused."""
    if _is_hidden(path):
        return False
    if path.suffix.lower() not in SUFFIXES:
        if path.is_dir():
            raise DataError(f"{path} is a folder inside a class folder: move its images up, or remove it")
        return False
    _refuse_leaving(path, root)
    _refuse_dangling(path)
    return path.is_file()


def _as_text(name: str) -> str:
    """A name that can be written anywhere: bytes that are not UTF-8 are spelt out, such as `\\udcff`."""
    return name.encode("utf-8", "backslashreplace").decode()


def _is_hidden(path: Path) -> bool:
    """What editors and file managers leave behind: `.ipynb_checkpoints`, `._1.png`."""
    return path.name.startswith(".")


def _refuse_leaving(path: Path, root: Path) -> None:
    """Refuse a link out of the data set, which must not read other files, nor be smaller than it looks without them."""
    # realpath instead of resolve, which fails on a link to itself.
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise DataError(
            f"{path} is a link that leaves {root}: copy what it points to into its place, "
            "or give the directory that really holds the images as the root"
        )
