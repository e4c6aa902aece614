"""How fast AutoAttack runs here: seconds by attack, and arithmetic per second.

It measures `generalist.evaluate` as a user calls it, with records, packing and its own batch size, after a warm-up by
the first attack, on a GPU by a whole evaluation. TFLOP/s count the convolutions and matrix products of the passes that
the attacks consist of, a multiply-add as two; arithmetic on padding is not counted.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from generalist import api
from generalist.attacks.accuracy import correct_natural
from generalist.attacks.autoattack import AutoAttack
from generalist.attacks.threats import Threat, parse_threat
from generalist.bench.flops import count_model
from generalist.bench.timing import matmul_ceiling, synchronize
from generalist.core.errors import GeneralistError
from generalist.data.evaluated import images_named
from generalist.data.sets import Batch, Images
from generalist.data.split import subset
from generalist.evaluation import check_classifier
from generalist.evaluation.plan import Precision
from generalist.training.environment import choose_device

Result = TypeVar("Result")

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
TRAINING = ["train.epochs=20", "validation.threats=[]"]
"""The network that is attacked if none is given: `digits-at` for fewer epochs, which takes a few seconds."""

PASSES = {"apgd-ce": (102, 101), "apgd-t": (103, 101), "fab-t": (206, 100), "square": (5002, 0)}
"""Forward passes per sample in one round of each attack, and gradients with respect to the image."""


class Times(NamedTuple):
    """The time of one implementation."""

    seconds: float
    cpu_seconds: float
    """Of all threads: the fairer number on a machine that others use as well."""

    def record(self, robust: Tensor) -> dict[str, Any]:
        return self._asdict() | {"robust_accuracy": robust.float().mean().item()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """What is attacked, and how."""

    model: nn.Module
    batch: Batch
    threat: Threat
    attacks: Sequence[str]
    """Of STANDARD, in that order."""
    precision: Precision = "default"
    batch_size: int | None = None
    """None: evaluation chooses it."""
    about: dict[str, Any]
    """For the record."""

    @property
    def device(self) -> torch.device:
        return self.batch.x.device


class Attacked(NamedTuple):
    """The outcome of one evaluation."""

    robust: Tensor
    rounds: Counter[str]
    """The number of sample rounds that were run, by attack."""
    summary: dict[str, Any]

    def work(self, case: Case) -> float:
        """Floating-point operations of all passes."""
        cost = count_model(case.model, case.batch.x.shape[1:], case.device)
        each = {name: forward * cost.forward + back * cost.input_gradient for name, (forward, back) in PASSES.items()}
        return sum(count * each[name] for name, count in self.rounds.items())


def load_case(
    subject: str | None,
    *,
    data: str = "digits",
    samples: int = 500,
    threat: str = "linf:0.12",
    attacks: Sequence[str] = STANDARD,
    device: str = "auto",
    precision: str = "default",
    batch_size: int | None = None,
) -> Case:
    """A run, a weights file, or a small network trained for this purpose, with a seeded subset of the test images."""
    if unknown := set(attacks) - set(STANDARD):
        raise GeneralistError(f"--attacks knows {', '.join(STANDARD)}, not {', '.join(sorted(unknown))}")
    if not attacks or min(samples, batch_size or 1) < 1:
        raise GeneralistError("--attacks, --samples and --batch-size must name at least one")
    if precision not in get_args(Precision):
        raise GeneralistError(f"--precision is {' or '.join(get_args(Precision))}, not {precision!r}")
    build = parse_threat(threat).build()
    where = choose_device(device)
    images = images_named(data)
    model = _load_model(subject, where).requires_grad_(False)
    check_classifier(model, images, where)
    batch = _load_batch(images, samples, where)
    about: dict[str, Any] = {
        "model": subject or "digits-at, " + ", ".join(TRAINING),
        "data": data,
        "samples": len(batch.y),
        "threat": str(build),
        "attacks": [name for name in STANDARD if name in attacks],
        "precision": precision,
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "natural_accuracy": correct_natural(model, batch).float().mean().item(),
    }
    return Case(
        model=model,
        batch=batch,
        threat=build,
        attacks=about["attacks"],
        precision=cast(Precision, precision),
        batch_size=batch_size,
        about=about,
    )


def _load_model(subject: str | None, device: torch.device) -> nn.Module:
    if subject is not None:
        return api.load(subject, device=str(device))
    with tempfile.TemporaryDirectory() as folder:
        run = api.train("digits-at", overrides=TRAINING, out=Path(folder) / "run", device="cpu")
        return api.load(run.path, device=str(device))


def _load_batch(images: Images, samples: int, device: torch.device) -> Batch:
    whole = images.batch(subset(len(images), min(samples, len(images)), 0))
    return Batch(x=whole.x.to(device), y=whole.y.to(device), index=whole.index.to(device))


def timed(work: Callable[[], Result], device: torch.device) -> tuple[Times, Result]:
    """The time of `work`, from an idle device to an idle device."""
    synchronize(device)
    start, start_cpu = time.perf_counter(), time.process_time()
    result = work()
    synchronize(device)
    return Times(time.perf_counter() - start, time.process_time() - start_cpu), result


def attack(case: Case, names: Sequence[str]) -> Attacked:
    """Which samples survive these attacks, according to the records."""
    chosen = tuple(attack for attack in AutoAttack().attacks_for(case.threat) if attack.name in names)
    with tempfile.TemporaryDirectory() as folder:
        found = api.evaluate(
            case.model,
            (case.batch.x.cpu(), case.batch.y.cpu()),
            threats=str(case.threat),
            attacks=["natural", AutoAttack(attacks=chosen)],
            mode="cascade",
            precision=case.precision,
            batch_size=case.batch_size,
            out=folder,
        )
        lines = [json.loads(line) for path in Path(folder).rglob("records-*.jsonl") for line in path.open()]
    robust = torch.zeros(len(case.batch.y), dtype=torch.bool)
    rounds: Counter[str] = Counter()
    for line in (line for line in lines if "sample" in line):
        if line["attack"] == "natural":
            robust[line["sample"]] = line["label"] == line["predicted"]
        else:
            rounds[line["attack"].partition("@")[0]] += 1
            robust[line["sample"]] &= not line["broken"]
    return Attacked(robust, rounds, found.summary)


def warm_up(case: Case) -> Sequence[str]:
    """The first attack; on a GPU all attacks, as kernels are compiled for every number of rows that occurs."""
    return case.attacks if case.device.type == "cuda" else case.attacks[:1]


def bench_evaluate(case: Case) -> tuple[dict[str, Any], Tensor]:
    """The record of one timed AutoAttack, and which samples are robust."""
    attack(case, warm_up(case))
    times, found = timed(lambda: attack(case, case.attacks), case.device)
    tflops = found.work(case) / times.seconds / 1e12
    # In evaluation, a GPU multiplies the factors of float32 networks in 16 bits if it can.
    ceiling = matmul_ceiling("bf16" if case.device.type == "cuda" else "fp32", case.device)
    ours = times.record(found.robust) | {
        "batch_size": found.summary["identity"]["batch_size"],
        "by_attack": {key.partition(" ")[2] or key: value for key, value in found.summary["seconds"].items()},
        "tflops": tflops,
        "ceiling_tflops": ceiling.tflops,
        "share_of_ceiling": tflops / ceiling.tflops,
        "notes": found.summary["notes"],
    }
    return case.about | {"ours": ours}, found.robust


def lines(report: dict[str, Any]) -> list[str]:
    """The record as text."""
    own = report["ours"]
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in own["by_attack"].items() if name != "total")
    return [
        f"{report['samples']} samples of {report['data']}, {report['threat']}, {'+'.join(report['attacks'])}; "
        f"{report['device']}, {report['threads']} threads, torch {report['torch']}",
        f"natural accuracy {100 * report['natural_accuracy']:.2f}%, robust {100 * own['robust_accuracy']:.2f}%",
        f"{own['seconds']:.2f} s ({own['cpu_seconds']:.2f} s of CPU), batch size {own['batch_size']}, precision "
        f"{report['precision']}: {parts}",
        f"{own['tflops']:.3g} TFLOP/s, {100 * own['share_of_ceiling']:.1f}% of what matrix products reach here",
        *(f"note: {note}" for note in own["notes"]),
    ]
