"""Rows of a comparison that differ only in the seed, merged into one row of means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from generalist.comparison_rows import OURS, UNION_WORST, Cell, Row, under_autoattack
from generalist.core.errors import GeneralistError


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """Merge our rows whose recipes differ only in the seed, in the place of the first of them.

    Only figures that every seed has are kept: a mean over fewer would be of other runs than its neighbours. Two runs
    with the same recipe and seed are not two samples, and are refused.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for number, row in enumerate(rows):
        alone = (number,)  # a paper's row
        same = (row.recipe, row.dataset, row.subject, row.apart)
        groups.setdefault(same if row.source == OURS else alone, []).append(row)
    return [_merged(group) for group in groups.values()]


def _merged(rows: Sequence[Row]) -> Row:
    first = rows[0]
    if len(rows) == 1:
        return first
    seeds = [row.seed for row in rows]
    for i, row in enumerate(rows):
        if row.seed in seeds[:i]:
            twin = rows[seeds.index(row.seed)].name
            raise GeneralistError(f"{twin} and {row.name} have the same recipe and seed: name one of them")
    mixed = {column for column in first.cells if _of_unlike_attacks(rows, column)}
    cells = {column: cell for column, cell in _means([row.cells for row in rows]).items() if column not in mixed}
    details = _means([row.details for row in rows])
    files = [path for row in rows for path in row.files]
    named = f"{first.name}, seeds {', '.join(str(seed) for seed in sorted(seeds))}"
    return replace(first, name=named, cells=cells, files=files, details=details)


def _of_unlike_attacks(rows: Sequence[Row], column: str) -> bool:
    """Whether it is a worst case under AutoAttack for only some of the rows, so that their mean is meaningless."""
    strong = {under_autoattack(row, column) for row in rows if column in row.cells}
    return column.startswith(UNION_WORST) and len(strong) > 1


def _means(rows: Sequence[dict[str, Cell]]) -> dict[str, Cell]:
    columns = [column for column in rows[0] if all(column in cells for cells in rows)]
    return {column: _mean([cells[column] for cells in rows]) for column in columns}


def _mean(cells: Sequence[Cell]) -> Cell:
    """The mean, without an interval: one over the images of a network says nothing about other seeds."""
    values = [cell.value for cell in cells]
    counts = {cell.samples for cell in cells}
    samples = counts.pop() if len(counts) == 1 else None
    return Cell(fmean(values), samples=samples, of=cells[0].of, deviation=stdev(values), runs=len(values))
