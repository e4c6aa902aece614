"""One table of all methods: CIFAR-10, ResNet-18, one GPU, the same short schedule and the same evaluation for all.

    python benchmarks/baselines.py --out runs/baselines                         # all methods, 30 epochs
    python benchmarks/baselines.py --out runs/baselines --jobs 2 --minutes 25   # two at a time; call again to go on
    python benchmarks/baselines.py --out runs/try --dataset digits --epochs 2 --samples 50 --methods at,nt,generalist-t

Each method is three steps, each a command of its own: `generalist train`, `generalist evaluate` with PGD-20 on all test
images, `generalist evaluate` with AutoAttack on some. What is done is not repeated: the same call goes on where an
earlier one ended, however it ended. After every step OUT/baselines.md and baselines.json are written anew. A method
that fails is listed with its reason, and the others go on; the next call tries it again.

`--jobs 2` runs two methods side by side: while one trains, the other imports and compiles. `--minutes M` starts no step
after that time; `--grace G` asks what still runs G minutes later to stop, which leaves a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from baselines_table import AA, NATURAL, PGD, Method, Table, Wanted, evaluation, family_of, read_row, rescaled, trained

from generalist.attacks.threats import parse_threat
from generalist.core.errors import GeneralistError
from generalist.core.run import RunDirectory
from generalist.evaluation.named import attack_named
from generalist.recipe import Recipe, load_recipe

POLL = 0.2
"""Seconds between two looks at what runs."""
PATIENCE = 120.0
"""Seconds that a step which is asked to stop has for its checkpoint."""


# -- what is asked for ------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="runs, logs, baselines.json and baselines.md go here")
    parser.add_argument(
        "--dataset", default="cifar10-resnet18", help="a family: baseline-DATASET-*, DATASET-d, -t, ..."
    )
    parser.add_argument("--methods", default="all", metavar="A,B", help="as --dry-run names them, or all")
    parser.add_argument("--epochs", type=int, default=30, help="of every method; a shorter recipe keeps its own")
    parser.add_argument("--batch-size", type=int, help="of every method; learning rates grow with it")
    parser.add_argument("--samples", type=int, default=1000, help="test images for AutoAttack, drawn by a seed")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="[METHOD:]FIELD=VALUE")
    parser.add_argument("--threats", metavar="A,B", help="default: those that the family's at-max trains against")
    parser.add_argument("--attack", default=AA, help="another one in AutoAttack's place, for a quick try")
    parser.add_argument("--precision", choices=["default", "fast"], default="default", help="of generalist evaluate")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="methods side by side")
    parser.add_argument("--minutes", type=float, help="start no step after so many minutes")
    parser.add_argument("--grace", type=float, help="and stop what runs so many minutes later")
    parser.add_argument("--dry-run", action="store_true", help="print the queue with estimated costs, run nothing")
    options = parser.parse_args(arguments)
    if min(options.epochs, options.samples, options.jobs, options.batch_size or 1) < 1:
        parser.error("--epochs, --batch-size, --samples and --jobs must be at least 1")
    if options.grace is not None and options.minutes is None:
        parser.error("--grace counts from the end of --minutes: give both")
    if not all((minutes or 0) >= 0 for minutes in (options.minutes, options.grace)):  # nan is neither
        parser.error("--minutes and --grace must be 0 or more")
    if options.attack in (PGD, NATURAL):
        parser.error(f"--attack {options.attack} is a column already: name another one")
    return options


def choose_methods(options: argparse.Namespace) -> list[Method]:
    """The rows that are asked for, in the order of the queue; every recipe is checked before anything runs."""
    family = family_of(options.dataset)
    names = list(family) if options.methods == "all" else [name.strip() for name in options.methods.split(",")]
    asked = [(text.partition("=")[0].rpartition(":")[0], text) for text in options.changes]
    for name in [*names, *(target for target, _ in asked if target)]:
        if name not in family:
            raise GeneralistError(f"unknown method {name!r}; {options.dataset} has {', '.join(family)}")
    methods = []
    for name, recipe in family.items():
        if name in names:
            epochs = min(options.epochs, load_recipe(recipe).train.epochs)
            own = [text.removeprefix(f"{target}:") for target, text in asked if target in ("", name)]
            batches = rescaled(load_recipe(recipe), options.batch_size) if options.batch_size else []
            changes = (f"train.epochs={epochs}", *batches, *own)
            methods.append(Method(name, recipe, changes, _load(name, recipe, changes)))
    return methods


def _load(name: str, recipe: str, changes: Sequence[str]) -> Recipe:
    try:
        return load_recipe(recipe, overrides=changes)
    except GeneralistError as error:
        raise GeneralistError(f"{name}: {error} (--set METHOD:FIELD=VALUE changes one method alone)") from None


def choose_evaluation(options: argparse.Namespace) -> Wanted:
    if options.threats is not None:
        threats = [str(parse_threat(text.strip())) for text in options.threats.split(",")]
    else:
        recipe = family_of(options.dataset).get("at-max")
        if recipe is None:
            raise GeneralistError(f"{options.dataset} has no at-max that would say which: give --threats")
        threats = [str(threat) for threat in load_recipe(recipe).threats()]
    attack_named(options.attack)
    return Wanted(tuple(dict.fromkeys(threats)), options.attack, options.samples, options.precision)


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    method: Method
    kind: str
    """`train`, or the attack of an evaluation."""
    words: list[str]
    """The words after `generalist`."""


@dataclass
class Running:
    step: Step
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    since: float
    began: int
    """Where its output begins in the log."""


class Bench:
    """The steps of all methods, below one directory."""

    def __init__(self, options: argparse.Namespace, methods: list[Method], wanted: Wanted) -> None:
        self.options, self.methods, self.wanted = options, methods, wanted
        self.out: Path = options.out
        self.began = time.monotonic()
        self.stopped: int | None = None
        self.lock: IO[str] | None = None

    def run_of(self, method: Method) -> Path:
        return self.out / "runs" / method.name

    # -- which steps there are ----------------------------------------------------------------------------------------

    def train_words(self, method: Method) -> list[str]:
        changes = [word for change in method.changes for word in ("--set", change)]
        return ["train", method.recipe, *changes, *self._device(), "--out", str(self.run_of(method))]

    def evaluate_words(self, method: Method, attack: str, images: int | None) -> list[str]:
        """`images`: how many test images there are, where that is known; all of them are not a subset."""
        words = ["evaluate", str(self.run_of(method)), "--attacks", f"{NATURAL},{attack}"]
        words += ["--threats", ",".join(self.wanted.threats)]
        if attack != PGD and (images is None or self.wanted.samples < images):
            words += ["--samples", str(self.wanted.samples)]
        precision = ["--precision", self.wanted.precision] if self.wanted.precision != "default" else []
        return [*words, *precision, *self._device()]

    def _device(self) -> list[str]:
        return ["--device", self.options.device] if self.options.device != "auto" else []

    def steps_of(self, method: Method) -> list[Step]:
        """All three, done or not."""
        plain = evaluation(self.run_of(method), self.wanted, PGD)
        images = plain[1]["images"] if plain else None
        evaluations = [Step(method, a, self.evaluate_words(method, a, images)) for a in (PGD, self.wanted.attack)]
        return [Step(method, "train", self.train_words(method)), *evaluations]

    def next_step(self, method: Method) -> Step | None:
        """The first one that has not left its result."""
        run = self.run_of(method)
        train, plain, strong = self.steps_of(method)
        if not trained(run):
            return train
        found = evaluation(run, self.wanted, PGD)
        if found is None:
            return plain
        samples = self.wanted.subset(found[1]["images"])
        return strong if evaluation(run, self.wanted, self.wanted.attack, samples) is None else None

    def check_runs(self) -> None:
        """Runs that are there already were made with these very settings: a table must not mix two."""
        for method in self.methods:
            run = RunDirectory(self.run_of(method))
            if run.exists():
                there = load_recipe(run.recipe).model_dump(exclude={"name"})
                asked = method.resolved.model_dump(exclude={"name"})
                if changed := [name for name in asked if asked[name] != there[name]]:
                    raise GeneralistError(
                        f"{run.path} was trained with other settings ({', '.join(changed)}): repeat those, or choose "
                        "another --out"
                    )

    # -- running them -------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> Running:
        run, words = RunDirectory(self.run_of(step.method)), list(step.words)
        if step.kind != "train" or run.exists():
            words.append("--resume")
        elif run.path.is_dir():  # killed before it had written its recipe: nothing to resume, and in the way
            shutil.rmtree(run.path)
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        log = (self.out / "logs" / f"{step.method.name}.log").open("ab")
        log.write(f"$ {shlex.join(['generalist', *words])}\n".encode())
        log.flush()
        began = log.tell()
        assert self.lock is not None, "work holds it"
        process = subprocess.Popen(
            [sys.executable, "-m", "generalist", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            pass_fds=[self.lock.fileno()],  # the lock lasts as long as any step, even if this process is killed
            process_group=0,  # Ctrl-C comes here and is passed on once: twice would cost the checkpoint
        )
        self.say(f"{step.method.name}: {shlex.join(words)}")
        return Running(step, process, log, time.monotonic(), began)

    def finish(self, running: Running) -> str:
        """Note how a step ended; the reason, where it failed."""
        running.log.close()
        code, step, reason = running.process.returncode, running.step, ""
        seconds = round(time.monotonic() - running.since, 1)
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT):
            how = "stopped, to be resumed"
        elif code != 0:
            reason = how = self._complaint(running, code)
        elif (after := self.next_step(step.method)) is not None and after.kind == step.kind:
            reason = how = f"{step.kind} ended without its result"
        else:
            how = "done"
        line = {"method": step.method.name, "step": step.kind, "exit": code, "seconds": seconds, "reason": reason}
        with (self.out / "steps.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        self.say(f"{step.method.name}: {step.kind} {how} after {seconds:.0f} s")
        return reason

    def _complaint(self, running: Running, code: int) -> str:
        """The error in a step's output, else how it ended and its last line."""
        with (self.out / "logs" / f"{running.step.method.name}.log").open("rb") as stream:
            stream.seek(running.began)
            lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
        complaints = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (complaints or [f"{running.step.kind} ended with code {code}: {(lines or [''])[-1]}"])[-1][:500]

    def work(self) -> None:
        """Run every step that is due, a few at a time, until all is done or the time is up."""
        waiting, active = deque(self.methods), list[Running]()
        while active or (waiting and self.time_left()):
            while waiting and len(active) < self.options.jobs and self.time_left():
                if (step := self.next_step(waiting.popleft())) is not None:
                    active.append(self.launch(step))
            if active and (self.stopped or self.grace_over()):
                self._stop(active)
            time.sleep(POLL)
            for running in [each for each in active if each.process.poll() is not None]:
                active.remove(running)
                failed = self.finish(running)
                step = self.next_step(running.step.method) if not failed and self.time_left() else None
                if step is not None:
                    active.append(self.launch(step))
                self.write()

    def _stop(self, active: list[Running]) -> None:
        self.say("asking what runs to stop; the next call goes on")
        for running in active:
            running.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + PATIENCE
        for running in active:
            try:
                running.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()

    def elapsed(self) -> float:
        return (time.monotonic() - self.began) / 60

    def time_left(self) -> bool:
        return not self.stopped and (self.options.minutes is None or self.elapsed() < self.options.minutes)

    def grace_over(self) -> bool:
        return self.options.grace is not None and self.elapsed() >= self.options.minutes + self.options.grace

    # -- what it leaves -----------------------------------------------------------------------------------------------

    def table(self) -> Table:
        steps = read_steps(self.out / "steps.jsonl")
        rows = [read_row(method, self.run_of(method), self.wanted, steps=steps) for method in self.methods]
        commands = {m.name: [shlex.join(["generalist", *s.words]) for s in self.steps_of(m)] for m in self.methods}
        command = shlex.join(["python", "benchmarks/baselines.py", *sys.argv[1:]])
        options = self.options
        return Table(
            options.dataset, options.epochs, command, self.wanted, rows, commands, options.jobs, options.batch_size
        )

    def write(self) -> None:
        self.table().write(self.out)

    def say(self, text: str) -> None:
        print(f"[{self.elapsed():6.1f} min] {text}", flush=True)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps that have ended. A line that a kill cut short is left out: it says how one step ended, no figure."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def run(bench: Bench) -> None:
    """All of it, under the directory's lock."""
    bench.out.mkdir(parents=True, exist_ok=True)

    def stop(number: int, frame: FrameType | None) -> None:
        bench.stopped = number

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with (bench.out / ".lock").open("w") as bench.lock:
        waits = False
        while not bench.stopped:
            try:
                fcntl.flock(bench.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waits:
                    bench.say(f"waiting: a step of an earlier call still runs in {bench.out}")
                waits = True
                time.sleep(POLL)
        else:
            return
        bench.check_runs()
        bench.work()
        bench.write()


def show_queue(bench: Bench) -> None:
    """The queue, and how much longer than AT each takes by the number of passes."""
    for method in bench.methods:
        cost = method.cost(bench.options.epochs)
        epochs = " + ".join(map(str, method.epochs))
        print(f"{method.name:<22} {epochs:>12} epochs, {'?' if cost is None else cost} times AT")
        for step in bench.steps_of(method):
            print(f"    {shlex.join(['generalist', *step.words])}")
    costs = [method.cost(bench.options.epochs) or 0 for method in bench.methods]
    print(f"in all {sum(costs):.1f} times AT, and {len(costs)} starts and evaluations")


def main() -> None:
    options = parse()
    try:
        bench = Bench(options, choose_methods(options), choose_evaluation(options))
        if options.dry_run:
            show_queue(bench)
            return
        run(bench)
    except GeneralistError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"table: {bench.out / 'baselines.md'}")
    if bench.stopped:
        sys.exit(128 + bench.stopped)


if __name__ == "__main__":
    main()
