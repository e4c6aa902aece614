"""The tables of docs/results over several seeds, next to the papers' figures, from the records of experiments.py.

        python benchmarks/results_table.py docs/results            # writes them into the pages
        python benchmarks/results_table.py docs/results --check    # only says whether a page is out of date

In each page they are between two comments; the rest of the page is left alone.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import figures, spread

from generalist.comparison_rows import GENERATED, LEVEL5, LEVELS, OFFICIAL
from generalist.core.errors import GeneralistError
from generalist.core.files import write_text
from generalist.paper_figures import paper_rows

NATURAL = "natural"
FIRST, LAST = "<!-- from here on made by benchmarks/results_table.py -->", "<!-- made up to here -->"


@dataclass(frozen=True)
class Page:
    """The contents of the tables of one page."""

    path: str
    records: str
    """The folder with the records."""
    dataset: str
    """The data set as in the papers' figures; the network is a ResNet-18."""
    threats: dict[str, str]
    """The threats, with the names of their columns."""
    published: dict[str, str]
    """The papers' methods above ours, with descriptions."""
    groups: dict[str, str]
    """Descriptions in a few words, by the name of an experiment with seeds."""
    leads: tuple[tuple[str, str], ...] = ()
    """Pairs whose first member is compared with the second, seed by seed."""


PAGES = (
    Page(
        path="cifar10.md",
        records="runs/headline",
        dataset="cifar10",
        threats={"linf:8/255": "linf", "l2:128/255": "l2"},
        published={
            "generalist-d-nt-linf": "Generalist-D (natural + linf)",
            "generalist-d-linf-l2": "Generalist-D (linf + l2)",
            "generalist-t": "Generalist-T",
            "at": "AT",
            "trades-6": "TRADES with beta 6",
            "trades-1": "TRADES with beta 1",
        },
        groups={
            "d": "**`cifar10-resnet18-d`** (natural + linf)",
            "d-6.5": "the same against linf 6.5/255 from epoch 120 on, gamma 0.92",
            "d-6.5-further": "the same, gamma 0.86",
            "d-frozen": "`cifar10-resnet18-d`, its teacher frozen at epoch 120",
            "d-frozen-both": "`cifar10-resnet18-d`, both learners taught by that one",
            "d-away": "`cifar10-resnet18-d`, attacks that lead away from its teacher from epoch 120 on",
            "d-awp": "`cifar10-resnet18-d`, within AWP from epoch 120 on",
            "d-awp-further": "the same, gamma 0.77",
            "d-awp-both": "`cifar10-resnet18-d`, both learners within AWP from epoch 120 on",
            "d-9.5": "`cifar10-resnet18-d` against linf 9.5/255 from epoch 120 on, gamma 0.74",
            "d-smooth": "`cifar10-resnet18-d`, smoothed labels for its natural learner from epoch 120 on",
            "d-momenta": "`cifar10-resnet18-d`, momenta and averages kept at restarts",
            "d-far": "`cifar10-resnet18-d`, a higher floor of its natural learner's learning rate",
            "d-weak": "`cifar10-resnet18-d`, AT against 2/255 for its natural learner from epoch 120 on, gamma 0.76",
            "d-linf-l2": "**`cifar10-resnet18-d-linf-l2`**",
            "d-linf-l2-wide": "the same with an l2 learner against 224/255, gamma 0.8",
            "t": "**`cifar10-resnet18-t`** (natural + linf + l2)",
            "t-awp": "the same, its robust learners within AWP from epoch 120 on",
            "t-0.7": "`cifar10-resnet18-t` with its earlier settings: gamma 0.7, even shares",
            "d-linf-l2-awp": "`cifar10-resnet18-d-linf-l2`, its learners within AWP from epoch 120 on",
            "alone-5.75": "one learner, against linf 5.75/255 from epoch 120 on",
            "alone-awp": "one learner within AWP, against linf 5.5/255 from epoch 120 on",
            "alone-5.25": "one learner, against linf 5.25/255 from epoch 120 on",
            "at": "one learner, AT against linf 8/255",
            "trades-6": "one learner, TRADES with beta 6",
            "trades-1": "one learner, TRADES with beta 1",
        },
        leads=(("d", "alone-5.75"), ("d-6.5", "alone-5.75"), ("d-6.5-further", "alone-5.75")),
    ),
    Page(
        path="mnist.md",
        records="runs/mnist",
        dataset="mnist",
        threats={"linf:0.3": "linf"},
        published={"generalist-d-nt-linf": "Generalist-D, five runs", "trades": "TRADES, five runs"},
        groups={
            "d": "**Generalist-D** (natural + linf)",
            "trades-6": "one learner, TRADES with beta 6",
            "trades-6-gaussian": "one learner, TRADES with beta 6 and its authors' start of the attack, not averaged",
        },
    ),
)

