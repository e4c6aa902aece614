"""TensorBoard: event files in RUN/tensorboard, shown by `tensorboard --logdir RUN`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from generalist.core.run import RunDirectory
from generalist.recipe import Recipe, to_yaml
from generalist.tracking.base import flat_numbers, flat_settings, grid


class TensorBoard:
    """Scalars of every epoch, grids of images, the recipe as text, and its fields beside the final accuracies."""

    name = "tensorboard"

    def start(self, recipe: Recipe, run: RunDirectory, epochs_done: int) -> None:
        # Hides what an interrupted run wrote about epochs that are now repeated.
        purge = epochs_done + 1 if epochs_done else None
        make: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self.writer = make(str(run.path / "tensorboard"), purge_step=purge)
        self.settings = flat_settings(recipe.model_dump(mode="json"))
        indented = "\n".join(f"    {line}" for line in to_yaml(recipe).splitlines())  # code in TensorBoard's Markdown
        self.writer.add_text("recipe", indented, epochs_done)

    def epoch(self, record: Mapping[str, Any]) -> None:
        for name, value in flat_numbers(record).items():
            if name != "epoch":
                self.writer.add_scalar(name, value, record["epoch"])
        self.writer.flush()

    def images(self, epoch: int, images: Mapping[str, Tensor]) -> None:
        for name, batch in images.items():
            self.writer.add_image(name, grid(batch), epoch)

    def end(self, summary: Mapping[str, Any]) -> None:
        metrics = {f"final/{name}": value for name, value in flat_numbers(summary.get("accuracy", {})).items()}
        if metrics:
            self.writer.add_hparams(self.settings, metrics, run_name=".")
        self.writer.close()
