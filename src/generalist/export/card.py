"""The model card: README.md with YAML front matter. Names of classes, recipes and files are anybody's text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from generalist._version import __version__
from generalist.compare import Cell, cells_in, method_of
from generalist.core.plain_yaml import dump_yaml
from generalist.evaluation.accuracy import NATURAL
from generalist.export.source import Source, Summary
from generalist.recipe import Recipe

MOST_CLASSES = 100
"""Names on the card; config.json has all."""


def model_card(source: Source, summaries: Sequence[Summary]) -> str:
    """The whole page."""
    title = source.recipe.name if source.recipe is not None and source.recipe.name else source.name
    parts = [f"# {escaped(title)}", *_description(source), "## Use", _usage(), "## Accuracy", *_accuracy(summaries)]
    if warning := source.about.get("warning"):
        parts.append(f"**Note:** {escaped(str(warning))}.")
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
    if (recipe := source.recipe) is not None:
        threats = ", ".join(str(threat) for threat in recipe.threats()) or "none"
        lines.append(
            f"Trained on {escaped(recipe.data.name)} with the method {escaped(method_of(recipe.learners))} for "
            f"{recipe.train.epochs} epochs; threat models of the training: {escaped(threats)}. These are the weights "
            f"{escaped(source.name)}{'' if source.epoch is None else f', of epoch {source.epoch}'}."
        )
    return lines


def _usage() -> str:
    code = 'import generalist\n\nmodel = generalist.load("FOLDER")  # this folder\nlogits = model(images)'
    text = "`images` are float32 in [0, 1], [batch, channels, height, width]; a normalization, if any, is in the model."
    return f"{fenced(code, 'python')}\n\n{text}"


# -- accuracies -------------------------------------------------------------------------------------------------------


def _accuracy(summaries: Sequence[Summary]) -> list[str]:
    if not summaries:
        return ["No evaluation of these weights is recorded; `generalist evaluate` makes one."]
    return [part for path, summary in summaries for part in _one_evaluation(path, summary)]


def _one_evaluation(path: Path, summary: dict[str, Any]) -> list[str]:
    cells = cells_in(summary, path)
    samples, images = summary.get("samples"), summary.get("images")
    subset = "" if samples == images else f", a random subset of {escaped(str(images))}"
    heading = (
        f"On {escaped(str(samples))} images of {escaped(str(summary.get('split')))}{subset}. "
        f"Precision: {escaped(str(summary.get('precision')))}."
    )
    rows = ["| attack | threat | accuracy (%) | 95% interval | images |", "|---|---|---:|---:|---:|"]
    rows += [_row(name, cell) for name, cell in cells.items()]
    parts = [heading, "\n".join(rows)]
    for kind in ("notes", "warnings"):
        parts += [f"**{kind[:-1].capitalize()}:** {escaped(str(text))}" for text in _list(summary.get(kind))]
    return parts


def _row(name: str, cell: Cell) -> str:
    attack, _, threat = name.partition("/")
    interval = "" if cell.low is None or cell.high is None else f"{100 * cell.low:.2f} to {100 * cell.high:.2f}"
    figures = [f"{100 * cell.value:.2f}", interval, str(cell.samples or "")]
    return f"| {' | '.join([escaped(attack), escaped(threat), *figures])} |"


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else []


def front_matter(source: Source, title: str, summaries: Sequence[Summary]) -> str:
    """What hubs read. The licence is the owner's to choose, so there is none."""
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
    """Without line breaks and without characters that show nothing or turn the direction of writing."""
    spaced = " ".join(text.split())
    return "".join(c if unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in spaced)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, within a line or a table."""
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
    """Every field; of absolute paths only the last part: the rest helps nobody else and says who trained it."""
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
