"""The tutorial and the how-to pages as programs: their files, commands and code in the order in which they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md")), DOCS / "dial.md"]
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]+) -->\n\n?)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"\b[0-9a-f]{12}\b|\d+(?:[.,:]\d+)*(?:e[-+]\d+)?")
"""A fingerprint of weights and settings, or a number."""
_CHOSEN = re.compile(r"^\* (?=#)|\b(?:mixed|reestimated)$")
"""What numbers decide, and otherwise on a machine whose sums round otherwise: a point of the Pareto front, and which of
two kinds of BatchNorm statistics is better."""


@dataclass(frozen=True)
class Block:
    """A fenced block: a file to write (`title`), commands, or a program."""

    language: str
    text: str
    title: str | None
    reason: str | None
    """Why it is not run, where a marker says so."""


@dataclass(frozen=True)
class Shown:
    """A command in a console block and the output printed below it."""

    command: str
    output: list[str]

    @property
    def fails(self) -> bool:
        """A page that shows a mistake shows the line that it ends in."""
        return any(line.startswith("error:") for line in self.output)


def blocks(page: Path) -> list[Block]:
    found = _FENCE.finditer(page.read_text())
    return [Block(f["language"], f["text"], f["title"], f["reason"]) for f in found]


def commands(block: Block) -> list[Shown]:
    """The commands of a block; in one of the language `sh` every line is one, and nothing is shown."""
    if block.language == "sh":
        return [Shown(line, []) for line in block.text.splitlines() if line.strip()]
    found: list[Shown] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(Shown(line.removeprefix("$ "), []))
        else:
            found[-1].output.append(line)
    return found


def run_page(page: Path, folder: Path) -> Iterator[tuple[Shown, list[str]]]:
    """Do what the page says in a folder; each command with the lines that it printed. A failure is an assertion's."""
    environment = _environment(folder.parent / "bin")
    for block in blocks(page):
        if block.reason is not None:
            continue
        if block.title is not None:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        elif block.language == "python":
            _run(["python", "-c", block.text], folder, environment, fails=False)
        elif block.language in {"sh", "console"}:
            for shown in commands(block):
                printed = _run(["bash", "-c", shown.command], folder, environment, fails=shown.fails)
                yield shown, printed.splitlines()


def _run(command: list[str], folder: Path, environment: dict[str, str], *, fails: bool) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert (done.returncode == 2) if fails else (done.returncode == 0), f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def _environment(programs: Path) -> dict[str, str]:
    """`generalist` and `python` are those of this process, also where a command sets a PYTHONPATH of its own.

    Pages show what a wide terminal would, whatever width xdist gives its workers.
    """
    programs.mkdir(exist_ok=True)
    ours = os.environ.get("PYTHONPATH", "")
    for name, arguments in (("generalist", "-m generalist "), ("python", "")):
        path = f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{ours}"'
        (programs / name).write_text(f'#!/bin/sh\n{path}\nexec "{sys.executable}" {arguments}"$@"\n')
        (programs / name).chmod(0o755)
    changed = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name != "COLUMNS"} | changed


def shape_of(line: str) -> str:
    """A line of output without its numbers, what they decide, and its frame: what must be the same on every machine."""
    plain = re.sub(r"[\u2500-\u257f|]+", " ", line)
    return _CHOSEN.sub("", " ".join(_NUMBER.sub("#", plain).split()))
