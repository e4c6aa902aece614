"""The model card: README.md with YAML front matter. Names of classes, recipes and files may be any text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from generalist._version import __version__
from generalist.attacks.threats import ThreatOptions
from generalist.compare import cells_in
from generalist.comparison_rows import Cell, parts_of
from generalist.core.plain_yaml import dump_yaml
from generalist.core.run import AVERAGE, PART
from generalist.evaluation.accuracy import NATURAL
from generalist.export.source import Source, Summary
from generalist.method_names import method_of
from generalist.recipe import Recipe
from generalist.shift_figures import read_shift
from generalist.training.learner_options import LearnerOptions

MOST_CLASSES = 100
"""The most class names on the card; config.json has all."""


def model_card(source: Source, summaries: Sequence[Summary]) -> str:
    """The whole card."""
    title = source.recipe.name if source.recipe is not None and source.recipe.name else source.name
    parts = [f"# {escaped(title)}", *_description(source), "## Use", _usage(), "## Accuracy", *_accuracy(summaries)]
    if warning := source.about.get("warning"):
        parts.append(f"**Note:** {escaped(str(warning))}.")
    parts += ["## Intended use and limits", *_limits(source), "## Licence", LICENCE]
    parts += ["## Classes", _classes(source.classes)]
    if source.recipe is not None:
        parts += ["## Recipe", "All settings of the training run; of absolute paths only the last part."]
        parts.append(fenced(dump_yaml(shared_recipe(source.recipe), ascii_only=True), "yaml"))
    return front_matter(source, title, summaries) + "\n" + "\n\n".join(parts) + "\n"


def _description(source: Source) -> list[str]:
    channels, height, width = source.shape
    count = sum(parameter.numel() for parameter in source.model.parameters())
    lines = [
        f"An image classifier of {len(source.classes)} classes: network {escaped(str(source.about['model']['name']))}, "
        f"{count:,} parameters, images of {channels}x{height}x{width}, exported by generalist {__version__}."
    ]
    if source.stages:
        last, epochs = source.stages[-1], " + ".join(str(stage.train.epochs) for stage in source.stages)
        lines.append(
            f"The run was trained on {escaped(last.data.name)} with the method "
            f"{escaped(method_of(last.learners))}, by a recipe of {epochs} epochs; threat models of the "
            f"training: {_threats(last.threats())}."
        )
    epoch = "" if source.epoch is None else f" Epoch: {source.epoch}."
    return [*lines, _which(source) + epoch]


def _threats(threats: Sequence[ThreatOptions]) -> str:
    return escaped(", ".join(map(str, threats)) or "none")


MIXED = {"raw": "learners", "averaged": "learners' averages", "parts": "learners' parts of its global learner"}
"""What a mixture is of, by its source."""


def _which(source: Source) -> str:
    """Which network of the run these weights are: a learner may have other threats than the run as a whole."""
    mix = source.about.get("mix")
    if isinstance(mix, dict) and isinstance(shares := mix.get("gamma"), dict):
        listed = ", ".join(f"{name} {share}" for name, share in shares.items())
        mixed = MIXED.get(str(mix.get("source")), MIXED["raw"])
        return (
            f"These weights are the run's {mixed} mixed with other shares than in training: "
            f"{escaped(listed)}; BatchNorm statistics: {escaped(str(mix.get('statistics')))}."
        )
    learner = _learner(source)
    if learner is not None:
        return (
            f"These weights are {_kind(source)}those of one learner, {escaped(learner.name)} (objective "
            f"{escaped(learner.objective.kind)}; its own threat models: {_threats(learner.threats())}), and not of the "
            "run's global network."
        )
    kinds = {"best": "the best epoch by the recipe's rule", "last": "the last epoch"}
    return f"These weights are those of {kinds.get(source.name, escaped(source.name))}."


def _kind(source: Source) -> str:
    """What a learner's file holds but its weights as they are."""
    kinds = {AVERAGE: "the average over time of ", PART: "what the global learner has of "}
    return next((words for ending, words in kinds.items() if source.file.stem.endswith(ending)), "")


def _learner(source: Source) -> LearnerOptions | None:
    """The learner whose weights the file of a snapshot holds, if any."""
    if not source.stages or source.run is None or source.file.resolve().parent.parent != source.run.snapshots.resolve():
        return None
    stem = source.file.stem.removesuffix(AVERAGE).removesuffix(PART)
    return next((learner for learner in source.stages[-1].learners if learner.name == stem), None)


LICENCE = (
    "None is stated here. Whoever publishes these weights chooses one, considering that of the training images, and "
    "adds it above as `license:`."
)


def _limits(source: Source) -> list[str]:
    """What the accuracies do and do not promise."""
    data = f", those of {escaped(source.recipe.data.name)}" if source.recipe is not None else ""
    return [
        f"For research, and for images like those that it was trained on{data}. It predicts one of its classes for "
        "every image, even if none of them is in it.",
        "A threat `norm:eps` allows every change whose norm is at most eps, of pixels in [0, 1]. Accuracies under "
        "attack hold for these threats, attacks and images alone: other norms, larger eps, changes that no norm bounds "
        "(patches, rotations, weather) and stronger attacks may do worse, and nothing here is a certificate. Do not "
        "rely on it where a wrong answer could harm someone.",
    ]


def _usage() -> str:
    code = 'import generalist\n\nmodel = generalist.load("FOLDER")  # this folder\nlogits = model(images)'
    text = "`images` are float32 in [0, 1], [batch, channels, height, width]; a normalization, if any, is in the model."
    return f"{fenced(code, 'python')}\n\n{text}"


# -- accuracies -------------------------------------------------------------------------------------------------------


