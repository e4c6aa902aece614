"""benchmarks/experiments.py: its file, its commands, and that it goes on after a step has failed."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from generalist import evaluate
from generalist.core.errors import GeneralistError
from generalist.core.run import RunDirectory
from generalist.data.corruptions import COMMON, SEVERITIES
from generalist.recipe import load_recipe

PROGRAMS = Path(__file__).parents[1] / "benchmarks"

TINY = {
    "set": {"train.epochs": 2, "model.width": 4, "validation.steps": 2, "train.threads": 1},
    "evaluate": ["--attacks natural,pgd-2 --samples 30 --model best,global@2", "--attacks natural"],
    "experiments": {
        "001-d": {"recipe": "digits-d", "about": "the first"},
        "002-branch": {
            "recipe": "digits-d",
            "from": "001-d@2#global",
            "set": {"train.epochs": 4, "train.start_epoch": 2, "mixing.gamma": {"epochs": [2, 4], "values": [1, 0.5]}},
            "evaluate": ["--attacks natural --samples 40"],
        },
    },
}


D = {"recipe": "digits-d"}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module("experiments")


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


@pytest.mark.parametrize("file", ["cifar10.yaml", "headline.yaml", "mnist.yaml"])
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


def test_one_that_is_like_another_has_what_it_does_not_say(program: ModuleType, tmp_path: Path) -> None:
    first = {"recipe": "digits-d", "set": {"train.epochs": 2, "train.seed": 1}, "evaluate": ["--attacks natural"]}
    content = {"experiments": {"a": first, "b": {"like": "a", "set": {"train.seed": 2}, "about": "b"}}}
    second = program.read_plan(written(tmp_path, content)).experiments["b"]
    assert (second.recipe, second.evaluate, second.about) == ("digits-d", ["--attacks natural"], "b")
    assert second.set == {"train.epochs": 2, "train.seed": 2}


def test_one_with_seeds_is_run_with_each(program: ModuleType, tmp_path: Path) -> None:
    first = {"recipe": "digits-d", "seeds": [3, 5], "set": {"train.epochs": 2}}
    content = {"experiments": {"a": first, "b": {"like": "a"}, "c": {"like": "a", "seeds": []}}}
    plan = program.read_plan(written(tmp_path, content))
    assert {name: (one.set, one._group) for name, one in plan.experiments.items()} == {
        "a-3": ({"train.epochs": 2, "train.seed": 3}, "a"),
        "a-5": ({"train.epochs": 2, "train.seed": 5}, "a"),
        "b-3": ({"train.epochs": 2, "train.seed": 3}, "b"),
        "b-5": ({"train.epochs": 2, "train.seed": 5}, "b"),
        "c": ({"train.epochs": 2}, None),
    }


@pytest.mark.parametrize(("branch", "source"), [("t-1", "d-1"), ("d-linf-l2-1", "at-1")])
def test_a_branch_of_the_headline_is_its_recipe_in_one_run(program: ModuleType, branch: str, source: str) -> None:
    """Up to the epoch of the branch its source does what its own recipe does (docs/method.md, section 1)."""
    plan = program.read_plan(PROGRAMS / "headline.yaml")
    long, short = (
        load_recipe(plan.experiments[name].recipe, overrides=plan.changes_of(name)) for name in (branch, source)
    )
    before, epochs = long.train.start_epoch, long.train.epochs
    assert plan.experiments[branch].source == f"{source}@{before}#global" and short.keeps_snapshot(before)
    assert long.redistribution().first_epoch(epochs) == before, "there all learners restart"
    assert [short.redistribution().due(epoch, epochs) for epoch in range(1, before)] == [False] * (before - 1)
    assert [recipe.gammas_at(epoch)[0] for recipe in (long, short) for epoch in (0, 60, before)] == [1] * 6
    names = [learner.name for learner in short.learners]
    assert [learner for learner in long.learners if learner.name in names] == short.learners
    assert (long.mixing.decay, long.mixing.warmup) == (short.mixing.decay, short.mixing.warmup)
    assert (long.data, long.model, long.validation.images) == (short.data, short.model, short.validation.images)
    same = {"start_epoch": before, "snapshots": long.train.snapshots}
    assert short.train.model_copy(update=same) == long.train


def test_a_branch_with_seeds_starts_from_its_own(program: ModuleType, tmp_path: Path) -> None:
    source, branch = {**D, "seeds": [3, 5]}, {**D, "from": "a@2#global", "seeds": [3, 5]}
    plan = program.read_plan(written(tmp_path, {"experiments": {"a": source, "b": branch}}))
    assert [plan.experiments[f"b-{seed}"].source for seed in (3, 5)] == ["a-3@2#global", "a-5@2#global"]
    options = program.parse([str(tmp_path), "--out", str(tmp_path / "out")])
    experiments = program.Experiments(plan, options)
    assert experiments.waits_for("b-5") == "a-5"
    words = experiments.steps_of("b-5")[0].words
    assert words[words.index("--from") + 1] == f"{tmp_path / 'out' / 'runs' / 'a-5'}@2#global"


def test_the_commands(program: ModuleType, tmp_path: Path) -> None:
    path = written(tmp_path, TINY)
    options = program.parse([str(path), "--out", "out", "--only", "002-branch", "--device", "cpu"])
    experiments = program.Experiments(program.read_plan(path), options)
    train, evaluate = experiments.steps_of("002-branch")
    assert train.command == (
        "generalist train digits-d --set model.width=4 --set validation.steps=2 --set train.threads=1 "
        "--set train.epochs=4 --set train.start_epoch=2 "
        """--set 'mixing.gamma={"epochs": [2, 4], "values": [1, 0.5]}' """
        "--from 'out/runs/001-d@2#global' --device cpu --out out/runs/002-branch"
    )
    assert evaluate.command == "generalist evaluate out/runs/002-branch --attacks natural --samples 40 --device cpu"


def test_a_field_that_is_set_whole_leaves_nothing_of_what_was_set_within_it(
    program: ModuleType, tmp_path: Path
) -> None:
    fields = {"learners.linf.attack": {"steps": 2}, "learners.linf.attack.step": "1/255", "train.epochs": 3}
    again = {"like": "a", "set": {"learners.linf.attack": {"steps": 4}, "train": {"epochs": 5}}}
    plan = program.read_plan(written(tmp_path, {"experiments": {"a": {**D, "set": fields}, "b": again}}))
    assert plan.changes_of("a")[:2] == ['learners.linf.attack={"steps": 2}', "learners.linf.attack.step=1/255"]
    assert plan.changes_of("b") == ['learners.linf.attack={"steps": 4}', 'train={"epochs": 5}']


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "valid dictionary"),
        ({"experiments": {"a": {}}}, "a: it has no recipe"),
        ({"experiments": {"a": {**D, "x": 1}}}, "experiments.a.x"),
        ({"experiments": {"a": {**D, "group": "b"}}}, "experiments.a.group"),
        ({"experiments": {"../a": D}}, "a name is made of letters"),
        ({"experiments": {"a": {"recipe": "digits-e"}}}, "a: "),
        ({"experiments": {"a": {**D, "set": {"train.epoch": 3}}}}, "unknown field"),
        ({"experiments": {"a": {"like": "b"}, "b": D}}, "no experiment before it is called so"),
        ({"experiments": {"a": {**D, "seeds": [0, 1]}, "a-1": D}}, "two experiments are called 'a-1'"),
        ({"experiments": {"a": {**D, "seeds": [0, 0]}}}, "two experiments are called 'a-0'"),
        ({"experiments": {"a": {**D, "seeds": [0, 1]}, "b": {**D, "from": "a"}}}, "name one of them"),
        ({"experiments": {"a": {**D, "seeds": [0, 1]}, "b": {**D, "from": "a#global"}}}, "name one of them"),
        ({"experiments": {"a": {**D, "seeds": [0]}, "b": {**D, "from": "a@1", "seeds": [1]}}}, "a has no seed 1"),
        ({"evaluate": ["--attacks 'natural"], "experiments": {"a": D}}, "No closing quotation"),
        ({"evaluate": ["--atacks natural"], "experiments": {"a": D}}, "--atacks"),
        ({"evaluate": ["--attacks nope"], "experiments": {"a": D}}, "unknown attack 'nope'"),
        ({"evaluate": ["--threats linf:8"], "experiments": {"a": D}}, "write 8/255"),
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
        {"name": "a-1", "group": "a", "evaluations": [other, {**other, "right": {"natural": [186, 200]}}]},
        {"name": "b", "group": None, "evaluations": [last]},
    ]
    assert program.table(records) == [
        "| experiment | network | natural | aa/linf:0.1 |",
        "| --- | --- | ---: | ---: |",
        "| a-0 | best | 90.00 | 40.00 |",
        "| a-1 | best | 93.00 | - |",
        "| b | last | 25.00 | - |",
        "| a, 2 seeds | best | 91.50 ± 2.12 | 40.00 (1) |",
    ]


def test_a_branch_begins_as_soon_as_its_snapshot_is_there(program: ModuleType, tmp_path: Path) -> None:
    path, out = written(tmp_path, TINY), tmp_path / "out"
    experiments = program.Experiments(program.read_plan(path), program.parse([str(path), "--out", str(out)]))
    snapshot = out / "runs" / "001-d" / "snapshots" / "2" / "global.safetensors"
    snapshot.parent.mkdir(parents=True)
    (out / "logs").mkdir()
    assert experiments.waits_for("002-branch") == "001-d"
    snapshot.touch()
    assert experiments.waits_for("002-branch") == "001-d", "left by who knows what"
    (out / "logs" / "001-d.log").write_text(f"$ {experiments.steps_of('001-d')[0].command}\n")
    assert experiments.waits_for("002-branch") is None and experiments.waits_for("001-d") is None


def test_figures_on_other_images_are_another_network_s(program: ModuleType) -> None:
    on = {"subject": "best", "split": "digits-test", "right": {"natural": [90, 100]}}
    more = {**on, "right": {"natural": [850, 1000]}}
    elsewhere = {**on, "split": "mnist-test", "right": {"natural": [100, 2000]}}
    assert program.figures([on, more, elsewhere]) == {
        "best": {"natural": 85.0},
        "best on mnist-test": {"natural": 5.0},
    }
    old = {"subject": "best", "right": {"natural": [90, 100]}}
    assert program.figures([old]) == {"best": {"natural": 90.0}}, "records of before splits were kept"


def test_what_others_wait_for_comes_before_what_is_measured(program: ModuleType, tmp_path: Path) -> None:
    """A branch that can begin does not wait for the evaluations of what it starts from."""
    path, out = written(tmp_path, TINY), tmp_path / "out"
    experiments = program.Experiments(program.read_plan(path), program.parse([str(path), "--out", str(out)]))
    waiting = ["001-d", "002-branch"]
    assert experiments._ready(waiting) == "001-d", "the branch has nothing to start from"
    train = experiments.steps_of("001-d")[0]
    run = RunDirectory(train.run)
    run.path.mkdir(parents=True)
    run.last.touch()
    line = {
        "name": "001-d",
        "step": "train",
        "command": train.command,
        "exit": 0,
        "seconds": 1.0,
        "commit": "",
        "jobs": 1,
    }
    (out / "steps.jsonl").write_text(json.dumps(line) + "\n")
    assert experiments.next_step("001-d").kind != "train"
    assert experiments._ready(waiting) == "002-branch"
    assert experiments._ready(["001-d"]) == "001-d"


def test_the_means_over_corruptions_are_figures(program: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "aa"
    folder.mkdir()
    identity = {"seed": 0, "precision": "default"}
    accuracy = {"natural": {"correct": 9, "total": 10}}
    summary = {
        "samples": 10,
        "images": 10,
        "identity": identity,
        "accuracy": accuracy,
        "subject": "best",
        "split": "digits-test",
        "seconds": {},
        "after_each_part": {},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    assert not {"shifted", "left_after"} & program.told(folder).keys()
    severities = {str(severity): {"correct": 10 - severity, "total": 10} for severity in SEVERITIES}
    corruptions = {name: {"mean": 0.7, "severities": severities} for name in COMMON}
    shift = {"corruptions": {"source": "", "generated": True, "corruptions": corruptions, "mean": 0.7}}
    (folder / "corruptions.json").write_text(json.dumps(shift))
    told = program.told(folder)
    assert told["shifted"] == {
        "generated corruptions/level 5": [pytest.approx(0.5), 10],
        "generated corruptions/levels 1-5": [pytest.approx(0.7), 10],
    }
    assert program.figures([told])["best"] == pytest.approx(
        {"natural": 90, "generated corruptions/level 5": 50, "generated corruptions/levels 1-5": 70}
    )


def test_a_training_that_was_lost_leaves_what_it_has_come_to(program: ModuleType, tmp_path: Path) -> None:
    path, out = written(tmp_path, TINY), tmp_path / "out"
    experiments = program.Experiments(program.read_plan(path), program.parse([str(path), "--out", str(out)]))
    run, train = RunDirectory(out / "runs" / "001-d"), experiments.steps_of("001-d")[0]
    run.path.mkdir(parents=True)
    run.environment.write_text(json.dumps({"seed": 0}))
    accuracy = {"accuracy": {"global": {"natural": 0.9}}}
    line = {"epoch": 1, "gamma": {}, "lr": {}, "train": {}}
    run.metrics.write_text(
        "".join(json.dumps(one) + "\n" for one in ({**line, "validation": accuracy}, line | {"epoch": 2}))
    )
    assert experiments.record("001-d") is None, "left by who knows what"
    (out / "logs").mkdir()
    (out / "logs" / "001-d.log").write_text(f"$ {train.command}\n")
    record = experiments.record("001-d")
    assert record["unfinished"] == {"command": train.command, "epochs": 2}
    assert (record["steps"], record["evaluations"]) == ([], [])
    assert [validation["accuracy"] for validation in record["validations"]] == [accuracy["accuracy"]]


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
    alone = run(broken, "--only", "002-branch")
    assert (
        alone.returncode == 1 and "002-branch: not started, as it needs 001-d, which has not finished" in alone.stdout
    )
    first = run(broken, "--commit", "abc", "--jobs", "2")
    assert first.returncode == 1 and "has no snapshot of epoch 9" in first.stdout
    assert first.stderr.endswith("failed: 002-branch\n")
    second = run(TINY)
    assert second.returncode == 0 and "001-d: " not in second.stdout and "002-branch: train" in second.stdout
    check_record(out)
    more = json.loads(json.dumps(TINY))
    more["evaluate"][0] += ",linf@2"  # two of the three are measured already
    assert run(more, "--only", "001-d").returncode == 0
    assert json.loads((out / "002-branch.json").read_text())["validations"][-1]["gamma"]["linf"] < 1

    shutil.rmtree(out / "runs" / "001-d")  # trained anew, all of it is measured anew
    changed = json.loads(json.dumps(TINY))
    changed["set"]["train.seed"] = 1
    third = run(changed, "--only", "001-d")
    assert third.returncode == 0 and third.stdout.count("001-d: evaluate-") == 2
    table = (out / "experiments.md").read_text()
    assert "| 001-d | global@2 |" in table and "| 002-branch | best |" in table


def check_record(out: Path) -> None:
    """Every figure is what the run's own files say."""
    record = json.loads((out / "001-d.json").read_text())
    assert record["about"] == "the first" and record["environment"]["seed"] == 0
    assert [step["command"].split()[1] for step in record["steps"]] == ["train", "evaluate", "evaluate"]
    assert {(step["commit"], step["jobs"]) for step in record["steps"]} == {("abc", 2)}, "a later call changes nothing"
    assert sorted((e["subject"], e["images"]) for e in record["evaluations"]) == [
        ("best", "30 of 500, drawn by a seed"),
        ("best", "all 500"),
        ("global@2", "30 of 500, drawn by a seed"),
    ]
    paths = (out / "runs" / "001-d" / "evaluation").glob("*/summary.json")
    in_order = sorted(paths, key=lambda path: path.stat().st_mtime)
    summaries = {(s["subject"], s["samples"]): s for s in (json.loads(path.read_text()) for path in in_order)}
    made = [(found["subject"], found["right"]["natural"][1]) for found in record["evaluations"]]
    assert made == list(summaries), "as they were made"
    for found in record["evaluations"]:
        summary = summaries[found["subject"], found["right"]["natural"][1]]
        assert found["right"]["natural"][0] == summary["accuracy"]["natural"]["correct"]
    assert [line["epoch"] for line in record["validations"]] == [2]


