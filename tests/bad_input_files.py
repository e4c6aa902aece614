"""Files that a hostile or careless user may hand us, for the tests of bad input."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from generalist.core.files import sha256

BASE = """\
data: {name: digits, augmentation: {crop: 1, flip: false}}
model: {name: small, width: 4}
learners:
  - {name: linf, objective: at, threat: 'linf:0.1', attack: {steps: 1}, optimizer: {lr: 0.1}}
  - {name: natural, objective: nt}
mixing: {redistribution: {every: 1}}
train: {epochs: 2, batch_size: 256}
validation: {images: 100, steps: 1}
"""
TOUCH = "touch canary"
"""What a hostile file tries to run; the file `canary` would show it."""


class Hostile:
    """Unpickling it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (TOUCH,)


def save_npz(here: Path, name: str = "extra.npz", *, count: int = 20, label: int = 0, size: int = 8) -> Path:
    path = here / name
    images = np.zeros((count, 1, size, size), dtype=np.uint8)
    np.savez(path, images=images, labels=np.full(count, label))
    return path


def save_hostile_npz(here: Path) -> None:
    array = np.empty(1, dtype=object)
    array[0] = Hostile()
    np.savez(here / "extra.npz", images=array, labels=array)


def save_mnist(here: Path, *, keep: float = 1.0) -> None:
    """MNIST's four files with a few images each; `keep` cuts off the training images."""
    folder = here / "data" / "mnist"
    folder.mkdir(parents=True)
    for stem in ("train", "t10k"):
        images = bytes([0, 0, 8, 3]) + struct.pack(">III", 20, 28, 28) + bytes(20 * 28 * 28)
        labels = bytes([0, 0, 8, 1]) + struct.pack(">I", 20) + bytes(i % 10 for i in range(20))
        cut = round(len(images) * keep) if stem == "train" else len(images)
        (folder / f"{stem}-images-idx3-ubyte").write_bytes(images[:cut])
        (folder / f"{stem}-labels-idx1-ubyte").write_bytes(labels)


def save_cifar10(here: Path, *, label: int = 0, cut: int = 0) -> None:
    folder = here / "data" / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    content = (bytes([label]) + bytes(3072)) * 4
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / f"{name}.bin").write_bytes(content[: len(content) - cut])


def save_hostile_cifar10(here: Path) -> None:
    folder = here / "data" / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({b"data": Hostile(), b"labels": [0]}))


def save_folder(here: Path, *, content: bytes) -> None:
    for name in ("cat", "dog"):
        (here / "images" / "train" / name).mkdir(parents=True)
        for number in range(3):
            (here / "images" / "train" / name / f"{number}.png").write_bytes(content)


def damage_checkpoints(here: Path, change: Callable[[bytes], bytes], *, honest: bool = False) -> None:
    """Change every checkpoint of the run; `honest` also writes a checksum that fits."""
    for path in (here / "run" / "checkpoints").glob("*.pt"):
        path.write_bytes(change(path.read_bytes()))
        if honest:
            path.with_suffix(".sha256").write_text(sha256(path) + "\n")


def hostile_checkpoint(content: bytes) -> bytes:
    stream = io.BytesIO()
    torch.save({"format": 1, "tensors": {"x": Hostile()}, "values": "{}"}, stream)
    return stream.getvalue()


def flip(content: bytes, seed: int, *, count: int = 3, within: int | None = None) -> bytes:
    """A few bytes changed at random places."""
    source, flipped = random.Random(seed), bytearray(content)
    for _ in range(count):
        flipped[source.randrange(min(within or len(flipped), len(flipped)))] ^= source.randrange(1, 256)
    return bytes(flipped)


def cut(content: bytes, seed: int) -> bytes:
    return content[: random.Random(seed).randrange(len(content))]


def damage_weights(here: Path, change: Callable[[bytes], bytes]) -> None:
    for path in (here / "run" / "snapshots").rglob("*.safetensors"):
        path.write_bytes(change(path.read_bytes()))


def rename_tensors(here: Path) -> None:
    """Weights of another network."""
    for path in (here / "run" / "snapshots").rglob("*.safetensors"):
        save_file({"other": torch.zeros(3)}, path)
