"""Run directories as `generalist evaluate` leaves them, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from generalist.evaluation.accuracy import Accuracy
from generalist.shipped import shipped_text


def write_run(path: Path, recipe: str, **evaluations: dict[str, tuple[int, int]]) -> Path:
    """A run directory with a recipe and summaries; figures are (correct, total)."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(shipped_text(recipe))
    for key, figures in evaluations.items():
        write_summary(path, key, {name: Accuracy(*pair).as_json() for name, pair in figures.items()})
    return path


def write_summary(run: Path, key: str, accuracy: dict[str, Any], **more: Any) -> None:
    folder = run / "evaluation" / key
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({"subject": "best", "accuracy": accuracy} | more))
