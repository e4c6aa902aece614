"""Runs side by side, and next to the figures that the papers print.

A run's figures come from its evaluations (RUN/evaluation/*/summary.json, and corruptions.json beside it).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from generalist.comparison_rows import (
    GENERATED,
    MAX_BYTES,
    NORMS,
    OFFICIAL,
    OURS,
    PLUS_MINUS,
    SHIFT_MEANS,
    UNION_MEAN,
    UNION_WORST,
    Cell,
    Row,
    in_full,
    of_several,
    under_autoattack,
    unions_apart,
)
from generalist.comparison_seeds import over_seeds
from generalist.core.errors import GeneralistError, RunError
from generalist.core.run import RunDirectory
from generalist.evaluation.accuracy import NATURAL, Accuracy
from generalist.evaluation.records import SUMMARY
from generalist.method_names import method_of
from generalist.paper_figures import published
from generalist.recipe import Recipe, load_recipe, stage_recipes
from generalist.shift_figures import shift_figures
from generalist.weights import checksum_of

AUTOATTACK = "aa"
_BEHIND_RUN = re.compile(r"(?:@\d{1,9})?(?:#[^#/]*)?$")
"""The part of `RUN[@EPOCH][#SUBJECT]` behind the run."""


class Target(NamedTuple):
    """What was evaluated: figures of other weights or on other images are not of the same thing."""

    subject: str
    split: str
    weights: str
    data: str


# -- our runs ---------------------------------------------------------------------------------------------------------


def run_names(paths: Sequence[Path]) -> list[str]:
    """A name for each run: the last part of its path, or as many parts as it takes to tell all runs apart."""
    whole = [path.resolve() for path in paths]
    if len(set(whole)) < len(whole):
        twice = next(path for i, path in enumerate(paths) if whole[i] in whole[:i])
        raise GeneralistError(f"{twice} is named twice: name each run once")
    depth = 1
    while True:
        names = ["/".join(path.parts[-depth:]) for path in whole]
        if len(set(names)) == len(names):
            return names
        depth += 1


def rows_of(run: Path, *, name: str | None = None, trust_code: bool = False) -> list[Row]:
    """One row for each network of a run that was evaluated (best, last, a learner) and each set of images.

    Those on the run's own data set come first. If weights changed between two evaluations, as after further training,
    each has its own row, and one for weights that the run no longer has says so. `name` is what the run is called, by
    default the last part of its path.
    """
    name = run.resolve().name if name is None else name
    directory = RunDirectory(run).require()
    recipe = load_recipe(directory.recipe, trust_code=trust_code)
    groups: dict[Target, list[tuple[Path, dict[str, Any]]]] = {}
    for path in sorted(run.glob(f"evaluation/*/{SUMMARY}")):
        summary = read_summary(path)
        groups.setdefault(_target(summary), []).append((path, summary))
    if not groups:
        raise RunError(f"{run} has no evaluation: run `generalist evaluate {shlex.quote(str(run))}` first")
    seedless = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 0})}).model_dump_json()
    seedless += _origin(directory, recipe)
    stages = stage_recipes(recipe, trust_code=trust_code)
    epochs, recipe = " + ".join(str(stage.train.epochs) for stage in stages), stages[-1]
    against = ", ".join(dict.fromkeys(str(threat) for learner in recipe.learners for threat in learner.threats()))
    subjects = {what.subject for what in groups}
    current = {subject: checksum_of(run, subject, trust_code=trust_code) for subject in subjects}
    rows = []
    for what, summaries in groups.items():
        own = not what.split or what.split.removesuffix("-test").removesuffix("-train") == recipe.data.name
        apart = _apart(what, own, groups, current[what.subject])
        dataset = recipe.data.known_as if own else what.split
        files = [path for path, _ in summaries]
        means, single = shift_figures(path.parent for path in files)
        cells = {**_cells(summaries), **means}
        about = (OURS, dataset, recipe.model.name, method_of(recipe.learners), cells, what.subject)
        row = Row(named(name, apart), *about, apart, files, seedless, seed=recipe.train.seed, details=single)
        rows.append((not own, replace(row, epochs=epochs, against=against)))
    return [row for _, row in sorted(rows, key=lambda entry: entry[0])]


def _origin(directory: RunDirectory, recipe: Recipe) -> str:
    """How it began: fresh, or from which epoch and network of another run. Which run does not matter, as every seed may
    branch from one of its own."""
    first = directory.stage(recipe.stages[0].name) if len(recipe.stages) > 1 else directory
    source = (first.read_environment() or {}).get("from")
    sources = source if isinstance(source, dict) else {"": source}
    return json.dumps({str(name): text and _BEHIND_RUN.findall(str(text))[0] for name, text in sources.items()})


def _target(summary: dict[str, Any]) -> Target:
    known = _known(summary)
    texts = (summary.get("subject", "model"), summary.get("split", ""), known.get("weights", ""), known.get("data", ""))
    return Target(*map(str, texts))


def _known(summary: dict[str, Any]) -> dict[str, Any]:
    """What its verdicts depend on, where it says so."""
    identity = summary.get("identity")
    return identity if isinstance(identity, dict) else {}


def _apart(what: Target, own: bool, others: Iterable[Target], current: str | None) -> str:
    words = [] if what.subject == "best" else [what.subject]
    words += [] if own else [f"on {what.split}"]
    alike = [other for other in others if other[:2] == what[:2]]
    if current is not None and what.weights not in ("", current):
        words.append(f"earlier weights {what.weights[:8]}")
    elif current is None and len({other.weights for other in alike}) > 1:
        words.append(f"weights {what.weights[:8] or 'unknown'}")
    if len({other.data for other in alike}) > 1:
        words.append(f"data {what.data[:8] or 'unknown'}")
    return ", ".join(words)


def named(run: str, apart: str) -> str:
    """A row's name, made from that of its run."""
    return f"{run} ({apart})" if apart else run


