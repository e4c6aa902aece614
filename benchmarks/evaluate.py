"""AutoAttack of this library beside that of pyautoattack: the same model, samples, threat and machine, in one run.

    python benchmarks/evaluate.py                                # digits, a small network with BatchNorm, linf:0.12
    python benchmarks/evaluate.py --model RUN --data cifar10 --threat linf:8/255 --samples 1000 --device cuda --json

It prints seconds, robust accuracies, how many samples get the same verdict, and how many times as fast this library is.
Ours is `generalist.evaluate` as a user calls it, with records, packing and its own batch size; pyautoattack runs with
the batch size of those given with which it is fastest, found by its first attack on all samples. Both have PyTorch's
flags and threads as they are found; each is warmed up by its first attack. `--precision fast` is for ours alone.
TFLOP/s count convolutions and matrix products of the passes that the attacks are made of, a multiply-add as two: what
padding adds is not counted.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import platform
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

import generalist
from generalist.attacks.accuracy import correct_natural
from generalist.attacks.autoattack import AutoAttack
from generalist.attacks.threats import Threat, parse_threat
from generalist.bench.flops import count_model
from generalist.core.errors import GeneralistError
from generalist.data.options import DataOptions, load_splits
from generalist.data.sets import Batch
from generalist.data.split import subset
from generalist.evaluation.plan import Precision

Result = TypeVar("Result")

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
TRAINING = ["train.epochs=20", "validation.threats=[]"]
"""The network that is attacked where none is given: `digits-at` for fewer epochs, a few seconds."""


PASSES = {"apgd-ce": (102, 101), "apgd-t": (103, 101), "fab-t": (206, 100), "square": (5002, 0)}
"""Forward passes of a sample in one round of each attack, and gradients with respect to the image."""


class Ours(NamedTuple):
    """What this library found."""

    robust: Tensor
    rounds: Counter[str]
    """Rounds of samples that were run, by attack."""
    summary: dict[str, Any]

    def work(self, model: nn.Module, shape: Sequence[int], device: torch.device) -> float:
        """Floating-point operations of all passes."""
        cost = count_model(copy.deepcopy(model).requires_grad_(True), shape, device)
        each = {name: forward * cost.forward + back * cost.input_gradient for name, (forward, back) in PASSES.items()}
        return sum(count * each[name] for name, count in self.rounds.items())


class Times(NamedTuple):
    """What one implementation took."""

    seconds: float
    cpu_seconds: float
    """Of all threads: on a machine that others use, too, the fairer number."""

    def record(self, robust: Tensor) -> dict[str, Any]:
        return self._asdict() | {"robust_accuracy": robust.float().mean().item()}


def timed(work: Callable[[], Result], device: torch.device) -> tuple[Times, Result]:
    """The time of `work`, from when the device is idle until it is idle again."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start, start_cpu = time.perf_counter(), time.process_time()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Times(time.perf_counter() - start, time.process_time() - start_cpu), result


def run_ours(
    model: nn.Module, batch: Batch, threat: Threat, names: Sequence[str], size: int | None, precision: Precision
) -> Ours:
    """Which samples survive this library's attacks, as its records say."""
    chosen = tuple(attack for attack in AutoAttack().attacks_for(threat) if attack.name in names)
    with tempfile.TemporaryDirectory() as folder:
        found = generalist.evaluate(
            model,
            (batch.x.cpu(), batch.y.cpu()),
            threats=str(threat),
            attacks=["natural", AutoAttack(attacks=chosen)],
            mode="cascade",
            precision=precision,
            batch_size=size,
            out=folder,
        )
        lines = [json.loads(line) for path in Path(folder).rglob("records-*.jsonl") for line in path.open()]
    robust = torch.zeros(len(batch.y), dtype=torch.bool)
    rounds: Counter[str] = Counter()
    for line in (line for line in lines if "sample" in line):
        if line["attack"] == "natural":
            robust[line["sample"]] = line["label"] == line["predicted"]
        else:
            rounds[line["attack"].partition("@")[0]] += 1
            robust[line["sample"]] &= not line["broken"]
    return Ours(robust, rounds, found.summary)


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
    return (torch.cat(answers) == batch.y).cpu()