Record = Mapping[str, Any]
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """A row: a network of ours with its seeds, or one of the papers'."""

    label: str
    seeds: int
    figures: Sequence[Figures]
    """The figures of each seed, in percent."""

    def cell(self, column: str) -> str:
        """The mean; if AutoAttack was not run, but its two APGDs were, the upper bound that these give."""
        if not any(column in own for own in self.figures) and column.startswith("aa/"):
            at_most = [{column: bound} for own in self.figures if (bound := bound_of(own, column)) is not None]
            return f"at most {spread(at_most, column)}" if at_most else "-"
        return spread(self.figures, column)


def bound_of(own: Figures, column: str) -> float | None:
    """The lowest accuracy under single attacks of AutoAttack, in percent."""
    names = [f"{attack}/{column.partition('/')[2]}" for attack in ("apgd-ce", "apgd-t", "fab-t", "square")]
    return min((own[name] for name in names if name in own), default=None)


def records_of(folder: Path, groups: Sequence[str]) -> list[Record]:
    """The records of these groups, in their order, by seed."""
    read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted(
        (one for one in read if one["group"] in groups), key=lambda one: (groups.index(one["group"]), seed(one))
    )


def seed(record: Record) -> int:
    return int(record["environment"]["seed"])


def figures_of(record: Record) -> Figures:
    """The figures of the network that the run keeps."""
    return figures(record["evaluations"]).get("best", {})


def lines_of(page: Page, records: Sequence[Record]) -> Iterator[Line]:
    for method, label in page.published.items():
        found: dict[str, float] = {}
        for row in paper_rows():
            if (row.dataset, row.model, row.method) == (page.dataset, "resnet18", method):
                # The papers' two tables print the same figures twice; the first paper's come first.
                found = {column: 100 * cell.value for column, cell in row.cells.items()} | found
        yield Line(f"published: {label}", 0, [found])
    for group, label in page.groups.items():
        own = [figures for record in records if record["group"] == group and (figures := figures_of(record))]
        if own:
            yield Line(label, len(own), own)


def written(page: Page, records: Sequence[Record]) -> str:
    """The text of all tables of a page."""
    lines = list(lines_of(page, records))
    columns = {NATURAL: NATURAL}
    for threat, name in page.threats.items():
        columns |= {f"pgd-20/{threat}": f"PGD-20 {name}", f"aa/{threat}": f"AutoAttack {name}"}
    parts = [grid(lines, columns), notes(page, records)]
    shifts = {f"{GENERATED} {LEVEL5}": "ours, level 5", f"{GENERATED} {LEVELS}": "ours, levels 1 to 5"}
    shifts[f"{OFFICIAL} {LEVEL5}"] = "official, level 5"
    if any(column in own for line in lines if line.seeds for own in line.figures for column in shifts):
        parts += [
            "Accuracy on the 15 common corruptions, of images that this library corrupted, and the papers' on the "
            "official ones, which is another figure:",
            grid([line for line in lines if any(column in own for own in line.figures for column in shifts)], shifts),
        ]
    parts += ["Each run:", each_run(page, records, columns)]
    return "\n\n".join(parts)


