"""benchmarks/baselines.py: its queue, its table, and that it goes on after it was stopped and killed."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from generalist.core.errors import GeneralistError
from generalist.recipe import load_recipe, to_yaml
from generalist.shipped import shipped_names

PROGRAMS = Path(__file__).parents[1] / "benchmarks"
FIRST = ["at", "trades-6", "trades-1", "nt", "generalist-d", "generalist-d-linf-l2", "generalist-t"]
FIRST += ["at-max", "at-linf-l2", "msd", "e-at", "ramp"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module("baselines")


@pytest.fixture
def table(program: ModuleType) -> ModuleType:
    return importlib.import_module("baselines_table")


def options(program: ModuleType, *arguments: str) -> Any:
    return program.parse(["--out", "unused", *arguments])


# -- the queue --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["cifar10-resnet18", "digits"])
def test_every_recipe_of_the_family_is_queued_with_its_cost(
    program: ModuleType, table: ModuleType, dataset: str
) -> None:
    methods = program.choose_methods(options(program, "--dataset", dataset))
    baselines = [name for name in shipped_names() if name.startswith(f"baseline-{dataset}-")]
    plain = "-plain" if dataset == "cifar10-resnet18" else ""
    assert {m.recipe for m in methods} == {*baselines, *(f"{dataset}-{v}{plain}" for v in ("d", "d-linf-l2", "t"))}
    assert [m.name for m in methods][: len(FIRST)] == FIRST
    assert all(m.cost(30) is not None for m in methods)
    assert set(table.PASSES) == {m.name for m in methods}


def test_all_train_as_long_and_none_longer_than_its_recipe(program: ModuleType) -> None:
    methods = {m.name: m for m in program.choose_methods(options(program))}
    assert methods["fast-at"].epochs == [15] and methods["rmc"].epochs == [30, 30, 15]
    assert all(m.epochs == [30] for name, m in methods.items() if name not in {"fast-at", "rmc"})
    assert methods["at"].cost(30) == 1 and methods["fast-at"].cost(30) == pytest.approx(0.11)
    assert methods["e-at"].against(["linf:8/255", "l2:128/255"]) == "linf, l1:12"
    assert methods["generalist-t"].against(["linf:8/255", "l2:128/255"]) == "linf + natural + l2"


def test_learning_rates_grow_with_the_batches(program: ModuleType) -> None:
    """Those of stages, too; one that follows another learner's has no number to change."""
    found = {
        method.name: method.resolved
        for method in program.choose_methods(
            options(program, "--batch-size", "256", "--methods", "at,rmc,generalist-t")
        )
    }
    assert [recipe.train.batch_size for recipe in found.values()] == [256] * 3
    assert found["at"].learners[0].optimizer.lr == 0.02
    stages = found["rmc"].stages
    assert [stage.change["learners"][0]["optimizer"]["lr"] for stage in stages[:2]] == [0.02, 0.02]
    assert [learner.optimizer.lr for learner in found["generalist-t"].learners] == [0.02, "lead", "lead"]
    assert found["at"].mixing.decay == 0


@pytest.mark.parametrize(("words", "times"), [(["--epochs", "120"], 1), ([], 4), (["--batch-size", "256"], 8)])
def test_an_average_reaches_as_far_back_in_training(program: ModuleType, words: list[str], times: int) -> None:
    (method,) = program.choose_methods(options(program, "--methods", "generalist-t", *words))
    iterations = [
        recipe.train.epochs * 50_000 / recipe.train.batch_size
        for recipe in (load_recipe("cifar10-resnet18-t-plain"), method.resolved)
    ]
    assert iterations[0] / iterations[1] == times
    assert method.resolved.mixing.decay == pytest.approx(0.999**times, abs=1e-6)


def test_an_average_that_changes_reaches_as_far_back_at_all_times(table: ModuleType) -> None:
    decay = "mixing.decay={fractions: [0, 1], values: [0, 0.99]}"
    recipe = load_recipe("digits-t", overrides=[decay])
    shorter = load_recipe(recipe, overrides=table.rescaled(recipe, epochs=25))
    assert shorter.mixing.decay.values == [0, pytest.approx(0.99**2)]


def test_a_run_whose_weights_are_gone_is_not_repeated(program: ModuleType, table: ModuleType, tmp_path: Path) -> None:
    assert not table.trained(tmp_path)
    summary = tmp_path / "evaluation" / "one" / "summary.json"
    summary.parent.mkdir(parents=True)
    summary.write_text("{}")
    assert table.trained(tmp_path)


def test_changes_go_to_all_or_to_one(program: ModuleType) -> None:
    asked = ["--methods", "nt,at", "--set", "validation.every=15", "--set", "at:learners.linf.threat=linf:4/255"]
    at, nt = program.choose_methods(options(program, *asked))
    assert at.changes == ("train.epochs=30", "validation.every=15", "learners.linf.threat=linf:4/255")
    assert nt.changes == ("train.epochs=30", "validation.every=15") and nt.resolved.validation.every == 15


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--methods", "att"], "unknown method 'att'"),
        (["--set", "att:train.seed=1"], "unknown method 'att'"),
        (["--set", "learners.linf.threat=linf:4/255"], r"nt: .*METHOD:FIELD=VALUE"),
        (["--dataset", "cifar11"], "no recipe is called baseline-cifar11-METHOD"),
    ],
)
def test_mistakes_cost_a_line_before_anything_runs(program: ModuleType, arguments: list[str], says: str) -> None:
    with pytest.raises(GeneralistError, match=says):
        program.choose_methods(options(program, *arguments))


