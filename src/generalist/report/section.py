"""A section of the page, and the pieces that all sections are built from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from generalist.comparison_rows import Cell
from generalist.report.drawing import Drawing
from generalist.report.html import Html, command, folded, join, tag
from generalist.report.runs import Network, Run
from generalist.report.svg import inline


@dataclass
class Section:
    """A heading of the page and the content below it."""

    key: str
    """Its anchor."""
    title: str
    menu: str = ""
    """A shorter title, for the menu."""
    parts: list[Html] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    """The drawings in `parts`, which are also written to files."""

    def add(self, *parts: Html) -> None:
        self.parts += parts

    def figure(self, drawing: Drawing, *, details: Html | None = None) -> Html:
        """A drawing of this section, and its numbers as a table."""
        self.drawings.append(drawing)
        return tag("figure", inline(drawing), tag("figcaption", details) if details else None)

    def missing(self, text: str, commands: Iterable[str]) -> None:
        """One line on what is left out, and the commands that would add it."""
        listed = list(commands)
        shown = join(*(part for line in listed[:3] for part in (" ", command(line))))
        more = f" and {len(listed) - 3} more alike" if len(listed) > 3 else ""
        self.add(tag("p", f"{text}; to add it:", shown, more, class_="missing"))

    def html(self) -> Html:
        return tag("section", tag("h2", self.title, id=f"{self.key}-title"), *self.parts, id=self.key)


def numbers(table: Html) -> Html:
    return folded("Show the numbers", table)


def note(text: str) -> Html:
    return tag("p", text, class_="note")


def grid(*children: Html) -> Html:
    return tag("div", *children, class_="grid")


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def with_interval(cell: Cell) -> Html:
    """An accuracy in percent, and its interval in small print."""
    if cell.low is None or cell.high is None:
        return tag("td", percent(cell.value))
    bounds = f"{100 * cell.low:.1f}–{100 * cell.high:.1f}"
    return tag("td", percent(cell.value), " ", tag("small", bounds), data_value=percent(cell.value))


def called(name: str, run: Run, *more: str) -> str:
    """The command `generalist NAME RUN MORE`, quoted for a shell."""
    return shlex.join(["generalist", name, str(run.path), *more])


def evaluating(network: Network, *more: str) -> str:
    """The command that evaluates a network of a run into that run."""
    if network.mixture is not None:
        place = str(network.run.path / "evaluation")
        return shlex.join(["generalist", "evaluate", str(network.mixture), "--out", place, *more])
    return called("evaluate", network.run, "--model", network.row.subject, *more)


def names(texts: Sequence[str], most: int = 6) -> str:
    """`a, b and 3 more`."""
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[:most])} and {len(texts) - most} more"
