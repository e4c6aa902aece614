"""What the tests of sweeps share: a tiny sweep as a file, and workers in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml

from generalist.sweep import trials
from generalist.sweep.definition import load_sweep
from generalist.sweep.storage import Shared, choose_place, open_shared
from generalist.sweep.trials import Row
from generalist.sweep.worker import Limits, run_sweep
from generalist.training.loop import Listener

TINY: dict[str, Any] = {
    "recipe": "digits-d",
    "set": {
        "train.epochs": 2,
        "train.threads": 1,
        "model.width": 4,
        "validation.images": 50,
        "validation.steps": 1,
        "validation.every": 1,
    },
    "search": {
        "learners.linf.optimizer.lr": {"values": [0.1, 0.05]},
        "mixing.redistribution.every": {"values": [1, 2]},
    },
}


def write_sweep(folder: Path, file: str = "tiny", /, **changes: Any) -> Path:
    """A sweep's file; `set` is added to, other fields are replaced."""
    raw = {**TINY, **changes, "set": {**TINY["set"], **changes.get("set", {})}}
    path = folder / f"{file}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in raw.items() if value is not None}, sort_keys=False))
    return path


def work(
    path: Path, out: Path, *, storage: str | None = None, listener: Listener | None = None, **limits: Any
) -> Shared:
    """A worker in this process."""
    return run_sweep(
        load_sweep(path),
        choose_place(storage, out),
        device="cpu",
        limits=Limits(**limits),
        say=lambda text: None,
        listening=lambda label: nullcontext(listener or Listener()),
    )


def read_rows(path: Path, out: Path, *, storage: str | None = None) -> list[Row]:
    return trials.rows(open_shared(load_sweep(path), choose_place(storage, out), create=False))


def start_worker(path: Path, out: Path, *, storage: str | None = None) -> subprocess.Popen[str]:
    """`generalist sweep` in a process of its own; its output goes to a file beside `out`."""
    options = ["--storage", storage] if storage else []
    command = [sys.executable, "-m", "generalist", "sweep", str(path), "--out", str(out), "--device", "cpu", *options]
    log = out.with_name(f"{out.name}-{time.monotonic_ns()}.log").open("w")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, text=True)


def wait_until(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