def _cells(summaries: Iterable[tuple[Path, dict[str, Any]]]) -> dict[str, Cell]:
    """The figures of several evaluations. The one on more images counts; of two on the same images, the lower one, of
    the stronger attack; of two equally large draws, the first. Unions over different threats are different figures, and
    a worst case under AutoAttack counts before others."""
    cells: dict[tuple[str, str], Cell] = {}
    ranks: dict[tuple[str, str], tuple[bool, int]] = {}
    draws: dict[tuple[str, str], Any] = {}
    for path, summary in summaries:
        found, draw = cells_in(summary, path), _known(summary).get("samples")
        for column, cell in found.items():
            strong = column == UNION_WORST and UNION_MEAN in found  # that mean is of AutoAttack in every threat
            key, rank = (column, cell.of), (strong, cell.samples or 0)
            before = cells.get(key)
            lower = before is not None and rank == ranks[key] and draw == draws[key] and cell.value < before.value
            if before is None or rank > ranks[key] or lower:
                cells[key], ranks[key], draws[key] = cell, rank, draw
    several = of_several(cells)
    return {in_full(column, of) if column in several else column: cell for (column, of), cell in cells.items()}


def read_summary(path: Path) -> dict[str, Any]:
    """The contents of the file, refused if it is no summary."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RunError(f"{path} is too large to be a summary; evaluate again")
        summary: Any = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}; evaluate again") from None
    if not isinstance(summary, dict) or not isinstance(summary.get("accuracy"), dict):
        raise RunError(f"{path} is damaged: it has no accuracies; evaluate again")
    return summary


def cells_in(summary: dict[str, Any], path: Path) -> dict[str, Cell]:
    """The figures of a summary: natural, `attack/threat` as they were asked for, and the unions."""
    names = _together(summary)
    found = {names.get(str(name), str(name)): _cell(entry, path) for name, entry in summary["accuracy"].items()}
    cells = {name: found[name] for name in ranked(found)}
    tried = summary.get("worst_case")
    of = ", ".join(ranked(map(str, tried))) if isinstance(tried, dict) else ""
    if "union_worst_case" in summary:
        cells[UNION_WORST] = replace(_cell(summary["union_worst_case"], path), of=of)
    mean = summary.get("mean_over_threats")
    # The papers' union is a mean under AutoAttack; other means are no such figure.
    if isinstance(mean, dict) and mean.get("of") == AUTOATTACK and isinstance(mean.get("value"), int | float):
        samples = cells[NATURAL].samples if NATURAL in cells else None
        cells[UNION_MEAN] = Cell(_share(mean["value"], path), samples=samples, of=of)
    return cells


def _together(summary: dict[str, Any]) -> dict[str, str]:
    """The names of a cascade's columns by all attacks so far: behind `aa/linf`, pgd-20 becomes `aa + pgd-20/linf`."""
    known = _known(summary)
    columns = known.get("columns") if known.get("mode") == "cascade" else None
    so_far: dict[str, list[str]] = {}
    found = {}
    for column in map(str, columns if isinstance(columns, list) else []):
        attack, _, threat = column.partition("/")
        so_far.setdefault(threat, []).append(attack)
        found[column] = f"{' + '.join(so_far[threat])}/{threat}"
    return found


