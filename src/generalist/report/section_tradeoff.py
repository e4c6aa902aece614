"""The trade-off: networks, dial curves and the papers in two planes; for three learners the dials as a simplex."""

from __future__ import annotations

from collections.abc import Sequence

from generalist.compare import ranked
from generalist.comparison_rows import Row
from generalist.dial import Curve, Measured, Point
from generalist.evaluation.accuracy import NATURAL
from generalist.paper_figures import paper_rows
from generalist.report.choices import Choice, choose
from generalist.report.html import Html, short, table, tag
from generalist.report.planes import Spot, Way, plane
from generalist.report.plots import Corner, simplex
from generalist.report.printed import file_name
from generalist.report.runs import Collection, Network, Run
from generalist.report.section import Section, called, evaluating, grid, names, note, numbers, percent

Axis = tuple[str, str, str]
"""The column of a comparison, the name of a dial's accuracy, and the label for both."""


def tradeoff_section(found: Collection) -> Section:
    section = Section("tradeoff", "Trade-off")
    linf, l2 = _choices(found.networks)
    l1 = choose(found.networks, "l1") if linf is None and l2 is None else None
    pairs = _pairs(found.networks, linf, l2 or l1)
    papers = _papers(found.networks)
    if pairs:
        section.add(_filter(found, papers))
        section.add(grid(*(_plane(section, key, found, papers, x, y) for key, x, y in pairs)))
        section.add(note("Bars are 95% intervals. Hollow marks at the edge lie outside, at the figures beside them."))
    chosen = [choice for choice in (linf, l2, l1) if choice]
    section.parts += [note(choice.note) for choice in chosen if choice.note]
    _left_out(section, found.networks, chosen)
    _several_sets(section, found.networks)
    _explain(section, found, papers, pairs)
    return section


def _choices(networks: Sequence[Network]) -> tuple[Choice | None, Choice | None]:
    """The columns of linf and l2; for l2 the one that most of the networks have that have the linf column."""
    linf = choose(networks, "linf")
    both = [network for network in networks if linf and linf.column in network.row.cells]
    return linf, choose(both, "l2") or choose(networks, "l2")


def _pairs(networks: Sequence[Network], linf: Choice | None, other: Choice | None) -> list[tuple[str, Axis, Axis]]:
    """Natural against linf, and linf against l2 (or whatever other norm there is), or natural against that norm if no
    network has both. Empty planes are left out."""
    natural: Axis = (NATURAL, NATURAL, "natural accuracy (%)")
    wanted: list[tuple[str, Axis, Axis]] = []
    if linf:
        wanted.append(("natural-linf", natural, _axis(linf)))
    norm = other.threat.partition(":")[0] if other else ""
    if other and linf and any({linf.column, other.column} <= network.row.cells.keys() for network in networks):
        wanted.append((f"linf-{norm}", _axis(linf), _axis(other)))
    elif other:
        wanted.append((f"natural-{norm}", natural, _axis(other)))
    return [pair for pair in wanted if any({pair[1][0], pair[2][0]} <= n.row.cells.keys() for n in networks)]


def _left_out(section: Section, networks: Sequence[Network], chosen: Sequence[Choice]) -> None:
    """Which networks are not in every plane, and how to add them."""
    lacking = [network for network in networks if any(choice.column not in network.row.cells for choice in chosen)]
    if not lacking:
        return
    attacks = ",".join(dict.fromkeys([NATURAL, *(choice.attack for choice in chosen)]))
    threats = ",".join(choice.threat for choice in chosen)
    more = ["--threats", threats, "--attacks", attacks]
    commands = [evaluating(network, *more) for network in lacking]
    who, what = names([short(network.name, 60) for network in lacking]), " or ".join(c.column for c in chosen)
    section.missing(f"Not in every plane, without {what}: {who}", commands)


def _several_sets(section: Section, networks: Sequence[Network]) -> None:
    by_set: dict[str, list[str]] = {}
    for network in networks:
        by_set.setdefault(network.row.dataset, []).append(short(network.name, 60))
    if len(by_set) > 1:
        listed = "; ".join(f"{short(data, 60)}: {names(who)}" for data, who in by_set.items())
        section.add(note(f"Only networks of one data set can be compared. {listed}."))