def best_size(work: Callable[[int], Tensor], sizes: Sequence[int], device: torch.device) -> int:
    """The size with which `work` is fastest, each tried once after a first time that warms up."""
    work(sizes[0])
    return min(sizes, key=lambda size: timed(lambda: work(size), device)[0].seconds)


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
    report: dict[str, Any] = {
        "natural_accuracy": correct_natural(model, batch).float().mean().item(),
        "samples": len(batch.y),
        "threat": str(threat),
        "attacks": names,
        "precision": options.precision,
        "model": options.model or "digits-at, " + ", ".join(TRAINING),
        "data": options.data,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }

    def ours_with(names: Sequence[str]) -> Ours:
        return run_ours(model, batch, threat, names, options.batch_size, options.precision)

    ours_with(names[:1])  # warms up
    ours, found = timed(lambda: ours_with(names), device)
    seconds = {key.partition(" ")[2] or key: value for key, value in found.summary["seconds"].items()}
    report["ours"] = ours.record(found.robust) | {
        "batch_size": found.summary["identity"]["batch_size"],
        "by_attack": seconds,
        "tflops": found.work(model, batch.x.shape[1:], device) / ours.seconds / 1e12,
        "notes": found.summary["notes"],
    }
    if options.no_oracle:
        return report
    sizes = sorted({min(size, len(batch.y)) for size in options.oracle_batch_sizes})
    size = best_size(lambda size: run_oracle(model, batch, threat, names[:1], size), sizes, device)
    theirs, robust = timed(lambda: run_oracle(model, batch, threat, names, size), device)
    report["oracle"] = theirs.record(robust) | {"batch_size": size, "package": "pyautoattack 0.2.0"}
    report["ratio"] = theirs.seconds / ours.seconds
    report["agreement"] = (found.robust == robust).float().mean().item()
    report["ours_alone_robust"] = int((found.robust & ~robust).sum())
    report["oracle_alone_robust"] = int((robust & ~found.robust).sum())
    return report


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    about = f"{report['samples']} samples of {report['data']}, {report['threat']}, {'+'.join(report['attacks'])}"
    print(f"{about}; {report['device']}, {report['threads']} threads, torch {report['torch']}")
    print(f"natural accuracy {100 * report['natural_accuracy']:.2f}%")
    for who in (name for name in ("ours", "oracle") if name in report):
        one = report[who]
        times = f"{one['seconds']:8.2f} s ({one['cpu_seconds']:.2f} s of CPU)"
        print(
            f"{who:>7}: {times}   robust accuracy {100 * one['robust_accuracy']:.2f}%   batch size {one['batch_size']}"
        )
    own = report["ours"]
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in own["by_attack"].items() if name != "total")
    print(f"ours: {parts}; {own['tflops']:.3g} TFLOP/s; precision {report['precision']}")
    for note in own["notes"]:
        print(f"note: {note}")
    if "oracle" in report:
        apart = f"robust for ours alone {report['ours_alone_robust']}, for the oracle {report['oracle_alone_robust']}"
        print(f"{report['ratio']:.2f} times as fast; {100 * report['agreement']:.2f}% of the verdicts agree ({apart})")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a run or a weights file; left out, a small network is trained on digits")
    parser.add_argument("--data", default="digits", help="a data set by name; its test images")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--threat", default="linf:0.12")
    parser.add_argument("--attacks", type=lambda text: text.split(","), default=list(STANDARD), metavar="A,B")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; left out, as many as PyTorch chooses")
    parser.add_argument("--precision", choices=["default", "fast"], default="default", help="ours")
    parser.add_argument("--batch-size", type=int, help="ours; left out, what evaluation chooses itself")
    parser.add_argument("--no-oracle", action="store_true", help="ours only, for many samples")
    parser.add_argument("--oracle-batch-sizes", type=int, nargs="+", default=[100, 250, 500])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if unknown := set(options.attacks) - set(STANDARD):
        parser.error(f"--attacks knows {', '.join(STANDARD)}, not {', '.join(sorted(unknown))}")
    if min(options.samples, options.batch_size or 1, options.threads or 1, *options.oracle_batch_sizes) < 1:
        parser.error("--samples, --threads and batch sizes must be at least 1")
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
