"""Images in a folder per class (root/train/CLASS/*.jpg, root/val or root/test), decoded as they are needed.

Training crops are random resized crops whose corner, size and mirror image are drawn from (seed, sample, epoch);
evaluation resizes the shorter side and takes the centre. Files are decoded by a pool of threads: pillow releases
Python's lock while it works.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from generalist.core.errors import DataError
from generalist.core.random import Key, integers, uniform
from generalist.data.augment import AugmentOptions
from generalist.data.pixels import to_eight_bits
from generalist.data.sets import Batch, ImageSet, from_arrays, to_unit

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm"}
FORMATS = ["JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM"]
"""The content decides, not the name, and pillow knows formats that start other programs: only these are tried."""
MAX_PIXELS = 64_000_000
"""Larger images are refused: a small file can unpack to more memory than there is."""
_TRIES = 10  # draws of a random resized crop before it falls back to the centre

Box = tuple[float, float, float, float]
Crop = Callable[[int, int], Box]
"""The box to cut from an image of that width and height."""


@dataclass(frozen=True, eq=False)
class FolderImages:
    """One split of a folder: a list of files, decoded to [3, resolution, resolution] when a batch is asked for."""

    files: list[Path]
    labels: Tensor
    classes: list[str]
    name: str
    resolution: int
    center: float
    """Share of the shorter side that evaluation's centre crop keeps."""
    pool: ThreadPoolExecutor
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
        """The same files; batches will be made on `device`."""
        return replace(self, labels=self.labels.to(device), device=torch.device(device))

    def checksum(self) -> str:
        """SHA-256 of the files' names and sizes: reading every image would take longer than an epoch."""
        digest = hashlib.sha256(f"{self.resolution} {self.center} {self.classes!r}\n".encode())
        for path in self.files:
            digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def batch(self, index: Tensor) -> Batch:
        """Shorter side resized, centre taken."""
        crops = [partial(center_box, share=self.center)] * len(index)
        return self._decode(index, crops, torch.zeros(len(index), dtype=torch.bool), changed=False)

    def augmented(self, index: Tensor, *, epoch: Key, seed: int, options: AugmentOptions) -> Batch:
        """A random resized crop of each image, mirrored or not."""
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
            self.pool.submit(decode, self.files[sample], crop=crop, mirrored=mirrored, resolution=self.resolution)
            for sample, crop, mirrored in zip(index.tolist(), crops, flip.tolist(), strict=True)
        ]
        decoded = [job.result() for job in jobs]
        x = to_unit(torch.from_numpy(np.stack([pixels for pixels, _ in decoded])).to(self.device))
        index = index.to(self.device)
        drawn: dict[str, Tensor] = {}
        if changed:
            boxes = torch.tensor([box for _, box in decoded], dtype=torch.float32)
            drawn = {"flip": flip.to(self.device), "box": boxes.to(self.device)}
        return Batch(x=x, y=self.labels[index], index=index, augmentation=drawn)


def load_folder(
    root: Path, *, resolution: int, center: float = 0.875, workers: int | None = None
) -> tuple[FolderImages, FolderImages | None]:
    """The train split, and the one in `val` or `test` where there is one."""
    if not (root / "train").is_dir():
        raise DataError(f"{root} has no folder `train`: the layout is root/train/CLASS/image.jpg, root/val/CLASS/...")
    pool = ThreadPoolExecutor(max_workers=workers or default_workers(), thread_name_prefix="decode")
    train = _scan(root, "train", None, resolution=resolution, center=center, pool=pool)
    held = next((split for split in ("val", "test") if (root / split).is_dir()), None)
    if held is None:
        return train, None
    return train, _scan(root, held, train.classes, resolution=resolution, center=center, pool=pool)


def default_workers() -> int:
    """Threads that fit the cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(16, cores or 1))


def make_resident(images: FolderImages) -> ImageSet:
    """Decode a whole split once, as evaluation sees it, into memory."""
    whole = np.empty((len(images), *images.shape), dtype=np.uint8)
    crop = partial(center_box, share=images.center)
    read = partial(decode, crop=crop, mirrored=False, resolution=images.resolution)
    for position, (pixels, _) in enumerate(images.pool.map(read, images.files)):
        whole[position] = pixels
    return from_arrays(whole, images.labels.cpu(), classes=images.classes, name=images.name, layout="NCHW")


def decode(path: Path, *, crop: Crop, mirrored: bool, resolution: int) -> tuple[np.ndarray[Any, Any], Box]:
    """The crop of one file as uint8 [3, resolution, resolution], and the box that was cut."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{path} has {image.width}x{image.height} pixels, more than {MAX_PIXELS}: shrink it")
            box = crop(image.width, image.height)
            colours = to_eight_bits(image, str(path)).convert("RGB")
            pixels = colours.resize((resolution, resolution), Image.Resampling.BILINEAR, box=box)
    except DataError:
        raise
    except Exception as error:  # pillow's decoders fail in many ways on a damaged file
        raise DataError(f"cannot read the image {path}: {error}; replace or remove it") from error
    if mirrored:
        pixels = pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(pixels).transpose(2, 0, 1), box


def center_box(width: int, height: int, share: float) -> Box:
    """(left, top, right, bottom) of the centred square of `share` times the shorter side."""
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, draws: list[list[float]], options: AugmentOptions) -> Box:
    """The first drawn box that fits into the image; its area is uniform, its aspect ratio log-uniform.

    Each draw has four uniforms: area, ratio, left, top. Where none fits, the largest centred box of an allowed ratio.
    """
    narrow, broad = options.ratio
    for area, ratio, left, top in draws:
        target = width * height * (options.scale[0] + area * (options.scale[1] - options.scale[0]))
        aspect = math.exp(math.log(narrow) + ratio * (math.log(broad) - math.log(narrow)))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(left * (width - w + 1)), int(top * (height - h + 1))
            return x, y, x + w, y + h
    aspect = min(max(width / height, narrow), broad)
    wide, high = min(width, height * aspect), min(height, width / aspect)
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high


def _scan(
    root: Path, split: str, classes: list[str] | None, *, resolution: int, center: float, pool: ThreadPoolExecutor
) -> FolderImages:
    folder = root / split
    _refuse_leaving(folder, root)
    found = sorted(entry.name for entry in folder.iterdir() if _is_class(entry, root))
    if classes is None:
        classes = found
    if unknown := sorted(set(found) - set(classes)):
        raise DataError(f"{folder} has the class {unknown[0]!r}, which {root / 'train'} has not")
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
    return FolderImages(files, torch.tensor(labels), classes, f"folder:{root.name}", resolution, center, pool)


def _is_class(path: Path, root: Path) -> bool:
    if path.is_file():
        return False
    _refuse_leaving(path, root)
    return path.is_dir()


def _is_image(path: Path, root: Path) -> bool:
    if path.suffix.lower() not in SUFFIXES:
        return False
    _refuse_leaving(path, root)
    return path.is_file()


def _refuse_leaving(path: Path, root: Path) -> None:
    """A data set must not read files from elsewhere, and one that left them out would be smaller than it looks."""
    # realpath and not resolve, which fails on a link to itself.
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise DataError(
            f"{path} is a link that leaves {root}: copy what it points to into its place, "
            "or give the directory that really holds the images as the root"
        )