def _cell(entry: Any, path: Path) -> Cell:
    correct, total = (entry.get(key) if isinstance(entry, dict) else None for key in ("correct", "total"))
    if type(correct) is not int or type(total) is not int or not 0 <= correct <= total or not 0 < total < 2**53:
        raise RunError(f"{path} is damaged: {str(entry)[:80]!r} is not an accuracy; evaluate again")
    accuracy = Accuracy(correct, total)
    low, high = accuracy.interval
    return Cell(accuracy.value, low, high, total)


def _share(value: float, path: Path) -> float:
    if not 0 <= value <= 1:
        raise RunError(f"{path} is damaged: {value} is not a share; evaluate again")
    return float(value)


# -- side by side -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Rows in the order in which they are shown, and the columns that any of our rows has."""

    rows: list[Row]
    columns: list[str]
    lacking: list[str] = field(default_factory=list)
    """If the papers were asked for, what they lack, one line each."""

    def footnotes(self) -> list[str]:
        """Remarks on the marked figures, in the order of `marks`."""
        return [
            f"{row.source}, {row.method}, {column}: {cell.flag}; {cell.note}" for row, column, cell in self._marked()
        ]

    def marks(self) -> dict[tuple[int, str], int]:
        """The footnote's number, from 1, of each marked figure, by row and column."""
        positions = {id(row): i for i, row in enumerate(self.rows)}
        return {(positions[id(row)], column): i for i, (row, column, _) in enumerate(self._marked(), 1)}

    def remarks(self) -> list[str]:
        """Remarks on the figures as a whole, and where to find more."""
        ours = [
            cell for row in self.rows for cell in row.cells.values() if cell.low is not None and cell.high is not None
        ]
        said = []
        if ours:
            farthest = max(max((cell.high or 0.0) - cell.value, cell.value - (cell.low or 0.0)) for cell in ours)
            said.append(f"95% intervals reach up to {100 * farthest:.1f} points up or down; --format csv has them")
        said += self.cautions()
        if any(row.details for row in self.rows):
            said.append(
                "corruptions, sequences: means over the benchmark's 15 and 10 where all were measured; "
                "--format csv has every corruption and sequence"
            )
        return [*said, *self.lacking]

    def cautions(self) -> list[str]:
        """Remarks that belong to the figures wherever they are shown: which cannot be compared, what a deviation is."""
        said = []
        for column in self.columns:
            having = [row for row in self.rows if row.source == OURS and column in row.cells]
            weak = [row.name for row in having if not under_autoattack(row, column)]
            if column.startswith(UNION_WORST) and 0 < len(weak) < len(having):
                said.append(
                    f"{column}: under attacks weaker than AutoAttack, and so too high next to it: {'; '.join(weak)}"
                )
        means = [(row, cell) for row in self.rows if row.source == OURS for cell in row.cells.values() if cell.runs]
        if unlike := dict.fromkeys(row.name for row, cell in means if cell.samples is None):
            said.append(f"means of figures on different numbers of images: {'; '.join(unlike)}")
        said += self._about_training()
        if any(cell.deviation is not None for row in self.rows for cell in row.cells.values()):
            said.append(f"{PLUS_MINUS}: the standard deviation over seeds, of which the figure is the mean")
        return said

    def _about_training(self) -> list[str]:
        """Differences in training that keep rows from being compared, even if they were evaluated alike."""
        said, known = [], [row for row in self.rows if row.source == OURS]
        if len({row.dataset for row in known}) > 1:
            said.append("the data sets differ: figures on one say nothing about those on another")
        for norm in NORMS:
            trained = dict[str, list[str]]()
            for row in known:
                for threat in row.against.split(", "):
                    if threat.startswith(f"{norm}:"):
                        trained.setdefault(threat, []).append(row.name)
            if len(trained) > 1:
                told = (f"{'; '.join(names)}: {threat}" for threat, names in trained.items())
                said.append(f"trained against different threats: {', '.join(told)}")
        if len(known) < len(self.rows):
            lengths = dict[str, list[str]]()
            for row in known:
                lengths.setdefault(row.epochs, []).append(row.name)
            told = (f"{'; '.join(names)}: {epochs}" for epochs, names in lengths.items())
            said.append(f"epochs of training: {', '.join(told)}; the papers, on CIFAR-10: 120")
        return said

    def _marked(self) -> list[tuple[Row, str, Cell]]:
        found = ((row, column, row.cells.get(column)) for row in self.rows for column in self.columns)
        return [(row, column, cell) for row, column, cell in found if cell is not None and cell.flag]


