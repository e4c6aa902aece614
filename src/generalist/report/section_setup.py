"""What produced the numbers: how recipes differ, the environment of the runs, and the commands that reproduce them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from generalist._version import __version__
from generalist.dial import Curve
from generalist.evaluation.accuracy import NATURAL
from generalist.evaluation.out_of_distribution import FAMILIES
from generalist.recipe import to_yaml
from generalist.report.html import folded, short, table, tag
from generalist.report.runs import Collection, Evaluated, Network, Run
from generalist.report.section import Section, called, evaluating, note

MOST_VALUE = 160
MOST_TEXT = 50_000
WORDS = {"name", "source"}
"""Fields in which a recipe describes itself: they always differ, and are no settings."""
KEYS = ("generalist", "commit", "python", "torch", "platform", "device", "threads", "seed")


# -- recipes ----------------------------------------------------------------------------------------------------------


def recipes_section(found: Collection) -> Section:
    section = Section("recipes", "Recipes")
    fields = [_flat(run.recipe.model_dump(mode="json")) for run in found.runs]
    if len(fields) > 1:
        keys = list(dict.fromkeys(["learners", *(key for entry in fields for key in entry)]))
        for run, entry in zip(found.runs, fields, strict=True):
            entry["learners"] = ", ".join(learner.name for learner in run.recipe.learners)
        differing = [key for key in keys if key not in WORDS and _differs(key, fields)]
        rows = [
            [tag("code", short(key, 120)), *(short(entry.get(key, ""), MOST_VALUE) for entry in fields)]
            for key in differing
        ]
        heads = ["field", *(short(run.name, 80) for run in found.runs)]
        if rows:
            caption = f"The {len(rows)} fields, of {len(keys)}, in which the recipes differ. Empty: not in this recipe."
            section.add(table(heads, rows, caption=caption, classes="words"))
        else:
            section.add(note("The recipes do not differ."))
    for run in found.runs:
        section.add(
            folded(f"{short(run.name, 80)}: every field", tag("pre", short(to_yaml(run.recipe), MOST_TEXT), tabindex=0))
        )
    return section


def _differs(key: str, fields: Sequence[dict[str, str]]) -> bool:
    """Whether a field differs. A learner that a recipe lacks is shown in the row of the learners, not in each field."""
    values = {entry[key] for entry in fields if key in entry}
    everywhere = key.startswith("learners.") or all(key in entry for entry in fields)
    return len(values) > 1 or not everywhere


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """A value's text by its path `a.b.c`; learners are named instead of numbered."""
    if isinstance(value, Mapping):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}{key}.").items()}
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        named = {str(entry["name"]): entry for entry in value if "name" in entry}
        if len(named) == len(value):
            return {k: v for key, inner in named.items() for k, v in _flat(inner, f"{prefix}{key}.").items()}
        # Threats, for example: one field, instead of one for each norm and eps.
        return {prefix.removesuffix("."): "; ".join(" ".join(map(_text, entry.values())) for entry in value)}
    return {prefix.removesuffix("."): _text(value)}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return str(value) if value else "–"
    return "–" if value is None else str(value)


# -- environment and commands -----------------------------------------------------------------------------------------


def environment_section(found: Collection, command: Sequence[str]) -> Section:
    section = Section("environment", "Environment and commands", "Environment")
    rows = [[key, *(_entry(key, run.environment.get(key)) for run in found.runs)] for key in KEYS]
    data = list(dict.fromkeys(name for run in found.runs for name in _data(run)))
    rows += [
        [f"data: {short(name, 40)} (SHA-256)", *(_data(run).get(name, "–")[:16] for run in found.runs)] for name in data
    ]
    heads = ["what", *(short(run.name, 80) for run in found.runs)]
    section.add(table(heads, rows, caption="What the runs ran on", classes="words"))
    lines = [line for run in found.runs for line in _commands(found, run)]
    lines.append(shlex.join(["generalist", "report", *command]))
    section.add(tag("h3", "Commands"), tag("pre", "\n".join(lines), class_="wrap"))
    section.add(note(f"Made by generalist {__version__}. The page holds everything it shows; it loads nothing."))
    return section


def _entry(key: str, value: Any) -> str:
    if key == "commit" and value is not None:
        return str(value)[:12]
    return "–" if value is None else short(str(value), MOST_VALUE)


def _data(run: Run) -> dict[str, str]:
    found = run.environment.get("data")
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, Mapping) else {}


def _commands(found: Collection, run: Run) -> list[str]:
    """Commands that reproduce the run and its measurements, in another directory than the run's own."""
    lines = [shlex.join(["generalist", "train", str(run.directory.recipe), "--out", f"{run.path}-again"])]
    for network in found.networks:
        if network.run is run:
            lines += [_evaluate(network, entry) for entry in network.evaluations]
    if run.curve is not None:
        lines.append(called("mix", run, *_curve_options(run.curve)))
    return lines


def _curve_options(curve: Curve) -> list[str]:
    first = curve.points[0]
    counts = [images[NATURAL].total for images in (first.validation, first.test) if images and NATURAL in images]
    values = {
        "--curve": _edge(len(curve.own_gamma), len(curve.points)),
        "--epoch": curve.epoch,
        "--source": curve.source,
        "--statistics": curve.statistics,
        "--steps": curve.steps,
        "--samples": max(counts),
    }
    options = [word for name, value in values.items() for word in (name, str(value))]
    return [*options, *(["--test"] if first.test else [])]


def _evaluate(network: Network, entry: Evaluated) -> str:
    identity, summary = entry.summary.identity, entry.summary
    columns = [str(name) for name in identity.get("columns", [])] if isinstance(identity.get("columns"), list) else []
    attacks = list(dict.fromkeys([NATURAL, *(name.partition("/")[0] for name in columns)]))
    threats = list(dict.fromkeys(name.partition("/")[2] for name in columns))
    words = ["--attacks", ",".join(attacks)]
    if (data := summary.split.removesuffix("-test").removesuffix("-train")) != network.run.recipe.data.name:
        words += ["--data", data]
    words += ["--threats", ",".join(threats)] if threats else []
    for key in ("mode", "precision", "seed"):
        words += [f"--{key}", str(identity[key])] if key in identity else []
    words += ["--batch-size", str(identity["batch_size"])] if "batch_size" in identity else []
    words += ["--samples", str(summary.samples)] if summary.indices is not None else []
    if entry.shift is not None and entry.shift.corruptions is not None:
        listed = tuple(entry.shift.corruptions.corruptions)
        family = next((name for name, members in FAMILIES.items() if {*members} == {*listed}), None)
        words += ["--corruptions", family or ",".join(listed)]
    words += ["--perturbations"] if entry.shift is not None and entry.shift.perturbations is not None else []
    parts = [entry.shift.corruptions, entry.shift.perturbations] if entry.shift is not None else []
    words += ["--official", "FOLDER"] if any(part is not None and not part.generated for part in parts) else []
    return evaluating(network, *words)


def _edge(learners: int, points: int) -> int:
    """The number of points along an edge of a dial that has `points` points in all; see `generalist.dial`."""
    if learners <= 2:
        return points
    if learners == 3:
        return (math.isqrt(8 * points + 1) - 1) // 2
    edges = learners * (learners - 1) // 2
    return (points - learners - 1) // edges + 2