@pytest.mark.parametrize("minutes", ["-1", "nan"])
def test_times_that_never_come_are_refused(
    program: ModuleType, minutes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(program, "--minutes", "1", "--grace", minutes)
    with pytest.raises(SystemExit):
        options(program, "--minutes", minutes)
    assert capsys.readouterr().err.count("must be 0 or more") == 2


def test_threats_are_the_family_s(program: ModuleType) -> None:
    assert program.choose_evaluation(options(program)).threats == ("linf:8/255", "l2:128/255")
    assert program.choose_evaluation(options(program, "--dataset", "digits")).threats == ("linf:0.1", "l2:0.45")
    with pytest.raises(GeneralistError, match="give --threats"):
        program.choose_evaluation(options(program, "--dataset", "imagenet-resnet50"))


# -- the table --------------------------------------------------------------------------------------------------------


def figure(correct: int, total: int) -> dict[str, Any]:
    return {"value": correct / total, "correct": correct, "total": total, "interval": [0.0, 0.2]}


def test_rows_are_sorted_and_what_is_lacking_is_named(program: ModuleType, table: ModuleType, tmp_path: Path) -> None:
    asked = options(program, "--methods", "at,trades-6,nt,at-max,e-at", "--jobs", "2")
    wanted = program.choose_evaluation(asked)
    methods = {m.name: m for m in program.choose_methods(asked)}
    columns = ["natural", *wanted.columns("pgd-20")]
    plain = {name: figure(5, 10) for name in columns}
    strong = {name: figure(3, 10) for name in wanted.columns("aa")}

    def row(name: str, status: str, union: int | None, reason: str = "") -> Any:
        more = {} if union is None else {**strong, "union_worst_case": figure(union, 10)}
        known = plain | more if status != "failed" else {}
        images = {"pgd-20": 10} | ({"aa": 7} if union is not None else {}) if known else {}
        return table.Row(methods[name], status, reason, known, images=images, minutes={"training": 1.25})

    rows = [
        row("at", "done", 2),
        row("nt", "evaluated in part", None),
        row("at-max", "done", 3),
        row("trades-6", "failed", None, "train: no memory"),
        table.Row(methods["e-at"], "not started"),
    ]
    made = table.Table("cifar10-resnet18", 30, "python it", wanted, rows, {m: ["generalist x"] for m in methods}, 2)
    text = made.as_markdown()
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [line[0] for line in lines] == ["| method", "| ---", "| at-max", "| at", "| nt"]
    assert "**30.00**" in lines[2] and "20.00" in lines[3] and lines[4][7:11] == ["-", "-", "-", "-"]
    assert [line[3] for line in lines] == ["cost", "---:", "1.96", "1.00", "0.13"]
    assert text.startswith("# Baselines of cifar10-resnet18, 30 epochs\n\n```sh\npython it\n```\n")
    assert "ranks the methods only under this budget" in text
    assert "all 10 test images" in text and "7 of them, the same for all" in text and "10.0 points either way" in text
    assert "Up to 2 processes shared the device" in text
    left = text[text.index("Not done:") :].splitlines()[2:]
    assert left == ["- nt: evaluated in part", "- trades-6: failed (train: no memory)", "- e-at: not started"]
    made.write(tmp_path)
    assert [each["status"] for each in json.loads((tmp_path / "baselines.json").read_text())["rows"]] == [
        row.status for row in rows
    ]


def test_a_line_cut_short_loses_nothing_else(program: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"name": "at"}\n{"name": "a{"name": "b"}\n{"name": "nt"}\n{"nam')
    assert [step["name"] for step in program.read_steps(tmp_path / "steps.jsonl")] == ["at", "nt"]


def bench_of(program: ModuleType, out: Path, *arguments: str) -> Any:
    asked = program.parse(["--out", str(out), "--dataset", "digits", "--methods", "at,nt", *arguments])
    return program.Bench(asked, program.choose_methods(asked), program.choose_evaluation(asked))


def test_no_step_is_started_after_the_time(program: ModuleType, tmp_path: Path) -> None:
    bench = bench_of(program, tmp_path, "--minutes", "0")
    bench.work()
    bench.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["baselines.json", "baselines.md"]
    text = (tmp_path / "baselines.md").read_text()
    assert "No figure is there yet." in text and "- at, nt: not started\n" in text


def test_runs_of_other_settings_are_refused(program: ModuleType, tmp_path: Path) -> None:
    bench = bench_of(program, tmp_path, "--epochs", "2")
    run = bench.run_of(bench.methods[0])
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(to_yaml(bench.methods[0].resolved))
    bench.check()
    with pytest.raises(GeneralistError, match=r"runs/at was trained with other settings \(train\)"):
        bench_of(program, tmp_path, "--epochs", "3").check()


# -- the whole, on digits ---------------------------------------------------------------------------------------------


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    words = ["--dataset", "digits", "--device", "cpu", "--methods", "at,trades-6,nt", "--epochs", "2"]
    words += ["--attack", "apgd-ce", "--samples", "30", "--set", "at:train.epochs=30", "--set", "train.threads=1"]
    words += ["--set", "at:train.checkpoint_epochs=1", "--set", "trades-6:train.batch_size=100000", *more]
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / "baselines.py"), "--out", str(out), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < until, "it ended, or nothing came"
        time.sleep(0.02)


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=600)
    return said


