"""Commands of `generalist`, a few at a time, in one directory; finished ones are not repeated.

A program says what comes next for each of its names (`next_step`) and what it makes of the results (`write`). Each step
is a separate process with its output in OUT/logs/NAME.log, and a line in OUT/steps.jsonl when it has ended. The same
call continues where an earlier one ended, however it ended; a step that is still running is waited for.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from generalist.core.run import RunDirectory

POLL = 0.2
"""Seconds between two checks of the running steps."""
REWRITE = 60.0
"""Seconds after which the results are written again, even if no step has ended: a machine may be lost."""
PATIENCE = 120.0
"""Seconds that a step has for its checkpoint when it is asked to stop."""


@dataclass(frozen=True)
class Step:
    name: str
    """The name that it is a step of."""
    kind: str
    """`train`, or the kind of measurement."""
    words: list[str]
    """The words after `generalist`."""
    run: Path
    """The run that it creates or uses."""

    @property
    def command(self) -> str:
        return shlex.join(["generalist", *self.words])


@dataclass
class Running:
    step: Step
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    since: float
    began: int
    """Where its output starts in the log."""


class Steps:
    """Base class; `names` are in the order in which they are started."""

    def __init__(
        self,
        out: Path,
        names: Sequence[str],
        *,
        jobs: int = 1,
        minutes: float | None = None,
        grace: float | None = None,
    ) -> None:
        self.out, self.names = out, names
        self.jobs, self.minutes, self.grace = jobs, minutes, grace
        self.began = time.monotonic()
        self.stopped: int | None = None
        self.failed: list[str] = []
        """Names whose last step failed in this call."""
        self.noted: dict[str, Any] = {}
        """Further entries for each line of steps.jsonl."""
        self.lock: IO[str] | None = None

    def next_step(self, name: str) -> Step | None:
        """The first step without a result; None if all have one."""
        raise NotImplementedError

    def waits_for(self, name: str) -> str | None:
        """Another name whose result it needs and that does not exist yet."""
        return None

    def lacks_result(self, step: Step) -> bool:
        """Whether a step that ended well lacks the result that it was run for."""
        after = self.next_step(step.name)
        return after is not None and after.kind == step.kind

    def check(self) -> None:
        """Refuse existing contents of `out` that do not go with this call."""

    def write(self) -> None:
        """Write the results so far; called after every step, and every minute while one runs."""

    def leave(self, table: str) -> None:
        """Say where the results are; if a signal stopped the work, exit with its code."""
        print(f"table: {self.out / table}")
        if self.stopped:
            sys.exit(128 + self.stopped)

    # -- running the steps ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Do everything, under the directory's lock. SIGINT and SIGTERM stop it, and `stopped` says which."""
        self.out.mkdir(parents=True, exist_ok=True)

        def stop(number: int, frame: FrameType | None) -> None:
            self.stopped = number

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        with (self.out / ".lock").open("w") as self.lock:
            waits = False
            while not self.stopped:
                try:
                    fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waits:
                        self.say(f"waiting: a step of an earlier call still runs in {self.out}")
                    waits = True
                    time.sleep(POLL)
            else:
                return
            self.check()
            self.work()
            self.write()

    def work(self) -> None:
        """Run every step that is due, a few at a time, until all are done or the time is up."""
        waiting, active, written = list(self.names), list[Running](), time.monotonic()
        while active or (waiting and self.time_left()):
            while len(active) < self.jobs and self.time_left() and (name := self._ready(waiting)) is not None:
                waiting.remove(name)
                if (step := self.next_step(name)) is not None:
                    active.append(self.launch(step))
            if active and (self.stopped or self.grace_over()):
                self._stop(active)
            time.sleep(POLL)
            ended = [each for each in active if each.process.poll() is not None]
            for running in ended:
                active.remove(running)
                if self.finish(running):
                    self.failed.append(running.step.name)
                elif self.next_step(running.step.name) is not None:
                    waiting.insert(0, running.step.name)
            if ended or time.monotonic() - written > REWRITE:
                self.write()
                written = time.monotonic()
            if not active and waiting and self._ready(waiting) is None:
                self._give_up(waiting)
                waiting = []

    def _ready(self, waiting: Sequence[str]) -> str | None:
        return next((name for name in waiting if self.waits_for(name) is None), None)

    def _give_up(self, waiting: Sequence[str]) -> None:
        for name in waiting:
            self.say(f"{name}: not started, as it needs {self.waits_for(name)}, which has not finished")
        self.failed += waiting

    def launch(self, step: Step) -> Running:
        run, words = RunDirectory(step.run), list(step.words)
        if step.kind == "train" and run.path.is_dir() and not run.exists():
            shutil.rmtree(run.path)  # killed before it had written its recipe: nothing to resume, and in the way
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        path = self._log(step)
        if step.kind != "train" or run.exists():  # an evaluation left by another command is found by its settings
            words.append("--resume")
        log = path.open("ab")
        log.write(f"$ {shlex.join(['generalist', *words])}\n".encode())
        log.flush()
        began = log.tell()
        assert self.lock is not None, "run holds it"
        process = subprocess.Popen(
            [sys.executable, "-m", "generalist", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            pass_fds=[self.lock.fileno()],  # the lock lasts as long as any step, even if this process is killed
            process_group=0,  # Ctrl-C arrives here and is passed on once: twice would cost the checkpoint
        )
        self.say(f"{step.name}: {shlex.join(words)}")
        return Running(step, process, log, time.monotonic(), began)

    def _log(self, step: Step) -> Path:
        return self.out / "logs" / f"{step.name}.log"

    def begun(self, step: Step) -> bool:
        """Whether exactly this command was run before."""
        log, begun = self._log(step), (f"$ {step.command}", f"$ {step.command} --resume")
        return log.is_file() and any(line in begun for line in log.read_text(errors="replace").splitlines())

    def finish(self, running: Running) -> str:
        """Record how a step ended; returns the reason if it failed."""
        running.log.close()
        code, step, reason = running.process.returncode, running.step, ""
        seconds = round(time.monotonic() - running.since, 1)
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT):
            how = "stopped, to be resumed"
        elif code != 0:
            reason = how = self._complaint(running, code)
        elif self.lacks_result(step):
            reason = how = f"{step.kind} ended without its result"
        else:
            how = "done"
        line = {"name": step.name, "step": step.kind, "exit": code, "seconds": seconds, "reason": reason}
        with (self.out / "steps.jsonl").open("a") as stream:
            stream.write(json.dumps(line | {"command": step.command} | self.noted) + "\n")
        self.say(f"{step.name}: {step.kind} {how} after {seconds:.0f} s")
        return reason

    def _complaint(self, running: Running, code: int) -> str:
        """The error in a step's output, else how it ended, with its last line."""
        with self._log(running.step).open("rb") as stream:
            stream.seek(running.began)
            lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
        complaints = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (complaints or [f"{running.step.kind} ended with code {code}: {(lines or [''])[-1]}"])[-1][:500]

    def _stop(self, active: list[Running]) -> None:
        self.say("asking the running steps to stop; the next call continues")
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
        return not self.stopped and (self.minutes is None or self.elapsed() < self.minutes)

    def grace_over(self) -> bool:
        return self.grace is not None and self.minutes is not None and self.elapsed() >= self.minutes + self.grace

    def say(self, text: str) -> None:
        print(f"[{self.elapsed():6.1f} min] {text}", flush=True)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps that have ended. A line cut short by a kill is left out: it only says how one step ended."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def add_options(parser: argparse.ArgumentParser, *, each: str) -> None:
    """The options for running steps; `each` says what the names are."""
    parser.add_argument("--jobs", type=int, default=1, help=f"{each} side by side")
    parser.add_argument("--minutes", type=float, help="start no step after so many minutes")
    parser.add_argument("--grace", type=float, help="and stop what runs so many minutes later")
    parser.add_argument("--dry-run", action="store_true", help="print the queue, run nothing")


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    if options.grace is not None and options.minutes is None:
        parser.error("--grace counts from the end of --minutes: give both")
    if not all((minutes or 0) >= 0 for minutes in (options.minutes, options.grace)):  # true for nan as well
        parser.error("--minutes and --grace must be 0 or more")
