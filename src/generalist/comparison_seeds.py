"""Rows of a comparison that differ in the seed alone, as one row of means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from generalist.comparison_rows import OURS, UNION_WORST, Cell, Row, under_autoattack
from generalist.core.errors import GeneralistError


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """Our rows whose recipes differ in the seed alone, put together where the first of them stood.

    Only figures that every seed has: a mean over fewer would be of other runs than its neighbours. Two runs of one
    recipe and one seed are no two samples, and refused.
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
    """Whether it is a worst case under AutoAttack for some of the rows alone: no mean of one figure."""
    strong = {under_autoattack(row, column) for row in rows if column in row.cells}
    return column.startswith(UNION_WORST) and len(strong) > 1


def _means(rows: Sequence[dict[str, Cell]]) -> dict[str, Cell]:
    columns = [column for column in rows[0] if all(column in cells for cells in rows)]
    return {column: _mean([cells[column] for cells in rows]) for column in columns}


def _mean(cells: Sequence[Cell]) -> Cell:
    """Without an interval: that of one network's images says nothing about the next seed."""
    values = [cell.value for cell in cells]
    counts = {cell.samples for cell in cells}
    samples = counts.pop() if len(counts) == 1 else None
    return Cell(fmean(values), samples=samples, of=cells[0].of, deviation=stdev(values), runs=len(values))