def _axis(choice: Choice) -> Axis:
    return choice.column, choice.threat, f"robust accuracy (%): {choice.label}"


def _papers(networks: Sequence[Network]) -> list[Row]:
    """The papers' rows for the same data and network."""
    wanted = {(network.row.dataset, network.row.model) for network in networks}
    return [row for row in paper_rows() if (row.dataset, row.model) in wanted]


def _filter(found: Collection, papers: Sequence[Row]) -> Html:
    methods = list(dict.fromkeys([*(n.row.method for n in found.networks), *(row.method for row in papers)]))
    boxes = [
        tag("label", tag("input", type="checkbox", checked=True, data_filter=method), short(method, 60))
        for method in methods
    ]
    return tag("fieldset", tag("legend", "Methods shown"), *boxes, class_="filter")


def _plane(section: Section, key: str, found: Collection, papers: Sequence[Row], x: Axis, y: Axis) -> Html:
    spots = [_spot(network.row, network.name, network.series, x, y) for network in found.networks]
    spots += [_spot(row, row.method, None, x, y) for row in papers]
    here = [spot for spot in spots if spot is not None]
    ways = [way for network in found.networks if (way := _way(found, network, x, y)) is not None]
    title = f"{y[2]} against {x[2]}"
    drawing = plane(f"tradeoff-{key}", title, x[2], y[2], here, ways)
    heads = ["network", "method", "source", x[2], y[2]]
    rows = [
        [
            short(s.name, 80),
            s.method,
            "ours" if s.series is not None else s.about.split("\n")[0],
            f"{s.x:.2f}",
            f"{s.y:.2f}",
        ]
        for s in here
    ]
    methods = [spot.method for spot in here]
    for way in ways:
        rows += [[f"{way.name}: {tip}", way.method, "dial", f"{px:.2f}", f"{py:.2f}"] for px, py, tip in way.points]
        methods += [way.method] * len(way.points)
    return section.figure(drawing, details=numbers(table(heads, rows, caption=title, sortable=True, methods=methods)))


def _spot(row: Row, name: str, series: int | None, x: Axis, y: Axis) -> Spot | None:
    a, b = row.cells.get(x[0]), row.cells.get(y[0])
    if a is None or b is None:
        return None
    source = "" if series is not None else f"{row.source}\n"
    flags = "".join(f"\n{column}: {cell.flag}; {cell.note}" for column, cell in ((x[0], a), (y[0], b)) if cell.flag)
    about = f"{source}{row.method}, {row.dataset}, {row.model}\n{x[0]} {percent(a.value)}, {y[0]} {percent(b.value)}"
    bounds = [
        (100 * cell.low, 100 * cell.high) if cell.low is not None and cell.high is not None else None for cell in (a, b)
    ]
    return Spot(name, row.method, 100 * a.value, 100 * b.value, bounds[0], bounds[1], series, about + flags)


def _way(found: Collection, network: Network, x: Axis, y: Axis) -> Way | None:
    """The dial curve of a run, only once, in the colour of the network that stands for it."""
    curve = network.run.curve
    if curve is None or found.network_of(network.run) is not network:
        return None
    points = []
    for point in curve.points:
        measured = _measured(point)
        if x[1] not in measured or y[1] not in measured:
            return None
        points.append((100 * measured[x[1]].value, 100 * measured[y[1]].value, _gammas(point)))
    joined = len(curve.own_gamma) == 2
    return Way(f"{network.name}, dial by PGD-{curve.steps}", network.row.method, network.series, points, joined)


def _gammas(point: Point) -> str:
    return ", ".join(f"{short(name, 40)} {share:.3g}" for name, share in point.gamma.items())


