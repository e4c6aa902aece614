"""Two processes compared with one: how many times as fast each layout trains, in one run on one machine.

    python benchmarks/scaling.py                                           # digits, Generalist-D (linf + l2), CPU
    python benchmarks/scaling.py --recipe cifar10-resnet18-d-linf-l2 --processes 8 --device cuda

Every subject is `generalist.train` as a user calls it, with one thread per process: `one process`, then each layout
under torchrun. They take turns, round by round, so that a machine that slows down slows all of them; a subject's figure
is its fastest round, and a round's figure is the median over blocks of iterations. Validation and start-up are not
counted. Run it on an idle machine with at least as many cores as processes: the spread shows whether it was idle.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import generalist
from generalist.core import ranks
from generalist.training.loop import Listener

BLOCK = 10
"""Iterations per block."""

LAYOUTS = {
    "learners": ["train.parallel.layout=learners"],
    "both": ["train.parallel.layout=both"],
    "data, synchronised BatchNorm": ["train.parallel.layout=data"],
    "data, local BatchNorm": ["train.parallel.layout=data", "train.parallel.sync_batchnorm=false"],
}


def measure(recipe: str, changes: list[str], device: str) -> None:
    """In a process of a job: train, and print rank 0's median seconds per iteration."""
    moments: list[float] = []
    listener = Listener(iteration=lambda done, total: moments.append(time.perf_counter()))
    quiet = ["validation.every=1000000", "validation.steps=1", "train.checkpoint_epochs=1000000"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        generalist.train(recipe, overrides=[*quiet, *changes], out=out, device=device, listener=listener)
    if ranks.launched()[0] == 0:
        steady = moments[BLOCK::BLOCK]  # the first block warms up
        if len(steady) < 2:
            sys.exit(f"{len(moments)} iterations are too few to time: raise train.epochs")
        print("seconds", statistics.median(b - a for a, b in itertools.pairwise(steady)) / BLOCK, flush=True)


def timed(args: argparse.Namespace, changes: list[str], processes: int) -> float:
    """Seconds per iteration of one subject in one round."""
    own = [__file__, "--measure", "--recipe", args.recipe, "--device", args.device]
    own += [word for change in [*args.set, *changes] for word in ("--set", change)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), *own]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(changes) or 'one process'} failed:\n{done.stdout}{done.stderr}")
    return float(lines[0].split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="digits-d-linf-l2", help="one with two learners")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a recipe's field")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.recipe, args.set, args.device)
        return
    args.set = ["train.epochs=8", *args.set]
    subjects: dict[str, tuple[list[str], int]] = {"one process": ([], 1)}
    fits = {"learners": args.processes == 2, "both": args.processes > 2 and args.processes % 2 == 0}  # two learners
    subjects |= {name: (words, args.processes) for name, words in LAYOUTS.items() if fits.get(name, True)}
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(args.rounds):
        for name, (changes, processes) in subjects.items():
            found[name].append(timed(args, changes, processes))
    alone = min(found["one process"])
    print(f"{args.recipe}, {args.processes} processes, one thread each, {args.device}")
    for name, seconds in found.items():
        best = min(seconds)
        spread = (max(seconds) - best) / best
        print(f"{name:30} {1000 * best:8.1f} ms an iteration   {alone / best:5.2f}x   spread {100 * spread:.0f}%")
    if args.json:
        args.json.write_text(json.dumps({"recipe": args.recipe, "processes": args.processes, "seconds": found}) + "\n")


if __name__ == "__main__":
    main()
