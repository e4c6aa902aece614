"""What an iteration costs: the passes that each docstring names, counted at a convolution."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from objectives_toy import make_toy
from torch.utils._python_dispatch import TorchDispatchMode
from training_helpers import ROBUST, tiny_recipe, train

from generalist.objectives import OBJECTIVES
from generalist.recipe import load_recipe

STEPS = 10
BESIDE = {"beside": ["l2:0.3"]}
THREE = {"beside": ["l2:0.3", "l1:0.9"]}


class Passes(TorchDispatchMode):
    """Counts passes of the whole batch: forward, back to the images, and back to the weights."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.forward, self.images, self.weights = batch, 0.0, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.forward += len(args[0]) / self.batch
        elif func is torch.ops.aten.convolution_backward.default:
            to_weights = args[-1][1]
            self.images += 0 if to_weights else len(args[1]) / self.batch
            self.weights += len(args[1]) / self.batch if to_weights else 0
        return func(*args, **(kwargs or {}))

    @property
    def cost(self) -> float:
        """In forward passes: to the weights one goes back twice, for activations and for weights."""
        return self.forward + self.images + 2 * self.weights


def passes(objective: Any, path: Path) -> Passes:
    """Of one iteration with ten attack steps."""
    learner = {"attack": None, "threat": None} if objective in ("nt", "nt-distil") else {"attack": {"steps": STEPS}}
    toy = make_toy(objective, path, scalars={"tau": 0.0, "steered": 1.0}, **learner)
    toy.objective.epoch_start(1)
    toy.progress = replace(toy.progress, variant=toy.objective.variants[0])
    with Passes(len(toy.batch.y)) as counted:
        toy.gradients()
    return counted


@pytest.mark.parametrize(
    ("objective", "forward", "images", "weights"),
    [
        ("nt", 1, 0, 1),
        ("nt-distil", 2, 0, 1),
        ("at", 11, 10, 1),
        ("at-half", 12, 10, 2),
        ("trades", 13, 10, 2),
        ("mart", 12, 10, 2),
        ("fat", 11, 10, 1),
        ("iat", 12, 10, 2),
        ("rst", 12, 10, 2),
        ("score", 13, 10, 2),
        ({"kind": "score", "form": "at"}, 11, 10, 1),
        ("agr", 12, 10, 2),
        ({"kind": "part", "rest": 0.05}, 11, 10, 1),
        ("fast-at", 2, 1, 1),
        ("awp", 12, 10, 2),
        ("at-distil", 12, 10, 1),
        ({"kind": "e-at", **BESIDE}, 11, 10, 1),
        ({"kind": "at-linf-l2", **BESIDE}, 22, 20, 2),
        ({"kind": "at-max", **BESIDE}, 23, 20, 1),
        ({"kind": "ramp", **BESIDE}, 23, 20, 3),
        ({"kind": "msd", **BESIDE}, 32, 10, 1),
        ({"kind": "msd", **THREE}, 42, 10, 1),
    ],
    ids=str,
)
def test_passes_of_an_iteration(tmp_path: Path, objective: Any, forward: int, images: int, weights: int) -> None:
    found = passes(objective, tmp_path)
    assert (found.forward, found.images, found.weights) == (forward, images, weights)


def test_an_iteration_of_awp_costs_no_more_in_its_warm_up(tmp_path: Path) -> None:
    toy = make_toy({"kind": "awp", "warmup": 0.5}, tmp_path)
    found = dict[str, tuple[float, float, float]]()
    for name in toy.objective.variants:
        toy.progress = replace(toy.progress, variant=name)
        with Passes(len(toy.batch.y)) as counted:
            toy.gradients()
        found[name] = counted.forward, counted.images, counted.weights
    last = toy.objective.learner.epochs
    assert found == {toy.objective.variant(0, last): (5, 3, 2), toy.objective.variant(0, 1): (4, 3, 1)}


def test_passes_of_an_iteration_with_helper_images(tmp_path: Path) -> None:
    train(tiny_recipe([ROBUST]), tmp_path / "teacher").directory.recipe.write_text("{}")
    teacher = {"kind": "hat", "teacher": str(tmp_path / "teacher")}
    found = passes({**teacher, "around": "at"}, tmp_path / "at")
    assert (found.forward, found.images, found.weights) == (13, 10, 2)
    usual, plain = passes(teacher, tmp_path / "trades"), passes("at", tmp_path / "plain")
    assert (usual.forward, usual.images, usual.weights) == (15, 10, 3)
    assert usual.cost / plain.cost == pytest.approx(4 / 3, rel=0.02), "a third more than AT"


@pytest.mark.parametrize(("objective", "times"), [({"kind": "msd", **BESIDE}, 2), ({"kind": "msd", **THREE}, 2.5)])
def test_msd_in_terms_of_at(tmp_path: Path, objective: Any, times: float) -> None:
    relative = passes(objective, tmp_path / "msd").cost / passes("at", tmp_path / "at").cost
    assert relative == pytest.approx(times, rel=0.1)


def test_the_costs_in_the_table_of_baselines_are_those_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """part's maps cost 2 passes more than its iterations; rmc and the Generalists are sums of others."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    told = dict(importlib.import_module("baselines_table").PASSES)
    for name in [name for name in told if name != "rmc" and not name.startswith("generalist")]:
        objective = load_recipe(f"baseline-digits-{name}").learners[0].objective.model_dump(mode="json")
        counted = passes("nt" if name == "nt" else objective, tmp_path / name).cost
        assert told[name] == counted + (2 if name == "part" else 0), name
    assert told["generalist-d"] == told["at"] + told["nt"]
    assert told["generalist-t"] == told["generalist-d-linf-l2"] + told["nt"] == 2 * told["at"] + told["nt"]
    assert told["rmc"] == 2 * told["at"] + told["msd"] / 2


def shipped() -> list[str]:
    return [name for name in OBJECTIVES if OBJECTIVES.get(name).__module__.startswith("generalist.")]


@pytest.mark.parametrize("name", shipped())
def test_docstrings_say_what_is_minimised_by_whom_and_what_it_costs(name: str) -> None:
    text = inspect.getdoc(OBJECTIVES.get(name)) or ""
    assert text.startswith("Minimises ")
    assert name == "nt" or re.search(r", (19|20)\d\d\b|the papers' AT", text), "its source"
    cost = re.split(r"\b[Cc]osts\b", text)[1]
    assert name == "at" or re.search(r"\bAT\b", cost), "relative to AT"


WORDS = {0.75: "last quarter", 1 / 6: "a sixth", 0: "0", None: "none"}
"""How docstrings say constants that they do not give as numbers."""


@pytest.mark.parametrize("name", shipped())
def test_docstrings_say_the_constants(name: str) -> None:
    """Every number that an objective has by default, and the threats beside the learner's own."""
    text = inspect.getdoc(OBJECTIVES.get(name)) or ""
    defaults = {key: field.default for key, field in OBJECTIVES.get(name).Options.model_fields.items()}
    numbers = {key: value for key, value in defaults.items() if type(value) in (int, float) and key != "temperature"}
    for key, value in numbers.items():
        assert re.search(rf"(?<![\d.]){re.escape(WORDS.get(value, f'{value:g}'))}(?![\d])", text), (key, value)
    for threat in defaults.get("beside", []):
        assert str(threat).replace(":", " ") in text, threat
