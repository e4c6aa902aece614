"""AutoAttack of this library compared with pyautoattack: same model, samples, threat and machine, in one run.

    python benchmarks/evaluate.py                                # digits, a small network with BatchNorm, linf:0.12
    python benchmarks/evaluate.py --repeat 5                     # in turn, five times: the median of the five ratios
    python benchmarks/evaluate.py --model RUN --data cifar10 --threat linf:8/255 --samples 1000 --device cuda \\
        --precision default fast --oracle-batch-sizes 250 500 1000 --json

It prints seconds, robust accuracies, how many samples get the same verdict, and how many times as fast this library is.
Ours is what `generalist bench evaluate` measures; pyautoattack runs with the fastest of the given batch sizes, found by
running it with each (its first attack alone is no guide: 250 won there and lost by a fifth). Both use PyTorch's flags
and threads as they are; each is warmed up by its first attack (ours, on a GPU, by a whole run, as its kernels are
compiled when they are first needed). `--precision` is for ours only; with two of them, both are compared with the same
times of pyautoattack.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from generalist.bench.evaluate import STANDARD, Case, bench_evaluate, lines, load_case, timed
from generalist.console import clear_endings
from generalist.core.errors import GeneralistError

PACKAGE = "pyautoattack==0.2.0"


def run_oracle(case: Case, names: Sequence[str], size: int) -> Tensor:
    """Which samples survive pyautoattack."""
    try:
        pyautoattack: Any = importlib.import_module("pyautoattack")
    except ImportError:
        raise GeneralistError(f"this comparison needs it: pip install {PACKAGE}") from None
    logging.getLogger("auto-attack").setLevel(logging.ERROR)
    norm, x, y = case.threat.name.capitalize(), case.batch.x, case.batch.y
    oracle = pyautoattack.AutoAttack(
        case.model, norm=norm, eps=case.threat.eps, seed=0, device=case.device, version="standard"
    )
    oracle.attacks_to_run = list(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few classes and zero gradients; both sides see the same
        x, _ = oracle.run_standard_evaluation(x, y, batch_size=size)
    answers = [case.model(part).argmax(1) for part in torch.split(x, size)]
    return (torch.cat(answers) == y).cpu()


def compare(cases: Sequence[Case], sizes: Sequence[int], *, repeat: int = 1) -> list[dict[str, Any]]:
    """Every case by ours, differing only in precision, and the first by pyautoattack, in turn; one report each.

    Seconds and verdicts are those of the last time; the ratio is the median of all. Without `sizes`, ours alone."""
    if not sizes:
        return [bench_evaluate(case)[0] for case in cases]
    case = cases[0]
    sizes = sorted({min(size, len(case.batch.y)) for size in sizes})
    run_oracle(case, case.attacks[:1], sizes[0])  # warms up
    ratios: list[list[float]] = [[] for _ in cases]
    seconds = dict[int, float]()
    for _ in range(repeat):
        ours = [bench_evaluate(case) for case in cases]
        theirs = {size: timed(partial(run_oracle, case, case.attacks, size), case.device) for size in sizes}
        seconds |= {size: times.seconds for size, (times, _) in theirs.items()}
        sizes = [min(theirs, key=lambda size: theirs[size][0].seconds)]  # the others are not tried again
        times, robust = theirs[sizes[0]]
        for known, (report, _) in zip(ratios, ours, strict=True):
            known.append(times.seconds / report["ours"]["seconds"])
    oracle = times.record(robust) | {"batch_size": sizes[0], "seconds_by_batch_size": seconds, "package": PACKAGE}
    return [
        report
        | {"oracle": oracle, "ratios": known, "ratio": statistics.median(known)}
        | {"agreement": (found == robust).float().mean().item()}
        | {"ours_alone_robust": int((found & ~robust).sum()), "oracle_alone_robust": int((robust & ~found).sum())}
        for (report, found), known in zip(ours, ratios, strict=True)
    ]


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    print("\n".join(lines(report)))
    if "oracle" in report:
        one = report["oracle"]
        apart = f"robust for ours alone {report['ours_alone_robust']}, for the oracle {report['oracle_alone_robust']}"
        print(
            f"pyautoattack: {one['seconds']:.2f} s ({one['cpu_seconds']:.2f} s of CPU), batch size {one['batch_size']}"
        )
        tried = [f"{size}: {seconds:.2f} s" for size, seconds in one["seconds_by_batch_size"].items()]
        if len(tried) > 1:
            print(f"tried with batch sizes {', '.join(tried)}")
        print(f"its robust accuracy {100 * one['robust_accuracy']:.2f}%")
        each = ", ".join(f"{ratio:.2f}" for ratio in report["ratios"])
        of = f" (median of {each})" if len(report["ratios"]) > 1 else ""
        print(
            f"{report['ratio']:.2f} times as fast{of}; {100 * report['agreement']:.2f}% of the verdicts agree ({apart})"
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a run or a weights file; left out, a small network is trained on digits")
    parser.add_argument("--data", default="digits", help="a data set by name; its test images")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--threat", default="linf:0.12")
    parser.add_argument("--attacks", type=lambda text: text.split(","), default=list(STANDARD), metavar="A,B")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; left out, as many as PyTorch chooses")
    parser.add_argument("--precision", choices=["default", "fast"], nargs="+", default=["default"], help="ours")
    parser.add_argument("--batch-size", type=int, help="ours; left out, what evaluation chooses itself")
    parser.add_argument("--no-oracle", action="store_true", help="ours only, for many samples")
    parser.add_argument("--oracle-batch-sizes", type=int, nargs="+", default=[100, 250, 500])
    parser.add_argument("--repeat", type=int, default=1, help="measure both in turn so often, for a machine with noise")
    parser.add_argument("--json", action="store_true", help="print one JSON object, a report for each precision")
    options = parser.parse_args(arguments)
    if min(options.threads or 1, options.repeat, *options.oracle_batch_sizes) < 1:
        parser.error("--threads, --repeat and batch sizes must be at least 1")
    return options


def main() -> None:
    options = parse()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with clear_endings():
        case = load_case(
            options.model,
            data=options.data,
            samples=options.samples,
            threat=options.threat,
            attacks=options.attacks,
            device=options.device,
            batch_size=options.batch_size,
        )
        cases = [
            replace(case, precision=precision, about=case.about | {"precision": precision})
            for precision in dict.fromkeys(options.precision)
        ]
        reports = compare(cases, [] if options.no_oracle else options.oracle_batch_sizes, repeat=options.repeat)
    if options.json:
        print(json.dumps({report["precision"]: report for report in reports}, indent=1))
    else:
        for report in reports:
            show(report)


if __name__ == "__main__":
    main()