def test_the_curves_of_the_results_page_are_those_of_its_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    curves = importlib.import_module("curves")
    right = {"natural": [9, 10], "pgd-20/linf:8/255": [4, 10]}
    records = [
        {"subject": "global@10", "images": "all 10", "right": right},
        {"subject": "global@5", "images": "all 10", "right": {**right, "natural": [8, 10]}},
        {"subject": "global@15", "images": "5 of 10, drawn by a seed", "right": right},
        {"subject": "natural@10", "images": "all 10", "right": right},
        {"subject": "global@10", "images": "all 10", "right": {"natural": [9, 10]}},
    ]
    assert curves.curve({"evaluations": records}) == [(5, 80, 40), (10, 90, 40)]
    assert curves.published() == pytest.approx((89.09, 50.01))
    results = PROGRAMS.parent / "docs" / "results"
    curves.main([str(results / "runs"), "--out", str(tmp_path / "curves.svg")])
    drawn = (tmp_path / "curves.svg").read_text()
    log, kept = (results / "log.md").read_text(), (results.parent / "images" / "cifar10-curves.svg").read_text()
    for name, label in (*curves.TWO.items(), *curves.ONE.items()):
        assert label in drawn and label in kept
        for epoch, natural, robust in curves.curve(json.loads((results / "runs" / f"{name}.json").read_text())):
            assert re.search(rf"\b{epoch}: \**{natural:.2f} / \**{robust:.2f}", log), (name, epoch)


def test_who_reads_the_commands_may_leave(tmp_path: Path) -> None:
    """As `head` does after its lines: no complaint of a broken pipe."""
    more = {"set": {"source": "more than a pipe holds " * 60}}
    plan = written(tmp_path, {**more, "experiments": {f"a{i}": {**D} for i in range(100)}})
    command = [sys.executable, str(PROGRAMS / "experiments.py"), str(plan), "--out", str(tmp_path / "out"), "--dry-run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "a0\n"
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", -signal.SIGPIPE)


def test_what_each_part_of_autoattack_has_left_is_kept(program: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    evaluate(model, "digits", attacks=["natural", "aa"], threats="linf:0.1", samples=20, out=tmp_path / "evaluation")
    (folder,) = (path.parent for path in tmp_path.glob("evaluation/**/summary.json"))
    kept = program.told(folder)
    left = kept["left_after"]["aa/linf:0.1"]
    assert list(left) == [f"linf:0.1 {part}" for part in ("apgd-ce", "apgd-t", "fab-t", "square")]
    counts = list(left.values())
    assert counts == sorted(counts, reverse=True) and [counts[-1], 20] == kept["right"]["aa/linf:0.1"]
