"""benchmarks/experiments.py: its file, its commands, and that it goes on after a step has failed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from generalist.core.errors import GeneralistError

PROGRAMS = Path(__file__).parents[1] / "benchmarks"

TINY = {
    "set": {"train.epochs": 2, "model.width": 4, "validation.steps": 2, "train.threads": 1},
    "evaluate": ["--attacks natural,pgd-2 --samples 30 --model best,global@2", "--attacks natural"],
    "experiments": {
        "001-d": {"recipe": "digits-d", "about": "the first"},
        "002-branch": {
            "recipe": "digits-d",
            "from": "001-d@2",
            "set": {"train.epochs": 4, "train.start_epoch": 2, "mixing.gamma": {"epochs": [2, 4], "values": [1, 0.5]}},
            "evaluate": ["--attacks natural --samples 40"],
        },
    },
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module("experiments")


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.parametrize("file", ["cifar10.yaml", "mnist.yaml"])
def test_every_shipped_experiment_is_a_training_that_can_be_asked_for(
    program: ModuleType, tmp_path: Path, file: str
) -> None:
    plan = program.read_plan(PROGRAMS / file)
    experiments = program.Experiments(plan, program.parse([str(PROGRAMS / file), "--out", str(tmp_path)]))
    assert len(experiments.names) == len(plan.experiments) > 5
    for name in experiments.names:
        train, *evaluations = experiments.steps_of(name)
        assert train.kind == "train" and evaluations and plan.experiments[name].about
        assert experiments.next_step(name) == train
    assert not list(tmp_path.iterdir())


def test_one_with_seeds_is_run_with_each(program: ModuleType, tmp_path: Path) -> None:
    content = {"experiments": {"a": {"recipe": "digits-d", "seeds": [3, 5], "set": {"train.epochs": 2}}}}
    plan = program.read_plan(written(tmp_path, content))
    assert {name: (one.set, one.group) for name, one in plan.experiments.items()} == {
        "a-3": ({"train.epochs": 2, "train.seed": 3}, "a"),
        "a-5": ({"train.epochs": 2, "train.seed": 5}, "a"),
    }


def test_the_commands(program: ModuleType, tmp_path: Path) -> None:
    path = written(tmp_path, TINY)
    options = program.parse([str(path), "--out", "out", "--only", "002-branch", "--device", "cpu"])
    experiments = program.Experiments(program.read_plan(path), options)
    train, evaluate = experiments.steps_of("002-branch")
    assert train.command == (
        "generalist train digits-d --set train.epochs=4 --set model.width=4 --set validation.steps=2 "
        "--set train.threads=1 --set train.start_epoch=2 "
        """--set 'mixing.gamma={"epochs": [2, 4], "values": [1, 0.5]}' """
        "--from out/runs/001-d@2 --device cpu --out out/runs/002-branch"
    )
    assert evaluate.command == "generalist evaluate out/runs/002-branch --attacks natural --samples 40 --device cpu"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "valid dictionary"),
        ({"experiments": {"a": {}}}, "recipe"),
        ({"experiments": {"a": {"recipe": "digits-d", "x": 1}}}, "x"),
        ({"experiments": {"../a": {"recipe": "digits-d"}}}, "must be made of letters"),
        ({"experiments": {"a": {"recipe": "digits-e"}}}, "a: "),
        ({"experiments": {"a": {"recipe": "digits-d", "set": {"train.epoch": 3}}}}, "unknown field"),
    ],
)
def test_refusals(program: ModuleType, tmp_path: Path, content: object, says: str) -> None:
    with pytest.raises(GeneralistError, match=says):
        program.read_plan(written(tmp_path, content))


def test_the_table_tells_the_figure_of_the_most_images_and_the_mean_over_seeds(program: ModuleType) -> None:
    few = {"subject": "best", "right": {"natural": [10, 10], "aa/linf:0.1": [4, 10]}}
    many = {"subject": "best", "right": {"natural": [180, 200]}}
    other = {"subject": "best", "right": {"natural": [190, 200]}}
    last = {"subject": "last", "right": {"natural": [50, 200]}}
    records = [
        {"name": "a-0", "group": "a", "evaluations": [few, many]},
        {"name": "a-1", "group": "a", "evaluations": [other]},
        {"name": "b", "group": None, "evaluations": [last]},
    ]
    assert program.table(records) == [
        "| experiment | network | natural | aa/linf:0.1 |",
        "| --- | --- | ---: | ---: |",
        "| a-0 | best | 90.00 | 40.00 |",
        "| a-1 | best | 95.00 | - |",
        "| b | last | 25.00 | - |",
        "| a, 2 seeds | best | 92.50 ± 3.54 | 40.00 |",
    ]


@pytest.mark.slow
def test_what_is_done_is_not_repeated_and_what_failed_is(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def run(content: object, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PROGRAMS / "experiments.py"), str(written(tmp_path, content))]
        return subprocess.run(
            [*command, "--out", str(out), "--device", "cpu", *words],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )

    broken = json.loads(json.dumps(TINY))
    broken["experiments"]["002-branch"]["from"] = "001-d@9"
    first = run(broken, "--commit", "abc")
    assert first.returncode == 0 and "002-branch: " in first.stdout and "has no snapshot of epoch 9" in first.stdout
    second = run(TINY, "--jobs", "2")
    assert second.returncode == 0 and "001-d: train" not in second.stdout and "002-branch: train" in second.stdout
    record = json.loads((out / "001-d.json").read_text())
    assert [step["exit"] for step in record["steps"]] == [0, 0, 0] and record["about"] == "the first"
    assert sorted((e["subject"], e["images"]) for e in record["evaluations"]) == [
        ("best", "30 of 500, drawn by a seed"),
        ("best", "all 500"),
        ("global@2", "30 of 500, drawn by a seed"),
    ]
    for found in record["evaluations"]:
        folder = out / "runs" / "001-d" / "evaluation"
        summaries = [json.loads(path.read_text()) for path in folder.glob("*/summary.json")]
        (summary,) = [
            s for s in summaries if s["subject"] == found["subject"] and s["samples"] == found["right"]["natural"][1]
        ]
        assert found["right"]["natural"][0] == summary["accuracy"]["natural"]["correct"]
    assert [line["epoch"] for line in record["validations"]] == [2]
    assert json.loads((out / "002-branch.json").read_text())["validations"][-1]["gamma"]["linf"] < 1
    assert "| 002-branch | best |" in (out / "experiments.md").read_text()
