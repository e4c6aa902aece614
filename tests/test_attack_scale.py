"""Attacks that grow: `attack.scale` is a factor on eps and on the steps, and on nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from objectives_toy import EPS, Toy, make_toy
from pydantic import ValidationError
from torch import Tensor
from training_helpers import ROBUST, assert_engines_agree, make_trainer, stopped_and_resumed, tiny_recipe, train

from generalist.attacks.pgd import AttackOptions
from generalist.attacks.threats import Shrunk, Threat, parse_threat
from generalist.data.sets import Batch
from generalist.objectives.base import SCALE, Inputs, Progress
from generalist.training.loop import Trainer

RISING = {"fractions": [0, 1], "values": [0, 1]}
ONE_NORM: list[Any] = [
    *("at", "at-half", "trades", "mart", "fat", "rst", "score", "fast-at", "ar-at", "at-distil", "agr", "part"),
    {"kind": "awp", "around": "trades"},
    {"kind": "at-distil", "attack_from": "teacher"},
]
SEVERAL_NORMS = ["at-linf-l2", "at-max", "msd", "e-at", "ramp"]
SCALES = {"none": None, "whole": 1.0, "part": 0.25, "nothing": 0.0}


@pytest.mark.parametrize("share", [1.0, 0.5, 1e-6])
@pytest.mark.parametrize("word", ["linf:0.1", "l2:0.7", "l1:3"])
def test_a_shrunk_threat_is_the_threat_of_a_smaller_eps(word: str, share: float) -> None:
    whole = parse_threat(word).build()
    small: Threat = type(whole)(whole.eps * share)
    shrunk = Shrunk(whole.eps, inner=whole, share=torch.tensor(share, dtype=torch.float64))
    like = torch.zeros(4, 3, 5, 5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for size in (0.1, 1.0, 10.0):
        delta = small.eps * size * torch.randn(like.shape, dtype=torch.float64, generator=generator)
        torch.testing.assert_close(shrunk.project(delta), small.project(delta), rtol=1e-9, atol=1e-9 * small.eps)
    index, args = torch.arange(4), (3, "start")
    starts = [each.random_start(*args, index, 5, like) for each in (shrunk, small)]
    torch.testing.assert_close(*starts, rtol=1e-6, atol=0)  # draws are made in single precision
    assert torch.equal(shrunk.steepest(delta), share * small.steepest(delta))
    assert str(shrunk) == str(whole), "draws are named by the threat: they do not change with its size"


def perturbations(objective: Any, path: Path, scale: float | None) -> tuple[Toy, list[Tensor]]:
    """What the objective adds to its images, for each batch that it attacks."""
    scalars = {"tau": 9.0, "steered": 1.0, **({} if scale is None else {SCALE: scale})}
    toy = make_toy(objective, path, scalars=scalars)
    toy.learner.model.train()
    toy.objective.epoch_start(2)
    made = toy.objective.prepare(toy.batch, replace(toy.progress, variant=toy.objective.variants[0])).made
    return toy, [images - toy.batch.x for images in made.values() if images.shape == toy.batch.x.shape]


@pytest.mark.parametrize("objective", ONE_NORM, ids=str)
def test_objectives_stay_within_it(tmp_path: Path, objective: Any) -> None:
    found = {name: perturbations(objective, tmp_path / name, scale)[1][0] for name, scale in SCALES.items()}
    sizes = {name: float(delta.abs().max()) for name, delta in found.items()}
    assert torch.equal(found["none"], found["whole"])
    assert sizes["whole"] > 0.9 * EPS
    assert 0.2 * EPS < sizes["part"] <= 0.25 * EPS * (1 + 1e-9)
    assert sizes["nothing"] < 1e-5


@pytest.mark.parametrize("objective", SEVERAL_NORMS)
def test_objectives_of_several_norms_stay_within_it(tmp_path: Path, objective: str) -> None:
    for name, scale in SCALES.items():
        toy, found = perturbations(objective, tmp_path / name, scale)
        threats = [threat for threat, _ in toy.objective.norms]  # type: ignore[attr-defined]
        for delta in found:
            shares = torch.stack([threat.norm(delta) / threat.eps for threat in threats])
            share = 1.0 if scale is None else max(scale, 1e-6)
            assert float(shares.amin(0).max()) <= share * (1 + 1e-9), "each image lies in one of the balls"
            assert float(shares.max()) > 0.9 * share, "and some at its edge"


def sizes_of(trainer: Trainer) -> list[float]:
    """The largest change of a pixel in each iteration of a run."""
    found: list[float] = []
    objective = trainer.learners[0].objective
    prepare = objective.prepare

    def spied(batch: Batch, progress: Progress) -> Inputs:
        inputs = prepare(batch, progress)
        found.append(float((inputs.made["adversarial"] - batch.x).abs().max()))
        return inputs

    objective.prepare = spied  # type: ignore[method-assign]
    trainer.run()
    return found


def learner(scale: Any) -> dict[str, Any]:
    return {**ROBUST, "attack": {"steps": 3, "scale": scale}}


def test_it_follows_its_schedule(tmp_path: Path) -> None:
    sizes = sizes_of(make_trainer(tiny_recipe([learner(RISING)]), tmp_path))
    assert len(sizes) == 12
    for i, size in enumerate(sizes):
        assert size <= 0.1 * i / 12 + 1e-6 and size > 0.08 * i / 12


def test_a_scale_of_one_changes_no_bit(tmp_path: Path) -> None:
    plain = train(tiny_recipe([{**ROBUST, "attack": {"steps": 3}}]), tmp_path / "plain")
    scaled = train(tiny_recipe([learner(1)]), tmp_path / "scaled")
    assert torch.equal(plain.learners[0].flat.vector, scaled.learners[0].flat.vector)
    half = train(tiny_recipe([learner(0.5)]), tmp_path / "half")
    assert not torch.equal(plain.learners[0].flat.vector, half.learners[0].flat.vector)


def test_validation_has_the_whole_of_eps(tmp_path: Path) -> None:
    """The same weights are validated alike, whatever the scale of training's attack: lr is almost nothing."""
    still = {"optimizer": {"lr": 1e-12, "weight_decay": 0}}
    runs = [train(tiny_recipe([{**learner(s), **still}]), tmp_path / str(s)) for s in (1, 0.01)]
    accuracies = [[line["validation"]["accuracy"] for line in run.directory.read_metrics()] for run in runs]
    assert accuracies[0] == accuracies[1]


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    recipe = tiny_recipe([learner(RISING)])
    whole = train(recipe, tmp_path / "whole")
    resumed = stopped_and_resumed(recipe, tmp_path / "parts", epoch=2)
    assert torch.equal(whole.learners[0].flat.vector, resumed.learners[0].flat.vector)


@pytest.mark.parametrize("values", [[0, 1.5], [-0.1, 1]])
def test_other_factors_are_refused(values: list[float]) -> None:
    with pytest.raises(ValidationError, match="from 0 to 1"):
        AttackOptions.model_validate({"scale": {"fractions": [0, 1], "values": values}})


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_graph_equals_eager_in_float64(tmp_path: Path, compiled: str) -> None:
    scale = 'learners.linf.attack.scale={"fractions": [0, 1], "values": [0, 1]}'
    assert_engines_agree("baseline-digits-at", tmp_path, overrides=[scale, f"train.compile={compiled}"], learner=0)
