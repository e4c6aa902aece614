"""What is exported: a network and everything that the run knows about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from generalist.compare import read_summary
from generalist.core.run import RunDirectory
from generalist.evaluation.identity import slug, weights_checksum
from generalist.evaluation.records import SUMMARY
from generalist.recipe import Recipe, load_recipe, stage_recipes
from generalist.training.artefacts import load_weights
from generalist.weights import network_of, run_of, weights_file

Summary = tuple[Path, dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """One network, in evaluation mode, on the CPU, in float32."""

    name: str
    """best, last, a learner's name or that of the weights file; safe as part of a file name."""
    file: Path
    home: Path
    """Where exports go by default: the run, or the folder of the weights file."""
    model: nn.Module
    about: dict[str, Any]
    """The header of the weights file."""
    run: RunDirectory | None
    recipe: Recipe | None
    """The whole recipe."""
    stages: Sequence[Recipe]
    """One for each of the run's stages, or the recipe alone; the weights are the result of the last."""

    @property
    def classes(self) -> list[str]:
        return [str(name) for name in self.about["classes"]]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = (int(size) for size in self.about["shape"])
        return channels, height, width

    @property
    def epoch(self) -> int | None:
        """The last epoch that these weights were trained for, if the header names it."""
        epoch = self.about.get("epoch")
        return epoch if isinstance(epoch, int) else None

    def state(self) -> dict[str, Tensor]:
        """Copies of all tensors by name; a tied tensor has a copy under each name, as safetensors requires."""
        return {name: tensor.detach().clone().contiguous() for name, tensor in self.model.state_dict().items()}

    def summaries(self) -> list[Summary]:
        """The run's evaluations of exactly these weights, without parts that were not joined yet."""
        if self.run is None:
            return []
        found = [(path, read_summary(path)) for path in sorted(self.run.path.glob(f"evaluation/*/{SUMMARY}"))]
        mine = weights_checksum(self.model)
        return [(path, summary) for path, summary in found if _weights_of(summary) == mine and "shard" not in summary]


def open_source(path: Path, which: str, *, trust_code: bool) -> Source:
    """The network that a run (with `which`), an exported folder or a weights file stands for."""
    run = run_of(path)
    file = weights_file(path, which)
    state, about = load_weights(file)
    model = network_of(state, about, file, trust_code=trust_code).eval()
    recipe = load_recipe(run.recipe, trust_code=trust_code) if run is not None else None
    home = run.path if run is not None else file.parent
    stages = stage_recipes(recipe, trust_code=trust_code) if recipe is not None else []
    return Source(slug(which if path.is_dir() else file.stem), file, home, model, about, run, recipe, stages)


def _weights_of(summary: dict[str, Any]) -> Any:
    identity = summary.get("identity")
    return identity.get("weights") if isinstance(identity, dict) else None
