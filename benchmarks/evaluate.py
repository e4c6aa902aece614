"""AutoAttack of this library beside that of pyautoattack: the same model, samples, threat and machine, in one run.

    python benchmarks/evaluate.py                                # digits, a small network with BatchNorm, linf:0.12
    python benchmarks/evaluate.py --repeat 5                     # in turn, five times: the median of the five ratios
    python benchmarks/evaluate.py --model RUN --data cifar10 --threat linf:8/255 --samples 1000 --device cuda --json

It prints seconds, robust accuracies, how many samples get the same verdict, and how many times as fast this library is.
Ours is what `generalist bench evaluate` measures; pyautoattack runs with the batch size of those given with which it is
fastest, found by running it with each (its first attack alone is no guide: 250 won there and lost by a fifth). Both
have PyTorch's flags and threads as they are found; each is warmed up by its first attack (ours, on a GPU, by a whole
run: its kernels are compiled when they are first needed). `--precision fast` is for ours alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from generalist.bench.evaluate import STANDARD, Case, bench_evaluate, lines, load_case, timed
from generalist.core.errors import GeneralistError


def run_oracle(case: Case, names: Sequence[str], size: int) -> Tensor:
    """Which samples survive pyautoattack's."""
    try:
        pyautoattack: Any = importlib.import_module("pyautoattack")
    except ImportError:
        raise GeneralistError("this comparison needs pyautoattack: pip install pyautoattack==0.2.0") from None
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


def best_size(work: Callable[[int], Tensor], sizes: Sequence[int], device: torch.device) -> int:
    """The size with which `work` is fastest, each tried once."""
    return sizes[0] if len(sizes) == 1 else min(sizes, key=lambda size: timed(lambda: work(size), device)[0].seconds)


def compare(case: Case, sizes: Sequence[int], *, repeat: int = 1) -> dict[str, Any]:
    """Both implementations on the same samples, in turn, and what came of it; without `sizes` ours alone.

    Seconds and verdicts are those of the last time; the ratio is the median of all."""
    report, found = bench_evaluate(case)
    if not sizes:
        return report
    sizes = sorted({min(size, len(case.batch.y)) for size in sizes})
    run_oracle(case, case.attacks[:1], sizes[0])  # warms up
    size = best_size(lambda size: run_oracle(case, case.attacks, size), sizes, case.device)
    ratios = []
    for turn in range(repeat):
        if turn > 0:
            report, found = bench_evaluate(case)
        theirs, robust = timed(lambda: run_oracle(case, case.attacks, size), case.device)
        ratios.append(theirs.seconds / report["ours"]["seconds"])
    report["oracle"] = theirs.record(robust) | {"batch_size": size, "package": "pyautoattack 0.2.0"}
    report["ratios"], report["ratio"] = ratios, statistics.median(ratios)
    report["agreement"] = (found == robust).float().mean().item()
    report["ours_alone_robust"] = int((found & ~robust).sum())
    report["oracle_alone_robust"] = int((robust & ~found).sum())
    return report


def show(report: dict[str, Any]) -> None:
    """The report for people."""
    print("\n".join(lines(report)))
    if "oracle" in report:
        one = report["oracle"]
        apart = f"robust for ours alone {report['ours_alone_robust']}, for the oracle {report['oracle_alone_robust']}"
        print(
            f"pyautoattack: {one['seconds']:.2f} s ({one['cpu_seconds']:.2f} s of CPU), batch size {one['batch_size']}"
        )
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
    parser.add_argument("--precision", choices=["default", "fast"], default="default", help="ours")
    parser.add_argument("--batch-size", type=int, help="ours; left out, what evaluation chooses itself")
    parser.add_argument("--no-oracle", action="store_true", help="ours only, for many samples")
    parser.add_argument("--oracle-batch-sizes", type=int, nargs="+", default=[100, 250, 500])
    parser.add_argument("--repeat", type=int, default=1, help="measure both in turn so often, for a machine with noise")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if min(options.threads or 1, options.repeat, *options.oracle_batch_sizes) < 1:
        parser.error("--threads, --repeat and batch sizes must be at least 1")
    return options


def main() -> None:
    options = parse()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        case = load_case(
            options.model,
            data=options.data,
            samples=options.samples,
            threat=options.threat,
            attacks=options.attacks,
            device=options.device,
            precision=options.precision,
            batch_size=options.batch_size,
        )
        report = compare(case, [] if options.no_oracle else options.oracle_batch_sizes, repeat=options.repeat)
    except GeneralistError as error:
        raise SystemExit(f"error: {error}") from None
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)


if __name__ == "__main__":
    main()