@pytest.mark.slow
def test_it_goes_on_after_being_stopped_and_killed(tmp_path: Path) -> None:
    out = tmp_path / "bench"
    at, log = out / "runs" / "at", out / "logs" / "at.log"

    first = start(out)
    wait_for(lambda: any(at.glob("checkpoints/*.sha256")), first)
    first.send_signal(signal.SIGTERM)
    assert "train stopped, to be resumed" in finish(first) and first.returncode == 128 + signal.SIGTERM
    assert not (at / "last.safetensors").exists() and "- at: begun\n" in (out / "baselines.md").read_text()
    assert "- trades-6, nt: not started\n" in (out / "baselines.md").read_text()

    second = start(out)
    wait_for(lambda: any(at.glob("evaluation/*/records-*.jsonl")), second)
    second.kill()  # the step that runs goes on by itself
    finish(second)
    assert "resuming" in log.read_text() and not any((out / "runs" / "nt").glob("*"))

    third = start(out, "--jobs", "2")
    said = finish(third)
    assert third.returncode == 0 and "at: train" not in said, "the finished run is not repeated"
    assert log.read_text().count("$ generalist train") == 2
    check_against_the_runs(out)


def table_of(out: Path) -> list[str]:
    return [line for line in (out / "baselines.md").read_text().splitlines() if line.startswith("| ")]


def check_against_the_runs(out: Path) -> None:
    """Every cell and every figure is what the runs' own files say."""
    told = {row["method"]: row for row in json.loads((out / "baselines.json").read_text())["rows"]}
    assert {name: row["status"] for name, row in told.items()} == {"at": "done", "trades-6": "failed", "nt": "done"}
    assert "100000" in told["trades-6"]["reason"]
    assert f"- trades-6: failed ({told['trades-6']['reason']})" in (out / "baselines.md").read_text()
    cells = {words[0]: words for words in (re.sub(r"[|* ]+", " ", line).split() for line in table_of(out)[2:])}
    threats = ["linf:0.1", "l2:0.45"]
    for name in ("at", "nt"):
        summaries = [json.loads(path.read_text()) for path in out.glob(f"runs/{name}/evaluation/*/summary.json")]
        (plain,) = [summary for summary in summaries if summary["samples"] == 500]
        (strong,) = [summary for summary in summaries if summary["samples"] == 30]
        expected = [plain["accuracy"]["natural"], *(plain["accuracy"][f"pgd-20/{t}"] for t in threats)]
        expected += [strong["accuracy"][f"apgd-ce/{t}"] for t in threats]
        expected += [strong["union_worst_case"], strong["mean_over_threats"]]
        assert cells[name][4:11] == [f"{100 * cell['value']:.2f}" for cell in expected]
        assert sorted(told[name]["figures"].values(), key=str) == sorted(expected, key=str)
        assert (
            told[name]["environment"]["commit"]
            == json.loads((out / "runs" / name / "environment.json").read_text())["commit"]
        )
        epochs = [json.loads(line)["epoch"] for line in (out / "runs" / name / "metrics.jsonl").open()]
        assert epochs == list(range(1, told[name]["epochs"][0] + 1))
        assert len(told[name]["commands"]) == 3 and len(told[name]["evaluations"]) == 2


def test_the_page_says_what_the_json_says() -> None:
    results = PROGRAMS.parent / "docs" / "results"
    rows = {row["method"]: row for row in json.loads((results / "baselines.json").read_text())["rows"]}
    lines = [line.strip("| ").split(" | ") for line in (results / "baselines.md").read_text().splitlines()]
    heads, _, *told = [line for line in lines if len(line) > 5]
    threats = {"linf": "linf:8/255", "l2": "l2:128/255"}
    columns = {
        f"{short} {norm}": f"{attack}/{threat}"
        for short, attack in (("PGD-20", "pgd-20"), ("AA", "aa"))
        for norm, threat in threats.items()
    }
    columns |= {"natural": "natural", "union": "union_worst_case", "mean": "mean_over_threats"}
    assert sorted(line[0] for line in told) == sorted(rows)
    for line in told:
        cells, row = dict(zip(heads, line, strict=True)), rows[line[0]]
        for head, name in columns.items():
            assert float(cells[head].strip("*")) == pytest.approx(100 * row["figures"][name]["value"], abs=0.0051), line
        assert float(cells["cost"]) == row["cost_relative_to_at"] and cells["trains against"] == row["against"]
