"""Weights & Biases and MLflow, if they are installed. Both are configured by their own environment variables.

A resumed run continues the same entry of the service: its id is stored in RUN/tracking.json.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from generalist.core.files import write_json
from generalist.core.run import RunDirectory
from generalist.recipe import Recipe, to_yaml
from generalist.tracking.base import flat_numbers, flat_settings, grid

PROJECT = "generalist"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def known_ids(run: RunDirectory) -> dict[str, str]:
    """The ids in tracking.json; if the file is damaged there are none, and a new entry is started."""
    path = run.path / "tracking.json"
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in entries if isinstance(value, str) and _ID.fullmatch(value)}


def remember(run: RunDirectory, service: str, identity: str) -> None:
    write_json(run.path / "tracking.json", {**known_ids(run), service: identity})


class WandB:
    """Weights & Biases. It reads WANDB_PROJECT, WANDB_MODE=offline and its other variables itself."""

    name = "wandb"

    def start(self, recipe: Recipe, run: RunDirectory, epochs_done: int) -> None:
        self.wandb: Any = importlib.import_module("wandb")
        known = known_ids(run).get(self.name)
        self.run: Any = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.path.name,
            dir=str(run.path),
            config=recipe.model_dump(mode="json"),
            id=known,
            resume="allow" if known else None,
        )
        remember(run, self.name, str(self.run.id))

    def epoch(self, record: Mapping[str, Any]) -> None:
        self.run.log(flat_numbers(record), step=record["epoch"])

    def images(self, epoch: int, images: Mapping[str, Tensor]) -> None:
        pictures = {name: self.wandb.Image(_picture(batch)) for name, batch in images.items()}
        self.run.log(pictures, step=epoch)

    def end(self, summary: Mapping[str, Any]) -> None:
        self.run.summary.update({"status": summary["status"], **flat_numbers(summary)})
        self.run.finish(exit_code=0 if summary["status"] == "finished" else 1)


class MLflow:
    """MLflow. It reads MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME itself."""

    name = "mlflow"
    params_at_once = 100
    """As many as its servers accept in one call."""

    def start(self, recipe: Recipe, run: RunDirectory, epochs_done: int) -> None:
        self.mlflow: Any = importlib.import_module("mlflow")
        self.client: Any = self.mlflow.MlflowClient()
        known = known_ids(run).get(self.name)
        if known is not None:
            self.client.update_run(known, status="RUNNING")
            self.id = known
            return
        made = self.client.create_run(self._experiment(), run_name=run.path.name)
        self.id = str(made.info.run_id)
        remember(run, self.name, self.id)
        settings = flat_settings(recipe.model_dump(mode="json"))
        params = [self.mlflow.entities.Param(_name(key), str(value)[:500] or "''") for key, value in settings.items()]
        for first in range(0, len(params), self.params_at_once):
            self.client.log_batch(self.id, params=params[first : first + self.params_at_once])
        self.client.log_text(self.id, to_yaml(recipe), "recipe.yaml")

    def _experiment(self) -> str:
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(wanted)
        return str(found.experiment_id if found is not None else self.client.create_experiment(wanted))

    def epoch(self, record: Mapping[str, Any]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self.mlflow.entities.Metric(_name(name), value, now, int(record["epoch"]))
            for name, value in flat_numbers(record).items()
        ]
        self.client.log_batch(self.id, metrics=metrics)

    def images(self, epoch: int, images: Mapping[str, Tensor]) -> None:
        for name, batch in images.items():
            file = f"images/epoch-{epoch:04}-{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.png"
            self.client.log_image(self.id, _picture(batch), file)

    def end(self, summary: Mapping[str, Any]) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED"}.get(str(summary["status"]), "FAILED")
        self.client.set_terminated(self.id, status)


def _name(text: str) -> str:
    """A name that MLflow allows: letters, digits, and _ - . / and spaces."""
    return re.sub(r"[^A-Za-z0-9_./ -]", "_", text)


def _picture(batch: Tensor) -> Any:
    """A grid as an array [H, W, C] of bytes."""
    return grid(batch).permute(1, 2, 0).contiguous().numpy()
