"""A folder for model hubs: weights, config.json and a model card. `generalist.load(FOLDER)` reads it."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from generalist._version import __version__
from generalist.core.files import clear_write_errors, write_json, write_text
from generalist.export.card import model_card, shared_recipe
from generalist.export.source import Source
from generalist.training.artefacts import save_weights


def write_folder(source: Source, path: Path) -> list[str]:
    """A new folder appears complete. In an existing one (a clone of a hub's repository) our files are replaced."""
    summaries = source.summaries()
    card = model_card(source, summaries)
    if path.is_dir():
        _fill(source, path, card)
    else:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            _fill(source, temporary, card)
            with clear_write_errors(path):
                temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    notes = [f"read it with: generalist.load({str(path)!r})"]
    if not summaries:
        notes.append(f"the card has no accuracies: {_remedy(source)}")
    return notes


def _remedy(source: Source) -> str:
    """How to get accuracies of these weights onto the card."""
    if source.run is None:
        return "they are read from the run that contains the weights, and these are in no run"
    words = [str(source.file), "--out", str(source.run.path / "evaluation")]
    if source.file.resolve() == source.run.model.resolve():
        words = [str(source.run.path)]
    command = shlex.join(["generalist", "evaluate", *words])
    return f"the run has no evaluation of these weights; make one with `{command}`, then export again"


def _fill(source: Source, folder: Path, card: str) -> None:
    save_weights(folder / "model.safetensors", source.state(), source.about)
    write_json(folder / "config.json", configuration(source))
    write_text(folder / "README.md", card)


def configuration(source: Source) -> dict[str, Any]:
    """Facts for other tools. `generalist.load` reads the header of the weights instead."""
    channels, height, width = source.shape
    found: dict[str, Any] = {
        "library_name": "generalist",
        "generalist_version": __version__,
        "architecture": source.about["model"],
        "num_classes": len(source.classes),
        "id2label": {str(number): name for number, name in enumerate(source.classes)},
        "image": {"channels": channels, "height": height, "width": width, "minimum": 0, "maximum": 1},
        "epoch": source.epoch,
    }
    if source.recipe is not None:
        found["recipe"] = shared_recipe(source.recipe)
    return found
