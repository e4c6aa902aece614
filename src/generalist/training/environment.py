"""The environment of a run, for its record, and the process-wide switches that a recipe asks for."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from generalist._version import __version__
from generalist.core.errors import GeneralistError
from generalist.data.options import Splits
from generalist.training.options import TrainOptions


def choose_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`, refused if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cpu" and not name.startswith("cuda"):
        raise GeneralistError(f"unknown device {name!r}; choose auto, cpu or cuda")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise GeneralistError(f"unknown device {name!r}; choose auto, cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = f"PyTorch {torch.__version__} sees {torch.cuda.device_count() or 'no'} GPU(s)"
        raise GeneralistError(f"device {name!r} is not available: {seen}; choose cpu or auto")
    return device


def describe(splits: Splits, device: torch.device, seed: int) -> dict[str, Any]:
    """The content of environment.json."""
    sets = {"train": splits.train, "test": splits.test, "extra": splits.extra}
    skipped = {split: list(files) for split, files in splits.skipped.items() if files}
    return {
        "generalist": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "seed": seed,
        "data": {name: images.checksum() for name, images in sets.items() if images is not None},
        **({"skipped": skipped} if skipped else {}),
    }


def _commit() -> str | None:
    """The commit of the source tree, if the package runs from one.

    Git must know this very file, because the package may be installed somewhere inside an unrelated repository.
    """
    here = Path(__file__)
    command = ["git", "-C", str(here.parent), "rev-parse", "HEAD", f"HEAD:./{here.name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split()[0] if done.returncode == 0 else None


@contextmanager
def switches(options: TrainOptions, device: torch.device) -> Iterator[None]:
    """Set threads and determinism while training runs, and restore them afterwards."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        if options.threads:
            torch.set_num_threads(options.threads)
        if options.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)  # only if needed, as each call imports the compiler
        torch.backends.cudnn.benchmark = not options.deterministic
        yield
    finally:
        torch.set_num_threads(threads)
        if options.deterministic:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
