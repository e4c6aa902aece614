"""The headline cards: each network's accuracies with their intervals."""

from __future__ import annotations

from collections.abc import Mapping

from generalist.compare import AUTOATTACK
from generalist.comparison_rows import UNION_MEAN, UNION_WORST, Cell, parts_of, under_autoattack
from generalist.evaluation.accuracy import NATURAL
from generalist.report.choices import strongest, threats_of
from generalist.report.drawing import Drawing, series_mark, series_role
from generalist.report.html import Html, short, tag
from generalist.report.plots import interval
from generalist.report.runs import Collection, Evaluated, Network
from generalist.report.section import Section, called, names, note, percent
from generalist.report.svg import inline

MOST_WARNINGS = 20
MOST_THREATS = 8


def summary_section(found: Collection) -> Section:
    section = Section("summary", "Summary")
    if found.networks:
        section.add(tag("div", *(_card(network) for network in found.networks), class_="cards"))
        splits = list(
            dict.fromkeys(network.main.summary.split for network in found.networks if network.main.summary.split)
        )
        where = f" on {names([short(split, 60) for split in splits])}" if splits else ""
        section.add(
            note(
                f"Accuracy in per cent{where}, with Wilson's 95% interval. An image counts as right under AutoAttack, "
                "or in the worst case of several attacks, where none of these changes the answer: stronger attacks can "
                "only lower the number. The union counts images that are right under every threat."
            )
        )
    warned: dict[str, list[str]] = {}
    for network in found.networks:
        for text in network.said("warnings"):
            warned.setdefault(text, []).append(short(network.name, 60))
    if warned:
        entries = [
            tag("li", tag("strong", names(who)), f": {short(text)}")
            for text, who in list(warned.items())[:MOST_WARNINGS]
        ]
        section.add(tag("ul", *entries, class_="warning", aria_label="Warnings"))
    if runs := found.without_evaluation():
        text = f"{', '.join(run.name for run in runs)}: no evaluation"
        section.missing(text, [called("evaluate", run) for run in runs])
    return section


def swatch(series: int) -> Html:
    """The network's mark, as in the figures."""
    drawing = Drawing("swatch", "", 14, 14)
    drawing.mark(7, 7, series_mark(series), role=series_role(series), size=5)
    return inline(drawing, decorative=True)


def _card(network: Network) -> Html:
    row = network.row
    figures = [_figure("natural", row.cells[NATURAL])] if NATURAL in row.cells else []
    figures += [_robust(network, threat, attacks) for threat, attacks in list(threats_of(row).items())[:MOST_THREATS]]
    for column, cell in row.cells.items():
        union, of = parts_of(column)
        if union == UNION_WORST:
            strong = ", AutoAttack" if under_autoattack(row, column) else ""
            figures.append(_figure("union", cell, f"{of or 'all threats'}{strong}"))
        elif union == UNION_MEAN:
            figures.append(_figure("mean", cell, of or "over threats: papers' union"))
    about = " · ".join([row.method, row.dataset, row.model, *([f"{row.images} images"] if row.images else [])])
    return tag(
        "article",
        tag("h3", swatch(network.series), short(network.name, 80)),
        tag("p", short(about, 120), class_="about"),
        tag("dl", *figures),
        class_="card",
        data_method=row.method,
    )


def _robust(network: Network, threat: str, attacks: Mapping[str, Cell]) -> Html:
    """AutoAttack if it was run; else the accuracy under all attacks of one evaluation together."""
    attack, cell = strongest(attacks)
    if attack == AUTOATTACK:
        return _figure(threat, cell, "AutoAttack")
    together = [
        (worst.value, tried, worst)
        for found in network.evaluations
        if (worst := found.summary.worst_case.get(threat)) is not None
        and (tried := _tried(found, threat)) > 1
        and worst.total == cell.samples
        and worst.value <= cell.value
    ]
    if together:
        value, tried, worst = min(together, key=lambda entry: entry[:2])
        return _figure(threat, Cell(value, *worst.interval, worst.total), f"worst of {tried} attacks")
    return _figure(threat, cell, f"{attack} alone" if len(attacks) == 1 else f"{attack}, strongest")


def _tried(found: Evaluated, threat: str) -> int:
    """The number of attacks of an evaluation in a threat."""
    columns = found.summary.identity.get("columns")
    return sum(parts_of(str(name))[1] == threat for name in columns) if isinstance(columns, list) else 0


def _figure(name: str, cell: Cell, what: str = "") -> Html:
    title = f"{name}: {percent(cell.value)}%"
    if cell.low is not None and cell.high is not None:
        title += f", 95% interval {percent(cell.low)} to {percent(cell.high)}"
        bounds = f"{percent(cell.low)} to {percent(cell.high)}"
    else:
        bounds = ""
    value = tag("dd", tag("strong", percent(cell.value)))
    about = tag("dd", tag("small", what), tag("small", bounds), class_="small")
    bar = tag("dd", inline(interval(title, cell.value, cell.low, cell.high)), class_="bar")
    return tag("div", tag("dt", name), value, about, bar)
