"""AutoAttack of this library beside that of pyautoattack: the same model, samples, threat and machine, in one run.

    python benchmarks/evaluate.py                                # digits, a small network with BatchNorm, linf:0.12
    python benchmarks/evaluate.py --model RUN --data cifar10 --threat linf:8/255 --samples 1000 --device cuda --json

It prints seconds, robust accuracies, how many samples get the same verdict, and how many times as fast this library is.
Both run in float32 with PyTorch's flags as they are found. pyautoattack runs with the batch size of those given with
which it is fastest, found by its first attack on all samples; this library runs with its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import generalist
from generalist.attacks.accuracy import correct_natural
from generalist.attacks.autoattack import AutoAttack
from generalist.attacks.threats import Threat, parse_threat
from generalist.core.errors import GeneralistError
from generalist.data.options import DataOptions, load_splits
from generalist.data.sets import Batch
from generalist.data.split import subset

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
TRAINING = ["train.epochs=20", "validation.threats=[]"]
"""The network that is attacked where none is given: `digits-at` for fewer epochs, a few seconds."""


@dataclass(frozen=True)
class Result:
    """What one implementation did."""

    seconds: float
    cpu_seconds: float
    """Of all threads: on a machine that others use, too, the fairer number."""
    robust: Tensor
    """bool [N]: right, and not broken by any attack."""
    batch_size: int

    def record(self) -> dict[str, Any]:
        accuracy = self.robust.float().mean().item()
        times = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
        return times | {"robust_accuracy": accuracy, "batch_size": self.batch_size}


def timed(work: Callable[[], Tensor], device: torch.device, batch_size: int) -> Result:
    """Seconds of `work`, from when the device is idle until it is idle again."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start, start_cpu = time.perf_counter(), time.process_time()
    robust = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    return Result(seconds, cpu_seconds, robust.cpu(), batch_size)


def run_ours(model: nn.Module, batch: Batch, threat: Threat, names: Sequence[str], size: int) -> Tensor:
    """Which samples survive this library's attacks."""
    chosen = tuple(attack for attack in AutoAttack().attacks_for(threat) if attack.name in names)
    ensemble, robust = AutoAttack(attacks=chosen), []
    for rows in torch.split(torch.arange(len(batch.y), device=batch.y.device), size):
        part = Batch(x=batch.x[rows], y=batch.y[rows], index=batch.index[rows])
        robust.append(~ensemble.run(model, part, threat=threat, seed=0).broken)
    return torch.cat(robust)


def run_oracle(model: nn.Module, batch: Batch, threat: Threat, names: Sequence[str], size: int) -> Tensor:
    """Which samples survive pyautoattack's."""
    try:
        pyautoattack: Any = importlib.import_module("pyautoattack")
    except ImportError:
        raise GeneralistError("this comparison needs pyautoattack: pip install pyautoattack==0.2.0") from None
    logging.getLogger("auto-attack").setLevel(logging.ERROR)
    oracle = pyautoattack.AutoAttack(
        model, norm=threat.name.capitalize(), eps=threat.eps, seed=0, device=batch.x.device, version="standard"
    )
    oracle.attacks_to_run = list(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few classes and zero gradients; both sides see the same
        x, _ = oracle.run_standard_evaluation(batch.x, batch.y, batch_size=size)
    answers = [model(part).argmax(1) for part in torch.split(x, size)]
    return torch.cat(answers) == batch.y


def best_size(work: Callable[[int], Tensor], sizes: Sequence[int], device: torch.device) -> int:
    """The size with which `work` is fastest, each tried once after a first time that warms up."""
    work(sizes[0])
    return min(sizes, key=lambda size: timed(lambda: work(size), device, size).seconds)


def load_model(name: str | None, device: str) -> nn.Module:
    """A run, a weights file, or a small network trained for the occasion."""
    if name is not None:
        return generalist.load(name, device=device)
    with tempfile.TemporaryDirectory() as folder:
        run = generalist.train("digits-at", overrides=TRAINING, out=Path(folder) / "run", device="cpu")
        return generalist.load(run.path, device=device)


def load_batch(data: str, samples: int, device: torch.device) -> Batch:
    """A seeded subset of the test images."""
    splits = load_splits(DataOptions(name=data))
    images = splits.test if splits.test is not None else splits.train
    whole = images.batch(subset(len(images), min(samples, len(images)), 0))
    return Batch(x=whole.x.to(device), y=whole.y.to(device), index=whole.index.to(device))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Both implementations on the same samples, and what came of it."""
    device = torch.device(options.device)
    threat = parse_threat(options.threat).build()
    names = [name for name in STANDARD if name in options.attacks]
    model = load_model(options.model, options.device).requires_grad_(False)
    batch = load_batch(options.data, options.samples, device)
    sizes = sorted({min(size, len(batch.y)) for size in options.oracle_batch_sizes})
    size = best_size(lambda size: run_oracle(model, batch, threat, names[:1], size), sizes, device)
    own = min(options.batch_size, len(batch.y))
    run_ours(model, batch, threat, names[:1], own)  # warms up
    ours = timed(lambda: run_ours(model, batch, threat, names, own), device, own)
    theirs = timed(lambda: run_oracle(model, batch, threat, names, size), device, size)
    return {
        "natural_accuracy": correct_natural(model, batch).float().mean().item(),
        "ours": ours.record(),
        "oracle": theirs.record() | {"package": "pyautoattack 0.2.0"},
        "ratio": theirs.seconds / ours.seconds,
        "agreement": (ours.robust == theirs.robust).float().mean().item(),
        "samples": len(batch.y),
        "threat": str(threat),
        "attacks": names,
        "model": options.model or "digits-at, " + ", ".join(TRAINING),
        "data": options.data,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    about = f"{report['samples']} samples of {report['data']}, {report['threat']}, {'+'.join(report['attacks'])}"
    print(f"{about}; {report['device']}, {report['threads']} threads, torch {report['torch']}")
    print(f"natural accuracy {100 * report['natural_accuracy']:.2f}%")
    for who in ("ours", "oracle"):
        one = report[who]
        times = f"{one['seconds']:8.2f} s ({one['cpu_seconds']:.2f} s of CPU)"
        print(
            f"{who:>7}: {times}   robust accuracy {100 * one['robust_accuracy']:.2f}%   batch size {one['batch_size']}"
        )
    print(f"{report['ratio']:.2f} times as fast; {100 * report['agreement']:.2f}% of the verdicts agree")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a run or a weights file; left out, a small network is trained on digits")
    parser.add_argument("--data", default="digits", help="a data set by name; its test images")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--threat", default="linf:0.12")
    parser.add_argument("--attacks", type=lambda text: text.split(","), default=list(STANDARD), metavar="A,B")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; left out, as many as PyTorch chooses")
    parser.add_argument("--batch-size", type=int, help="ours; left out, 500 on the CPU and 1000 on a GPU")
    parser.add_argument("--oracle-batch-sizes", type=int, nargs="+", default=[100, 250, 500])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if unknown := set(options.attacks) - set(STANDARD):
        parser.error(f"--attacks knows {', '.join(STANDARD)}, not {', '.join(sorted(unknown))}")
    if min(options.samples, options.batch_size or 1, options.threads or 1, *options.oracle_batch_sizes) < 1:
        parser.error("--samples, --threads and batch sizes must be at least 1")
    options.batch_size = options.batch_size or (500 if torch.device(options.device).type == "cpu" else 1000)
    return options


def main() -> None:
    options = parse()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        report = compare(options)
    except GeneralistError as error:
        raise SystemExit(f"error: {error}") from None
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)


if __name__ == "__main__":
    main()