def _accuracy(summaries: Sequence[Summary]) -> list[str]:
    if not summaries:
        return ["No evaluation of these weights is recorded; `generalist evaluate` makes one."]
    return [*(part for path, summary in summaries for part in _one_evaluation(path, summary)), EXPLAINED]


def _one_evaluation(path: Path, summary: dict[str, Any]) -> list[str]:
    cells = cells_in(summary, path)
    samples, images = summary.get("samples"), summary.get("images")
    subset = "" if samples == images else f", a random subset of {escaped(str(images))}"
    heading = (
        f"On {escaped(str(samples))} images of {escaped(str(summary.get('split')))}{subset}. "
        f"Precision: {escaped(str(summary.get('precision')))}.{_conditions(summary)}"
    )
    rows = ["| attack | threat | accuracy (%) | 95% interval | images |", "|---|---|---:|---:|---:|"]
    rows += [_row(name, cell) for name, cell in cells.items()]
    parts = [heading, "\n".join(rows), *_attacks(summary), *_corrupted(path.parent)]
    for kind in ("notes", "warnings"):
        parts += [f"**{kind[:-1].capitalize()}:** {escaped(str(text))}" for text in _list(summary.get(kind))]
    return parts


EXPLAINED = (
    "An image counts where the network is right before and after the attack. `aa` is AutoAttack, the worst of APGD-CE, "
    "APGD-T, FAB-T and Square for each image. Of the unions, the worst case counts images that are right under every "
    "threat; the mean is that of AutoAttack over the threats. Intervals are Wilson's, of the images alone: they do not "
    "show how much another training run would differ."
)


def _identity(summary: dict[str, Any]) -> dict[str, Any]:
    known = summary.get("identity")
    return known if isinstance(known, dict) else {}


def _conditions(summary: dict[str, Any]) -> str:
    """Version, device and seed of an evaluation, as far as it names them."""
    identity = _identity(summary)
    said = {"generalist": identity.get("version"), "device": summary.get("device"), "seed": identity.get("seed")}
    listed = ", ".join(f"{name} {escaped(str(value))}" for name, value in said.items() if value is not None)
    return f" Evaluated by: {listed}." if listed else ""


def _attacks(summary: dict[str, Any]) -> list[str]:
    """Every attack with its settings."""
    attacks = _identity(summary).get("attacks")
    if not isinstance(attacks, dict) or not attacks:
        return []
    listed = "; ".join(f"{escaped(str(name))} {escaped(str(settings))}" for name, settings in attacks.items())
    return [f"Attacks: {listed}."]


def _corrupted(folder: Path) -> list[str]:
    """The mean over corruptions, if the same evaluation measured any."""
    shift = read_shift(folder)
    if shift is None or shift.corruptions is None:
        return []
    found = shift.corruptions
    return [f"Mean accuracy on corrupted images ({escaped(found.source)}): {100 * found.mean:.2f}%."]


def _row(name: str, cell: Cell) -> str:
    attack, threat = parts_of(name)
    interval = "" if cell.low is None or cell.high is None else f"{100 * cell.low:.2f} to {100 * cell.high:.2f}"
    figures = [f"{100 * cell.value:.2f}", interval, str(cell.samples or "")]
    return f"| {' | '.join([escaped(attack), escaped(threat or cell.of), *figures])} |"


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else []


def front_matter(source: Source, title: str, summaries: Sequence[Summary]) -> str:
    """What hubs read. It names no licence, as that is the owner's choice."""
    results = [
        {
            "task": {"type": "image-classification"},
            "dataset": {"name": one_line(str(summary.get("split"))), "type": one_line(str(summary.get("split")))},
            "metrics": [_metric(name, cell) for name, cell in cells_in(summary, path).items()],
        }
        for path, summary in summaries
    ]
    matter: dict[str, Any] = {
        "library_name": "generalist",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "adversarial-robustness"],
    }
    if results:
        matter["model-index"] = [{"name": one_line(title), "results": results}]
    text = yaml.safe_dump(matter, sort_keys=False, allow_unicode=False, width=10_000)
    return f"---\n{text}---\n"


def _metric(name: str, cell: Cell) -> dict[str, Any]:
    kind = "accuracy" if name == NATURAL else f"accuracy under {one_line(name)}"
    return {"type": "accuracy", "name": kind, "value": round(100 * cell.value, 2)}


# -- text -------------------------------------------------------------------------------------------------------------

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>&~$@:^])")


def one_line(text: str) -> str:
    """Without line breaks, and without characters that are invisible or change the direction of writing."""
    spaced = " ".join(text.split())
    return "".join(c if unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in spaced)


def escaped(text: str) -> str:
    """Text that Markdown shows literally, within a line or a table."""
    return _SPECIAL.sub(r"\\\1", one_line(text))


def fenced(text: str, language: str) -> str:
    """A code block that its content cannot close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _classes(names: Sequence[str]) -> str:
    shown = ", ".join(f"{number} {escaped(name)}" for number, name in enumerate(names[:MOST_CLASSES]))
    return shown if len(names) <= MOST_CLASSES else f"{shown}, ...; config.json has all {len(names)}."


_ABSOLUTE = re.compile(r"(?:[/~\\]|[A-Za-z]:[/\\]).*")


def shared_recipe(recipe: Recipe) -> dict[str, Any]:
    """Every field, but of absolute paths only the last part: the rest helps nobody and reveals who trained it."""
    raw: dict[str, Any] = _without_paths(recipe.model_dump(mode="json"))
    return raw


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_paths(entry) for entry in value]
    if isinstance(value, str) and _ABSOLUTE.fullmatch(value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value
