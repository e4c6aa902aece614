"""The rows of a comparison: figures of our runs, and of the papers' tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

UNION_MEAN, UNION_WORST = "union (mean)", "union (worst case)"
NORMS = ("linf", "l2", "l1")
OURS = "ours"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"

OFFICIAL, GENERATED = "official", "generated"
"""Where corrupted images are from: the benchmark's files, or this library. Figures on the two cannot be compared."""
CORRUPTIONS, SEQUENCES = "corruptions", "sequences"
LEVEL5, LEVELS, SEQUENCES_MEAN = f"{CORRUPTIONS}/level 5", f"{CORRUPTIONS}/levels 1-5", f"{SEQUENCES}/mean"
"""Means over the benchmark's 15 common corruptions at severity 5 and at all severities, and over its ten sequences."""
SHIFT_MEANS = tuple(f"{kind} {mean}" for kind in (OFFICIAL, GENERATED) for mean in (LEVEL5, LEVELS, SEQUENCES_MEAN))

MAX_BYTES = 1 << 26
"""No file of figures is larger."""


@dataclass(frozen=True)
class Cell:
    """One figure: an accuracy in [0, 1], with remarks."""

    value: float
    low: float | None = None
    high: float | None = None
    samples: int | None = None
    flag: str = ""
    """`impossible`, `disagrees` or `outlier`, if a printed figure is one."""
    note: str = ""
    of: str = ""
    """The threats of a union, separated by commas; empty if they are not known."""
    deviation: float | None = None
    """For a mean over seeds, the standard deviation (n - 1)."""
    runs: int | None = None
    """For a mean, the number of runs; None for the figure of one run."""


@dataclass
class Row:
    """A network of a run, or a row of a paper's table."""

    name: str
    source: str
    """`ours`, or the paper and its table."""
    dataset: str
    model: str
    method: str
    cells: dict[str, Cell] = field(default_factory=dict)
    """By column of a table."""
    subject: str = ""
    """Which network of a run: `best`, `last` or a learner's name."""
    apart: str = ""
    """How it differs from the run's best network on the run's own images; a part of its name."""
    files: list[Path] = field(default_factory=list)
    """The summaries that these figures come from."""
    recipe: str = ""
    """The run's recipe without its seed."""
    seed: int = 0
    epochs: str = ""
    """How long it was trained: a number, or one for each stage; empty if not known."""
    against: str = ""
    """The threats that it was trained against, separated by commas."""
    details: dict[str, Cell] = field(default_factory=dict)
    """Figures that would make a table too wide: single corruptions and sequences."""

    @property
    def setup(self) -> tuple[str, str, str]:
        """Data, network and method."""
        return self.dataset, self.model, self.method

    @property
    def images(self) -> str:
        """The number of images that its figures were measured on, as `500` or `100 to 500`; empty if not known."""
        counts = sorted({cell.samples for cell in self.cells.values() if cell.samples})
        return "" if not counts else str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


# -- unions -----------------------------------------------------------------------------------------------------------


def parts_of(column: str) -> tuple[str, str]:
    """The attack and the threat of a column, or the union and its threats; the second may be empty."""
    union = column.startswith((UNION_MEAN, UNION_WORST))
    first, _, second = column.partition(" of " if union else "/")
    return first, second


def of_several(keys: Iterable[tuple[str, str]]) -> set[str]:
    """The unions that appear with more than one set of threats."""
    columns = [column for column, of in set(keys) if of]
    return {column for column in columns if columns.count(column) > 1}


def in_full(column: str, of: str) -> str:
    """A union's column with the threats that it is over."""
    return f"{column} of {of}" if of else column


def under_autoattack(row: Row, column: str) -> bool:
    """Whether a worst case over threats is under AutoAttack: only then is there a mean over the same threats."""
    means = {cell.of for name, cell in row.cells.items() if parts_of(name)[0] == UNION_MEAN}
    return column in row.cells and row.cells[column].of in means


def unions_apart(rows: Sequence[Row]) -> list[Row]:
    """The rows, with unions under their plain name if all are over the same threats, else with the threats named."""
    bare = [[(parts_of(c)[0] if cell.of else c, cell) for c, cell in row.cells.items()] for row in rows]
    several = of_several((column, cell.of) for cells in bare for column, cell in cells)
    return [
        replace(row, cells={in_full(c, cell.of) if c in several else c: cell for c, cell in cells})
        for row, cells in zip(rows, bare, strict=True)
    ]
