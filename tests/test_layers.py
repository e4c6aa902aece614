"""benchmarks/layers.py: the dial turned in a part of the network."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from generalist import api, dial
from generalist.core.run import RunDirectory

PROGRAMS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module("layers")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    changes = ["train.epochs=4", "model.width=4", "validation.steps=2", "validation.every=4", "mixing.parts=true"]
    return api.train("digits-d", overrides=changes, out=tmp_path_factory.mktemp("layers") / "run", device="cpu")


def test_a_part_is_turned_and_nothing_else(program: ModuleType, run: RunDirectory) -> None:
    learners = dial.learners_of(run)
    own, whole = program.mixed(learners, None, 1.0), program.mixed(learners, None, 0.0)
    part = program.mixed(learners, "classifier", 0.0)
    assert own.keys() == whole.keys() == part.keys()
    for name, tensor in part.items():
        assert torch.equal(tensor, (whole if name.startswith("classifier.") else own)[name])
    lead = learners.states[learners.lead]
    assert all(torch.equal(tensor, lead[name]) for name, tensor in whole.items()), "the lead learner alone"
    shares = [learners.own_gamma[name] for name in learners.names]
    assert program.shares(learners, 1.0) == pytest.approx(shares) and 0.5 < shares[learners.lead] < 1
    first, second = learners.states
    name = "classifier.weight"
    twice = program.mixed(learners, "classifier", 2.0)[name].double()
    share = 1 - 2 * (1 - shares[0])
    torch.testing.assert_close(twice, share * first[name].double() + (1 - share) * second[name].double())


def test_the_parts_of_networks(program: ModuleType) -> None:
    names = ["stem.0.weight", "stem.1.bias", "stages.0.0.a.weight", "stages.0.1.a.weight", "stages.1.0.b", "fc.weight"]
    assert program.parts_of(names, 1) == ["stem", "stages.0", "stages.1", "fc"]
    assert program.parts_of(names, 3) == ["stem.0", "stem.1", "stages.0.0", "stages.0.1", "stages.1.0", "fc"]


def test_the_parts_of_networks_with_tensors_beside_their_modules(program: ModuleType) -> None:
    """As transformers have them; and a normalization is around all the rest."""
    names = ["token", "embed.weight", "blocks.0.norm.weight", "blocks.1.norm.weight"]
    assert program.parts_of(names, 1) == ["token", "embed", "blocks.0", "blocks.1"]
    inside = [f"model.{name}" for name in names]
    expected = ["mean", "model.token", "model.embed", "model.blocks.0", "model.blocks.1"]
    assert program.parts_of(["mean", *inside], 1) == expected
    assert program.parts_of(["net.weight", "net.bias"], 1) == ["net"]


def test_a_normalized_network_is_turned_in_its_parts(program: ModuleType, tmp_path: Path) -> None:
    changes = [
        *("train.epochs=2", "train.iterations=2", "model.width=4", "model.normalize={mean: [0.3], std: [0.4]}"),
        *("validation.images=20", "validation.steps=1", "mixing.gamma=0.5", "mixing.redistribution.every=0"),
    ]
    run = api.train("digits-d", overrides=changes, out=tmp_path / "run", device="cpu")
    learners = dial.learners_of(run)
    found = program.explore(dial.Dial(learners, device="cpu", samples=20, steps=1), [0.0])
    assert {row["part"] for row in found["turned"]} == {"the whole network", "model.features", "model.classifier"}
    assert len(found["turned"]) == 3


def test_the_command(program: ModuleType, run: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    words = [str(run.path), "--device", "cpu", "--samples", "100", "--factors", "0", "1", "--steps", "2"]
    program.main([*words, "--json", str(tmp_path / "layers.json")])
    found = json.loads((tmp_path / "layers.json").read_text())
    rows = {(row["part"], row["factor"]): row["right"] for row in found["turned"]}
    parts = {part for part, _ in rows}
    assert {"the whole network", "classifier", "features"} <= parts and len(rows) == 2 * len(parts)
    assert all(right == found["own"] for (_, factor), right in rows.items() if factor == 1)
    mixture = dial.mix(run, 1.0, statistics="mixed", device="cpu")
    machine = dial.Dial(dial.learners_of(run), device="cpu", samples=100, steps=2)
    alone = {name: [each.correct, each.total] for name, each in machine.validate(mixture.model).items()}
    assert rows["the whole network", 0.0] == alone
    assert "Change of accuracy" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        program.main([*words[:-2], "--factors", "50"])
    assert ended.value.code == 2
    assert "50 leaves less than nothing to linf" in capsys.readouterr().err
