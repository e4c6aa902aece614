"""What MkDocs asks of us while it builds the site: the page of the command line, made from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from generalist.cli import app

PAGE = "reference/cli.md"
INTRODUCTION = """\
# Command line

Every command with its options, as `--help` prints them. Exit codes: 0 done, 2 a mistake of yours (one line says which),
1 a fault of ours, 128 + the signal's number where a run was stopped and left a checkpoint.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page; nothing is written into docs/."""
    files.append(File.generated(config, PAGE, content=command_line()))
    return files


def command_line() -> str:
    """The page, one section a command."""
    sections = [
        f"## {words}\n\n```text\n{text}\n```\n" for words, text in helps(typer.main.get_command(app), "generalist")
    ]
    return "\n".join([INTRODUCTION, *sections])


def helps(command: Any, words: str) -> Iterator[tuple[str, str]]:
    """(words, help) of a command and of those below it."""
    context = command.make_context(words, [], resilient_parsing=True, max_content_width=110, terminal_width=110)
    yield words, command.get_help(context).rstrip()
    for name, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{words} {name}")
