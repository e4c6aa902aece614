"""From an image file to pixels: which formats, sizes and crops are read; by threads or by processes.

Decoding is a pure function of the file and the box. Pillow releases Python's lock while it works, so threads are
enough for a few thousand images per second; processes share no lock, at the price of copying the pixels.
"""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from generalist.core.errors import DataError
from generalist.data.augment import AugmentOptions
from generalist.data.pixels import to_eight_bits

FORMATS = ["JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM"]
"""The content decides, not the name. Pillow also knows formats that start other programs, so only these are tried."""
MAX_PIXELS = 64_000_000
"""Larger images are refused: a small file can unpack to more memory than there is."""

Box = tuple[float, float, float, float]
Crop = Callable[[int, int], Box]
"""Gives the box to cut from an image of that width and height."""
Pixels = np.ndarray[Any, Any]
DecoderKind = Literal["threads", "processes"]


@dataclass(frozen=True)
class Job:
    """One image to decode."""

    path: Path
    crop: Crop
    mirrored: bool = False


class Decoder:
    """Decodes exactly the images it is given, with so many workers, which start with the first image."""

    def __init__(self, workers: int, kind: DecoderKind = "threads") -> None:
        self.workers, self.kind = workers, kind
        # Forking a process with threads or a GPU would copy locks that nobody holds any more, hence `spawn`.
        self.pool: Executor = (
            ThreadPoolExecutor(workers, thread_name_prefix="decode")
            if kind == "threads"
            else ProcessPoolExecutor(
                workers, mp_context=multiprocessing.get_context("spawn"), initializer=_live_as_long_as_the_parent
            )
        )

    def __call__(self, jobs: Sequence[Job], *, resolution: int) -> list[tuple[Pixels, Box]]:
        """The crops and their boxes, in the order of the jobs."""
        size = 1 if self.kind == "threads" else -(-len(jobs) // self.workers)
        chunks = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        return [one for chunk in self._map(_decode_all, [(chunk, resolution) for chunk in chunks]) for one in chunk]

    def problems(self, files: Sequence[Path]) -> list[str | None]:
        """What is wrong with each file; None if it can be read to its end."""
        size = max(1, min(64, -(-len(files) // self.workers)))
        chunks = [files[start : start + size] for start in range(0, len(files), size)]
        return [one for chunk in self._map(_check_all, [(chunk,) for chunk in chunks]) for one in chunk]

    def _map(self, function: Callable[..., list[Any]], arguments: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
        try:
            futures = [self.pool.submit(function, *given) for given in arguments]
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise DataError(
                "a process that decodes images died: set data.workers lower if memory is short, or data.decoder to "
                "threads (a script of your own needs `if __name__ == '__main__':` around what it does)"
            ) from error


def default_workers() -> int:
    """As many workers as fit the cores of this process; the processes of one job on a machine share the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun
    beside = int(text) if text.isascii() and text.isdecimal() else 1
    return max(1, min(16, (cores or 1) // max(1, beside)))


def _live_as_long_as_the_parent() -> None:
    """Called in a process of the pool, which must live exactly as long as its parent.

    Ctrl-C and torchrun signal a whole process group; the parent answers with a checkpoint and still needs images for
    it. The parent's death would go unnoticed, because every worker holds both ends of the pipe that it waits at.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a pool calls this"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, name="follow-parent", daemon=True).start()


def _decode_all(jobs: Sequence[Job], resolution: int) -> list[tuple[Pixels, Box]]:
    return [decode(job.path, crop=job.crop, mirrored=job.mirrored, resolution=resolution) for job in jobs]


def _check_all(files: Sequence[Path]) -> list[str | None]:
    return [problem_of(path) for path in files]


def problem_of(path: Path) -> str | None:
    """Why the file is not an intact image; None if it is one.

    Errors of the system (a permission, too many open files) say nothing about the file, and must not be remembered.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            _check_size(image, path)
            image.draft(None, (64, 64))  # a JPEG's coefficients are still read to the end, at an eighth of the work
            to_eight_bits(image, str(path)).convert("RGB")
    except Exception as error:  # pillow's decoders fail in many ways on a damaged file
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # a damaged TIFF seeks before 0
            raise DataError(f"cannot read {path}: {error.strerror}: fix that first, the image may be intact") from error
        return " ".join(str(error).replace(str(path), path.name).split())[:200] or type(error).__name__
    return None


def _check_size(image: Image.Image, path: Path) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise DataError(f"{path} has {image.width}x{image.height} pixels, more than {MAX_PIXELS}: shrink it")


def decode(path: Path, *, crop: Crop, mirrored: bool, resolution: int) -> tuple[Pixels, Box]:
    """The crop of one file as uint8 [3, resolution, resolution], and the box that was cut."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            _check_size(image, path)
            box = crop(image.width, image.height)
            colours = to_eight_bits(image, str(path)).convert("RGB")
            pixels = colours.resize((resolution, resolution), Image.Resampling.BILINEAR, box=box)
    except DataError:
        raise
    except Exception as error:  # pillow's decoders fail in many ways on a damaged file
        raise DataError(
            f"cannot read the image {path}: {error}; replace or remove it, or leave out all "
            "such images with `data.corrupt: skip`"
        ) from error
    if mirrored:
        pixels = pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(pixels).transpose(2, 0, 1), box


def center_box(width: int, height: int, share: float) -> Box:
    """(left, top, right, bottom) of the centred square with `share` of the shorter side."""
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, draws: list[list[float]], options: AugmentOptions) -> Box:
    """The first drawn box that fits into the image; its area is uniform, its aspect ratio log-uniform.

    Each draw has four uniforms: area, ratio, left, top. If none fits: the largest centred box with an allowed ratio.
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
