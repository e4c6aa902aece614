"""Accuracies in full: by attack, by class, by corruption and severity."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from generalist.compare import Comparison, ranked, side_by_side
from generalist.comparison_rows import SHIFT_MEANS, UNION_MEAN, UNION_WORST, Row, parts_of
from generalist.dial import Measured
from generalist.evaluation.accuracy import NATURAL
from generalist.paper_figures import published
from generalist.report.drawing import heat_ink, heat_role
from generalist.report.html import Html, folded, join, short, table, tag
from generalist.report.plots import dots, heat_map
from generalist.report.printed import file_name
from generalist.report.runs import Collection, Network
from generalist.report.section import Section, called, grid, names, note, numbers, percent, with_interval
from generalist.shift_figures import Corruptions

MOST_CLASSES = 40
"""The most rows of a table by class, as nobody reads more; the hardest classes are kept."""
MOST_KINDS = 12
MOST_COLUMNS = 60
"""The most columns of attacks and threats, or of corruptions: more than anyone measures."""
UNION = "union"
_CAPTION = "Accuracy (%) and its 95% interval. Click a heading to sort by it."


# -- attack by attack -------------------------------------------------------------------------------------------------


def attacks_section(found: Collection) -> Section:
    section = Section("attacks", "Attack by attack", "Attacks")
    if not found.networks:
        section.missing("No evaluation", [called("evaluate", run) for run in found.runs])
        return section
    comparison = _beside_papers(section, [_attacked(network) for network in found.networks], _CAPTION)
    section.parts += [note(short(text)) for text in comparison.cautions()]
    said = {text: None for network in found.networks for text in network.said("notes")}
    section.parts += [note(short(text)) for text in list(said)[:5]]
    return section


def _attacked(network: Network) -> Row:
    """The figures on uncorrupted images; those on corrupted images have a section of their own."""
    return _with(network, {column for column in network.row.cells if column not in SHIFT_MEANS})


def _with(network: Network, columns: Container[str]) -> Row:
    """A network's row with only these columns, under its name on the page."""
    cells = {column: cell for column, cell in network.row.cells.items() if column in columns}
    return replace(network.row, name=network.name, cells=cells)


def _beside_papers(section: Section, ours: Sequence[Row], caption: str) -> Comparison:
    """A table of these rows and of the papers' rows for the same data and network, with footnotes."""
    comparison = side_by_side([*ours, *published(ours)])
    rows, columns = comparison.rows, comparison.columns[:MOST_COLUMNS]
    marks = comparison.marks()
    beside = len(rows) > len(ours)  # only beside the papers' rows does it matter whose figure it is
    body = [
        [
            short(row.name, 80),
            *([row.source] if beside else []),
            short(row.method, 60),
            *(_figure(row, column, marks.get((number, column))) for column in columns),
        ]
        for number, row in enumerate(rows)
    ]
    heads = ["network", *(["source"] if beside else []), "method", *(_head(column) for column in columns)]
    named_columns = f"named-{3 if beside else 2}"
    methods = [row.method for row in rows]
    section.add(table(heads, body, caption=caption, sortable=True, methods=methods, classes=named_columns))
    if notes := comparison.footnotes():
        section.add(tag("ol", *(tag("li", short(text)) for text in notes), class_="footnotes"))
    return comparison


def _head(column: str) -> Html:
    """The attack above the threat, `union` above its kind, so that columns stay as narrow as their figures."""
    first, second = parts_of(column)
    lines = [*(first.split(" ", 1) if first in (UNION_MEAN, UNION_WORST) else [first]), *([second] if second else [])]
    return join(lines[0], *(part for line in lines[1:] for part in (tag("br"), line)))


def _figure(row: Row, column: str, mark: int | None) -> Html:
    cell = row.cells.get(column)
    if cell is None:
        return tag("td", "")
    if mark is None:
        return with_interval(cell)
    return tag("td", percent(cell.value), tag("sup", f"[{mark}]"), data_value=percent(cell.value))


# -- by class ---------------------------------------------------------------------------------------------------------


ByClass = dict[str, dict[str, Measured]]
"""By class, then `natural`, threat or union."""


def classes_section(found: Collection) -> Section:
    section = Section("classes", "By class", "Classes")
    networks = [network for network in found.networks if any(e.summary.classes for e in network.evaluations)]
    if not networks:
        section.missing("No accuracies by class", [called("evaluate", run) for run in found.runs])
        return section
    sets = list(dict.fromkeys(network.row.dataset for network in networks))
    for data in sets:
        if len(sets) > 1:  # the same class name in two data sets means two classes
            section.add(tag("h3", short(data, 80)))
        members = [network for network in networks if network.row.dataset == data]
        _classes_of(section, members, [data] if len(sets) > 1 else [])
    measured = [m for n in networks for kinds in _accuracies(n, UNION).values() for m in kinds.values()]
    fewest = min(m.total for m in measured)
    farthest = max(max(m.interval[1] - m.value, m.value - m.interval[0]) for m in measured)
    text = (
        "Under attack: right under all attacks of one evaluation, the network's largest in that threat. Classes "
        f"have few images, {fewest} or more: 95% intervals reach up to {100 * farthest:.0f} points up or down."
    )
    section.add(note(text))
    return section