def grid(lines: Sequence[Line], columns: Mapping[str, str]) -> str:
    rows = [["network", "seeds", *columns.values()], ["---", *["---:"] * (1 + len(columns))]]
    rows += [[line.label, str(line.seeds or ""), *map(line.cell, columns)] for line in lines]
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def notes(page: Page, records: Sequence[Record]) -> str:
    """What one must know to read the table."""
    images: dict[str, set[str]] = {}
    for record in records:
        for each in record["evaluations"]:
            for column in each["right"]:
                images.setdefault(column.partition("/")[0], set()).add(each["images"])
    told = [f"{name}: {' or '.join(sorted(found))}" for name, found in sorted(images.items()) if name != NATURAL]
    lines = [f"Test images: {'; '.join(told)}." if told else "Nothing is measured yet."]
    lines.append(
        "Means and, over seeds, their standard deviation (n - 1); in brackets how many have a figure, if not all."
    )
    lines += [text for first, second in page.leads if (text := lead(records, first, second))]
    for record in records:
        if not figures_of(record):
            epochs = record.get("unfinished", {}).get("epochs")
            why = record.get("note") or (f"its training ended after epoch {epochs}" if epochs else "not evaluated yet")
            lines.append(f"{record['name']} has no figures on test images: {why[0].lower()}{why[1:].rstrip('.')}.")
    return "\n".join(f"- {line}" for line in lines)


def lead(records: Sequence[Record], first: str, second: str) -> str:
    """How far the first is ahead of the second, over the seeds that both have."""
    of = {group: {seed(one): figures_of(one) for one in records if one["group"] == group} for group in (first, second)}
    columns = [
        column
        for column in (NATURAL, "pgd-20/linf:8/255", "aa/linf:8/255")
        if any(column in own for own in of[first].values())
    ]
    told = []
    for column in columns:
        both = [
            {column: of[first][one][column] - of[second][one][column]}
            for one in sorted(of[first].keys() & of[second].keys())
            if column in of[first][one] and column in of[second][one]
        ]
        if both:
            told.append(f"{column} {spread(both, column)}")
    return f"`{first}` less `{second}`, seed by seed, in points: {', '.join(told)}." if told else ""


def each_run(page: Page, records: Sequence[Record], columns: Mapping[str, str]) -> str:
    rows = [["run", *columns.values(), "minutes of training", "programs on the GPU"]]
    rows.append(["---", *["---:"] * (len(rows[0]) - 1)])
    for record in records:
        if own := figures_of(record):
            train = next((step for step in record["steps"] if step["command"].split()[1] == "train"), None)
            cells = [Line("", 1, [own]).cell(column) for column in columns]
            source = record["environment"].get("from")  # a branch: what came before it took time as well
            after = f" after {Path(source).name.partition('#')[0]}" if isinstance(source, str) else ""
            cells += [f"{train['seconds'] / 60:.1f}{after}", str(train["jobs"])] if train else ["-", "-"]
            rows.append([f"[{record['name']}]({page.records}/{record['name']}.json)", *cells])
    return markdown(rows)


def put_in(text: str, made: str, path: Path) -> str:
    """The page with its tables replaced."""
    if text.count(FIRST) != 1 or text.count(LAST) != 1:
        raise GeneralistError(f"{path} must have one line {FIRST!r} and one {LAST!r}: tables go between them")
    return re.sub(f"{FIRST}.*{LAST}", lambda _: f"{FIRST}\n\n{made}\n\n{LAST}", text, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the folder with the pages")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where a page is not up to date"
    )
    options = parser.parse_args(arguments)
    stale = []
    for page in PAGES:
        path = options.results / page.path
        before = path.read_text()
        records = records_of(options.results / page.records, list(page.groups))
        after = put_in(before, written(page, records), path)
        if after != before:
            stale.append(page.path)
            if not options.check:
                write_text(path, after)
    if options.check and stale:
        sys.exit(f"not up to date: {', '.join(stale)}")


if __name__ == "__main__":
    main()