def side_by_side(rows: Sequence[Row]) -> Comparison:
    """These rows, with the columns that any of ours has; unions over different threats are different columns."""
    apart = unions_apart(rows)
    return Comparison(apart, ranked(column for row in apart if row.source == OURS for column in row.cells))


def ranked(columns: Iterable[str]) -> list[str]:
    """The columns, which files keep in alphabetical order, sorted: natural first, then threats by norm, with AutoAttack
    last in each, then unions and corruptions."""
    return sorted(dict.fromkeys(columns), key=_rank)


def _rank(column: str) -> tuple[int, str, int, str]:
    bare = column.partition(":")[0] in NORMS  # a threat without an attack; mind the fraction in linf:8/255
    attack, _, threat = ("", "", column) if bare else column.partition("/")
    norm = threat.partition(":")[0]
    if column == NATURAL:
        return 0, "", 0, ""
    if norm in NORMS and ":" in threat:
        return 1 + NORMS.index(norm), threat, int(attack.startswith(AUTOATTACK)), attack
    if column in SHIFT_MEANS:
        return 10, "", SHIFT_MEANS.index(column), ""
    return 9, "", 0, column


def compare(
    runs: Sequence[str | Path], *, paper: bool = False, seeds: bool = False, trust_code: bool = False
) -> Comparison:
    """The evaluated networks of these runs; with `paper`, followed by the papers' rows for the same set-up. With
    `seeds`, runs that differ only in the seed are merged into one row of means."""
    if not runs:
        raise GeneralistError("name at least one run to compare")
    paths = [Path(run) for run in runs]
    named_paths = zip(paths, run_names(paths), strict=True)
    ours = [row for path, name in named_paths for row in rows_of(path, name=name, trust_code=trust_code)]
    if seeds:
        ours = over_seeds(unions_apart(ours))
    rows: list[Row] = []
    for i, row in enumerate(ours):
        rows.append(row)
        if paper and row.setup not in [later.setup for later in ours[i + 1 :]]:
            # once, behind the last of several runs with the same set-up
            rows += published(other for other in ours if other.setup == row.setup)
    found = side_by_side(rows)
    return replace(found, lacking=_lacking(ours)) if paper else found


def _lacking(ours: Sequence[Row]) -> list[str]:
    """What the papers have no comparable figures for."""
    said = []
    shown = published(ours)
    setups = dict.fromkeys(row.setup for row in ours)
    if alone := [", ".join(s) for s in setups if not published(row for row in ours if row.setup == s)]:
        said.append(f"no comparable figures in the papers: {'; '.join(alone)}")
    unlike: dict[str, list[str]] = {}
    for row in published(map(_as_official, ours)):
        if row not in shown:
            unlike.setdefault(row.source, []).append(", ".join(row.setup))
    said += [
        f"{source} is of the official files (--official), not of generated corruptions: {'; '.join(whose)}"
        for source, whose in unlike.items()
    ]
    return said


def _as_official(row: Row) -> Row:
    """The row as if its corruptions were the official ones, to find the papers' rows that it would then match."""
    generated = [column for column in row.cells if column in SHIFT_MEANS and column.startswith(GENERATED)]
    return replace(row, cells={column.replace(GENERATED, OFFICIAL, 1): row.cells[column] for column in generated})