def _classes_of(section: Section, networks: Sequence[Network], prefix: Sequence[str]) -> None:
    """The figures for one data set."""
    unions = {_union(network) for network in networks} - {""}
    by_class = [_accuracies(network, _union(network) if len(unions) > 1 else UNION) for network in networks]
    every = list(dict.fromkeys(name for classes in by_class for name in classes))
    kinds = ranked(kind for classes in by_class for accuracies in classes.values() for kind in accuracies)[:MOST_KINDS]
    chosen = every if len(every) <= MOST_CLASSES else _hardest(by_class, every)
    if len(chosen) < len(every):
        section.add(note(f"The {len(chosen)} hardest of {len(every)} classes; the rest is in summary.json of each."))
    shown = list(zip(networks, by_class, strict=True))
    section.add(grid(*(_kind(section, kind, chosen, shown, prefix) for kind in kinds)))


def _union(network: Network) -> str:
    """The name of a network's union if others have theirs over other threats; empty if it has none over two or more."""
    threats = next((w for e in network.evaluations if len(w := e.summary.worst_case) > 1), {})
    return f"{UNION} of {', '.join(ranked(threats))}" if threats else ""


def _accuracies(network: Network, union: str) -> ByClass:
    """Each accuracy from the largest evaluation that has it, with the union under the name `union`.

    The union over a single threat equals that threat, and over none the natural accuracy: those are left out.
    """
    found: ByClass = {}
    for summary in (entry.summary for entry in network.evaluations):
        for name, kinds in summary.classes.items():
            own = found.setdefault(name, {})
            for kind, measured in kinds.items():
                if kind != UNION:
                    own.setdefault(kind, measured)
                elif len(summary.worst_case) > 1:
                    own.setdefault(union, measured)
    return found


def _hardest(by_class: Sequence[ByClass], every: Sequence[str]) -> list[str]:
    def mean(name: str) -> float:
        found = [m.value for classes in by_class for m in classes.get(name, {}).values()]
        return sum(found) / len(found) if found else 1.0

    kept = set(sorted(every, key=mean)[:MOST_CLASSES])
    return [name for name in every if name in kept]


def _kind(
    section: Section,
    kind: str,
    classes: Sequence[str],
    networks: Sequence[tuple[Network, ByClass]],
    prefix: Sequence[str],
) -> Html:
    values = [
        {name: accuracies[kind].value for name, accuracies in by_class.items() if kind in accuracies}
        for _, by_class in networks
    ]
    having = [(network, found) for (network, _), found in zip(networks, values, strict=True) if found]
    union, _, of = kind.partition(" of ")
    words = {NATURAL: "Natural", UNION: f"Union: right under {of or 'every threat'}"}
    title = words.get(union, f"Under attack, {kind}")
    body = [[short(name, 60), *(_heat(found.get(name)) for _, found in having)] for name in classes]
    heads = ["class", *(short(network.name, 60) for network, _ in having)]
    details = numbers(table(heads, body, caption=f"{title}: accuracy (%) by class", sortable=True))
    rows = [(network.name, network.series, found) for network, found in having]
    return section.figure(dots(file_name("classes", *prefix, kind), title, classes, rows), details=details)


def _heat(value: float | None) -> Html:
    if value is None:
        return tag("td", "")
    return tag("td", f"{100 * value:.1f}", class_=f"heat b-{heat_role(value)} f-{heat_ink(value)}")


# -- corruptions ------------------------------------------------------------------------------------------------------


def corruptions_section(found: Collection) -> Section:
    section = Section("corruptions", "Corruptions")
    having = [(network, network.shift.corruptions) for network in found.networks if network.shift.corruptions]
    if having:
        section.add(grid(*(_map(section, network, corruptions) for network, corruptions in having)))
        sources = {corruptions.source for _, corruptions in having}
        section.add(note(f"Accuracy in per cent by corruption and severity. Images: {names(sorted(sources))}."))
    _sequences(section, found)
    if means := [network for network in found.networks if network.row.cells.keys() & set(SHIFT_MEANS)]:
        caption = "Mean accuracy (%) over the benchmark's 15 common corruptions, and over its ten sequences."
        _beside_papers(section, [_with(network, SHIFT_MEANS) for network in means], caption)
    has = {id(network.run) for network, _ in having}
    if lacking := [run for run in found.runs if id(run) not in has]:
        commands = [called("evaluate", run, "--preset", "quick", "--corruptions", "common") for run in lacking]
        section.missing(f"No corruptions of {names([run.name for run in lacking])}", commands)
    return section


def _map(section: Section, network: Network, found: Corruptions) -> Html:
    cells = {
        name.replace("_", " "): {severity: accuracy.value for severity, accuracy in entry.severities.items()}
        | {"mean": entry.mean}
        for name, entry in list(found.corruptions.items())[:MOST_COLUMNS]
    }
    columns = list(dict.fromkeys(key for row in cells.values() for key in row))
    rows = [[name, *(_heat(row.get(column)) for column in columns)] for name, row in cells.items()]
    title = f"{short(network.name, 34)}: {100 * found.mean:.1f}% on average"
    drawing = heat_map(file_name("corruptions", network.name), title, cells, x_label="severity")
    caption = f"{short(network.name, 80)}: accuracy (%) by corruption and severity"
    return section.figure(
        drawing, details=numbers(table(["corruption", *columns], rows, caption=caption, sortable=True))
    )


def _sequences(section: Section, found: Collection) -> None:
    """Stability over sequences of small perturbations, if it was measured."""
    for network in found.networks:
        if network.shift.perturbations is None:
            continue
        rows = [
            [name.replace("_", " "), percent(entry.accuracy), percent(entry.flip_rate)]
            for name, entry in network.shift.perturbations.sequences.items()
        ]
        caption = f"{short(network.name, 80)}: sequences of small perturbations"
        heads = ["sequence", "accuracy (%)", "flip rate (%)"]
        section.add(folded(caption, table(heads, rows, caption=caption, sortable=True)))