def _explain(section: Section, found: Collection, papers: Sequence[Row], pairs: Sequence[object]) -> None:
    curves = [run.curve for run in found.runs if run.curve is not None]
    if pairs and curves:
        where = " or ".join(sorted({_images(curve) for curve in curves}))
        steps = sorted({curve.steps for curve in curves})
        section.add(
            note(
                f"Small dots are the dial, measured with PGD of {' or '.join(map(str, steps))} steps on {where} "
                "images: they lie higher than AutoAttack on test images, so read their shape and not their level. "
                "A dashed line joins those of two learners; those of more fill an area."
            )
        )
    if pairs and papers:
        section.add(note("Hollow diamonds are the papers' published figures for the same data and network."))
    elif pairs:
        data = names(sorted({f"{n.row.dataset} with {n.row.model}" for n in found.networks}))
        section.add(note(f"The papers have no figures for {data}."))
    if not pairs:
        section.missing("No robust accuracies", [called("evaluate", run) for run in found.runs])
    lacking = [run for run in found.runs if run.curve is None and len(run.recipe.learners) > 1]
    if lacking:
        snapped = [run for run in lacking if run.snapshots]
        commands = [called("mix", run, "--curve", "11") for run in snapped]
        if bare := [run for run in lacking if not run.snapshots]:
            commands += [called("train", run, "--resume") for run in bare]
            section.add(note(f"{names([run.name for run in bare])}: no snapshots, which a dial curve needs."))
        section.missing(f"No dial curve of {names([run.name for run in lacking])}", commands)


# -- the simplex ------------------------------------------------------------------------------------------------------


def dial_section(found: Collection) -> Section | None:
    """Every dial: its points, and triangles for three learners. None if no run has several learners."""
    runs = [run for run in found.runs if len(run.recipe.learners) == 3 or run.curve is not None]
    if not runs:
        return None
    section = Section("dial", "The dial", "Dial")
    curves = [(run, run.curve) for run in runs if run.curve is not None]
    of_three = [(run, curve) for run, curve in curves if len(curve.own_gamma) == 3]
    for run, curve in of_three:
        _one_dial(section, run, curve)
    if of_three:
        section.add(
            note(
                "Each dot is a network mixed from three learners by its place in the triangle; brighter is more "
                "accurate. Rings: no other point is as good everywhere and better somewhere. Cross: the run's own."
            )
        )
    for run, curve in curves:
        if len(curve.own_gamma) != 3:
            _one_dial(section, run, curve)
    if lacking := [run for run in runs if run.curve is None]:
        text = f"No dial curve of {names([run.name for run in lacking])}"
        section.missing(text, [called("mix", run, "--curve", "6") for run in lacking])
    return section


def _one_dial(section: Section, run: Run, curve: Curve) -> None:
    columns = ranked(curve.points[0].validation)
    rows = [
        [
            _gammas(point),
            *(percent(_measured(point)[column].value) for column in columns),
            "yes" if point.pareto else "",
        ]
        for point in curve.points
    ]
    title = f"{short(run.name, 80)}: accuracy (%) along the dial, PGD-{curve.steps} on {_images(curve)} images"
    details = numbers(table(["shares", *columns, "Pareto"], rows, caption=title, sortable=True))
    suggestion = [curve.suggestion.text] if curve.suggestion else []
    said = [note(short(text[:1].upper() + text[1:])) for text in [*suggestion, *curve.notes[:3]]]
    figures = _triangles(section, run, curve, columns) if len(curve.own_gamma) == 3 else []
    section.add(tag("h3", short(run.name, 80)), *([grid(*figures)] if figures else []), *said, details)


def _triangles(section: Section, run: Run, curve: Curve, columns: Sequence[str]) -> list[Html]:
    learners = [short(name, 40) for name in curve.own_gamma]
    own = list(curve.own_gamma.values())
    figures = []
    for column in columns:
        corners = [
            Corner(
                (shares[0], shares[1], shares[2]),
                100 * _measured(point)[column].value,
                f"{_gammas(point)}\n{column} {percent(_measured(point)[column].value)}%",
                point.pareto,
            )
            for point in curve.points
            for shares in [list(point.gamma.values())]
        ]
        title = f"{column} accuracy (%)"
        figures.append(section.figure(simplex(file_name("dial", run.name, column), title, learners, corners, own)))
    return figures


def _images(curve: Curve) -> str:
    """The images that the dial was measured on: a run may also validate on its test images."""
    return "test" if curve.points[0].test or curve.split == "test" else "held-out"


def _measured(point: Point) -> dict[str, Measured]:
    return point.test or point.validation
