"""Sweeps: what they are made of, what is refused, and small ones from end to end."""

from __future__ import annotations

import csv
import json
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import run_main
from sweep_helpers import TINY, read_rows, work, write_sweep

from generalist.core.errors import DivergedError, GeneralistError, InterruptedRunError, SweepError
from generalist.core.plain_yaml import load_yaml
from generalist.core.run import RunDirectory
from generalist.recipe import load_recipe
from generalist.sweep import storage, trials, worker
from generalist.sweep.definition import checked_choices, load_sweep, shipped_sweeps
from generalist.sweep.measurements import example_record, final_measurements, train_seconds
from generalist.sweep.options import SearchOptions, as_text
from generalist.sweep.results import front, to_csv
from generalist.sweep.trials import Row
from generalist.training.loop import Listener

LR = "learners.linf.optimizer.lr"
EVERY = "mixing.redistribution.every"
FOLDER = Path(__file__).parents[1] / "benchmarks" / "ablations"
ABLATIONS = [str(path) for path in sorted(FOLDER.glob("*.yaml")) if path.stem not in {"d", "t"}]
"""But for the two recipes that they branch with."""

# -- definitions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_sweeps())
def test_shipped_sweeps_are_sound_in_every_combination(name: str) -> None:
    sweep = load_sweep(name)
    grid = sweep.options.method == "grid"
    choices = [sweep.choice(number) for number in range(sweep.options.total)] if grid else []
    choices = choices or list(checked_choices(sweep.options))
    recipes = [json.dumps(sweep.recipe(choice).model_dump(mode="json"), sort_keys=True) for choice in choices]
    assert len(recipes) >= 5
    if grid:
        assert len(set(recipes)) == len(recipes), "two combinations are the same run"
    assert sweep.options.source


@pytest.mark.parametrize(
    "name", [name for name in [*shipped_sweeps(), *ABLATIONS] if load_sweep(name).options.method == "grid"]
)
def test_no_two_trials_of_a_grid_are_the_same_experiment(name: str) -> None:
    """A schedule that is cut short may leave an interval of redistribution without its epoch."""
    sweep, seen = load_sweep(name), []
    for number in range(sweep.options.total):
        recipe = sweep.recipe(sweep.choice(number))
        when, epochs = recipe.mixing.redistribution, recipe.train.epochs
        due = [epoch for epoch in range(recipe.train.start_epoch + 1, epochs) if when.due(epoch, epochs)]
        assert due or when.every == 0
        plain = recipe.model_dump(mode="json")
        how = (when.when, when.reset, when.batchnorm) if due else ()
        plain["mixing"]["redistribution"] = [due, how]
        assert plain not in seen, sweep.choice(number)
        seen.append(plain)


def test_the_papers_ablations_are_shipped_for_digits_and_cifar() -> None:
    kinds = {"gamma-end", "gamma-stage", "b", "c", "t-prime", "averaging", "optimizer", "lr-pairs", "learners"}
    assert {f"{data}-{kind}" for data in ("digits", "cifar10") for kind in kinds} <= set(shipped_sweeps())
    sweep = load_sweep("digits-learners")
    counts = [len(sweep.recipe(sweep.choice(number)).learners) for number in range(sweep.options.total)]
    assert Counter(counts) == dict.fromkeys(range(1, 8), 3)
    assert load_sweep("cifar10-gamma-end").recipe(load_sweep("cifar10-gamma-end").choice(0)).train.epochs == 30


def test_the_ablations_of_the_results_pages_branch_off_one_run() -> None:
    assert len(ABLATIONS) == 7
    for sweep in map(load_sweep, ABLATIONS):
        recipes = [sweep.recipe(sweep.choice(number)) for number in range(sweep.options.total)]
        assert {recipe.stages[0].start for recipe in recipes} == {"runs/headline/runs/at-0@120#global"}
        assert {(recipe.train.start_epoch, recipe.train.epochs) for recipe in recipes} == {(120, 130)}


def test_a_grid_is_the_product_and_its_last_field_changes_fastest(tmp_path: Path) -> None:
    sweep = load_sweep(write_sweep(tmp_path))
    assert [sweep.choice(number) for number in range(sweep.options.total)] == [
        {LR: "0.1", EVERY: "1"},
        {LR: "0.1", EVERY: "2"},
        {LR: "0.05", EVERY: "1"},
        {LR: "0.05", EVERY: "2"},
    ]
    recipe = sweep.recipe(sweep.choice(2))
    assert (recipe.learners[0].optimizer.lr, recipe.mixing.redistribution.every) == (0.05, 1)
    assert (recipe.train.epochs, recipe.model.model_dump()["width"]) == (2, 4)


def test_random_choices_are_a_function_of_seed_and_number(tmp_path: Path) -> None:
    search = {
        LR: {"low": 1e-3, "high": 0.1, "log": True},
        EVERY: {"low": 1, "high": 6, "integer": True},
        "train.batch_size": {"low": 16, "high": 64, "step": 16, "integer": True},
        "mixing.decay": {"low": 0.9, "high": 0.99},
    }
    path = write_sweep(tmp_path, search=search, method="random", trials=300)
    sweep, again = load_sweep(path), load_sweep(path)
    choices = [sweep.choice(number) for number in range(300)]
    assert choices == [again.choice(number) for number in range(300)]
    other = load_sweep(write_sweep(tmp_path, "other", search=search, method="random", trials=300, seed=1))
    assert choices[0] != other.choice(0)
    rates = torch.tensor([float(choice[LR]) for choice in choices])
    assert rates.min() >= 1e-3 and rates.max() <= 0.1 and 0.4 < (rates < 1e-2).float().mean() < 0.6
    assert {int(choice[EVERY]) for choice in choices} == {1, 2, 3, 4, 5, 6}
    assert {int(choice["train.batch_size"]) for choice in choices} == {16, 32, 48, 64}
    sweep.recipe(choices[7])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("space", "last"),
    [
        ({"low": 0.01, "high": 0.1, "step": 0.04}, "0.09"),
        ({"low": 0.1, "high": 0.7, "step": 0.1}, "0.7"),
        ({"low": 1, "high": 6, "step": 2, "integer": True}, "5"),
    ],
)
def test_a_range_that_its_step_does_not_divide(space: dict[str, Any], last: str) -> None:
    """It ends at its last point, for Optuna, too, which would warn at every trial."""
    options = SearchOptions.model_validate(space)
    (found,) = trials.distributions({LR: options}).values()
    assert options.ends()[-1] == last and float(last) == found.high  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("search", "says"),
    [
        (
            {"mixing.gamma.values.3": [0.1, 0.2], "mixing.gamma": [{"values": [1, 1, 1, 0]}]},
            "mixing.gamma: mixing.gamma",
        ),
        ({"lr": {"a": {LR: 0.1}, "b": {LR: 0.2}}, LR: [0.3]}, f"{LR}: {LR} is in `search.lr`"),
        ({LR: [0.3], "lr": {"a": {EVERY: 1}, "b": {LR: 0.2}}}, f"lr: {LR} is in `search.{LR}`"),
        ({"train": [{"epochs": 3}]}, "train: train.epochs is in `set`"),
        ({"train": {"a": {"train": {"epochs": 3}}}}, "train: train.epochs is in `set`"),
    ],
)
def test_a_field_that_undoes_another_is_refused(search: dict[str, Any], says: str, tmp_path: Path) -> None:
    """Its trials would differ in name only."""
    spaces = {key: {"variants" if isinstance(each, dict) else "values": each} for key, each in search.items()}
    with pytest.raises(SweepError, match=re.escape(f"search.{says}")):
        load_sweep(write_sweep(tmp_path, search=spaces))


def test_a_field_may_refine_another_and_a_variant_what_is_set(tmp_path: Path) -> None:
    gamma = {"mixing.gamma.values": {"values": [[1, 1, 1, 0]]}, "mixing.gamma.values.3": {"values": [0.1, 0.2]}}
    epochs = {"length": {"variants": {"short": {}, "long": {"train.epochs": 7}}}}
    sweep = load_sweep(write_sweep(tmp_path, search={**gamma, **epochs}))
    recipes = [sweep.recipe(sweep.choice(number)) for number in range(4)]
    assert [(recipe.mixing.gamma.values[3], recipe.train.epochs) for recipe in recipes] == [
        (0.1, 2), (0.1, 7), (0.2, 2), (0.2, 7)
    ]  # fmt: skip


def test_long_lists_and_long_ranges(tmp_path: Path) -> None:
    """All values of a list are checked; a range with more points than are listed keeps to its step."""
    path = write_sweep(tmp_path, search={"train.seed": {"values": list(range(1001))}}, method="random", trials=2)
    assert len(list(checked_choices(load_sweep(path).options))) == 1001
    search = {"train.seed": {"low": 1, "high": 1_000_001, "step": 4, "integer": True}}
    sweep = load_sweep(write_sweep(tmp_path, search=search, method="random", trials=20))
    seeds = [sweep.choice(number)["train.seed"] for number in range(20)]
    assert all(isinstance(seed, int) and 1 <= seed <= 1_000_001 and seed % 4 == 1 for seed in seeds)
    assert len(set(seeds)) > 15


@pytest.mark.parametrize("text", ["\N{GRINNING FACE}", "gr\u00fcn \u2028 \x85 \x7f", '"\\ud83d\\ude00\n'])
def test_texts_are_read_as_they_were_written(text: str) -> None:
    assert load_yaml(as_text({text: [text]}), "test") == json.loads(as_text({text: [text]})) == {text: [text]}


def test_variants_change_several_fields_together(tmp_path: Path) -> None:
    variants = {"small": {"train.batch_size": 16, LR: 0.01}, "usual": {}}
    sweep = load_sweep(write_sweep(tmp_path, search={"size": {"variants": variants}}))
    small, usual = (sweep.recipe(sweep.choice(number)) for number in range(2))
    assert (small.train.batch_size, small.learners[0].optimizer.lr) == (16, 0.01)
    assert (usual.train.batch_size, usual.learners[0].optimizer.lr) == (64, 0.1)


def test_changes_beside_the_file_come_after_its_own_and_make_another_sweep(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, set={"data.augmentation.crop": 2, "data.augmentation": {"crop": 0}})
    changes = ["train.epochs=3", "data.augmentation.crop=1", "stages=[]"]
    changed, usual = load_sweep(path, overrides=changes), load_sweep(path)
    assert list(changed.options.set.items())[-3:] == [
        ("train.epochs", 3), ("data.augmentation.crop", 1), ("stages", [])
    ]  # fmt: skip
    recipes = [sweep.recipe(sweep.choice(0)) for sweep in (usual, changed)]
    assert [(recipe.train.epochs, recipe.data.augmentation.crop) for recipe in recipes] == [(2, 0), (3, 1)]
    assert changed.fingerprint() != usual.fingerprint()
    (tmp_path / "again.yaml").write_text(changed.to_yaml())
    assert load_sweep(tmp_path / "again.yaml").fingerprint() == changed.fingerprint(), "what it has done can be redone"


def test_a_recipe_beside_the_sweep_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(load_recipe_text("digits-d"))
    sweep = load_sweep(write_sweep(tmp_path, recipe="mine.yaml"))
    assert sweep.recipe(sweep.choice(0)).name == "mine"


def load_recipe_text(name: str) -> str:
    from generalist.recipe import shipped_text

    return shipped_text(name)


def test_more_trials_are_the_same_sweep_and_other_values_are_not(tmp_path: Path) -> None:
    search = {LR: {"low": 0.01, "high": 0.1}}
    one = load_sweep(write_sweep(tmp_path, "a", name="same", search=search, method="random", trials=2))
    more = load_sweep(write_sweep(tmp_path, "b", name="same", search=search, method="random", trials=9, heartbeat=3))
    other = load_sweep(write_sweep(tmp_path, "c", name="same", search=search, method="random", trials=2, seed=4))
    assert one.fingerprint() == more.fingerprint() != other.fingerprint()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"search": {"train.epoch": {"values": [1]}}}, "train.epoch: unknown field; did you mean 'epochs'?"),
    ({"search": {"train.epochs": {"values": ["many"]}}}, "train.epochs"),
    ({"search": {"learners.l7.threat": {"values": ["linf:0.1"]}}}, "no element 'l7'"),
    ({"search": {}}, "search"),
    ({"search": {LR: {"values": []}}}, f"search.{LR}.values"),
    ({"search": {LR: {"values": [0.1, 0.1]}}}, "given twice"),
    ({"search": {LR: {"low": 0.1, "high": 0.01}}}, "`low` below `high`"),
    ({"search": {LR: {"low": 0.01}}}, "needs `low` and `high`"),
    ({"search": {LR: {"low": 0.01, "high": 0.1}}}, "a grid needs `values`"),
    ({"search": {LR: {"low": 0, "high": 0.1, "log": True}}, "method": "random", "trials": 2}, "begins above 0"),
    ({"search": {LR: {"low": 0.1, "high": 1, "log": True, "step": 0.1}}, "method": "tpe", "trials": 2}, "exclude"),
    ({"search": {LR: {"low": 0.5, "high": 2, "integer": True}}, "method": "tpe", "trials": 2}, "whole numbers"),
    ({"search": {LR: {"low": 1, "high": 1e18, "step": 1e-300}}, "method": "tpe", "trials": 2}, "is too wide"),
    ({"search": {LR: {"values": [0.1], "log": True}}}, "go with `low` and `high`"),
    ({"search": {LR: {"values": [0.1], "variants": {"a": {}}}}}, "one of the three"),
    ({"search": {LR: {"value": [0.1]}}}, "unknown field; the fields are high"),
    ({"search": {"x": {"variants": {}}}}, "variants"),
    ({"search": {"x": {"variants": {"a": {"train.epoch": 3}}}}}, "train.epoch"),
    ({"search": {"train.epochs": {"values": [1]}}}, "in `set`, too"),
    ({"method": "random"}, "needs their number"),
    ({"trials": 5}, "leave `trials` out"),
    ({"method": "bayes"}, "method"),
    ({"objectives": ["naturl"]}, "no 'naturl'"),
    ({"objectives": ["l2"]}, "no 'l2'"),
    ({"objectives": ["natural ** 2"]}, "'natural ** 2' is not allowed"),
    ({"objectives": []}, "objectives"),
    ({"objectives": [{"value": "natural", "direction": "up"}]}, "direction"),
    ({"measures": {"x": "open('y')"}}, "the only calls are"),
    ({"pruning": {"kind": "halving"}}, "a grid is there to measure every combination"),
    ({"pruning": {"kind": "median"}, "objectives": ["natural", "linf"]}, "needs one objective"),
    ({"pruning": {"kind": "median"}, "set": {"validation.every": 2}}, "set validation.every below 2"),
    ({"set": {"train.epoks": 2}}, "train.epoks: unknown field"),
    ({"recipe": "digits-x"}, "unknown recipe 'digits-x'"),
    ({"recipe": None}, "recipe: required, but missing"),
    ({"name": "../up"}, "name"),
    ({"heartbeat": 0}, "heartbeat"),
    ({"colour": 1}, "colour: unknown field"),
]


@pytest.mark.parametrize(("changes", "says"), BAD, ids=[says[:30] for _, says in BAD])
def test_a_bad_sweep_costs_one_line_and_nothing_runs(
    changes: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path, **changes)
    if "search" in changes and "in `set`" not in says:
        raw = {**TINY, **changes}
        raw["set"] = {key: value for key, value in TINY["set"].items() if key not in changes["search"]}
        (tmp_path / "tiny.yaml").write_text(json.dumps(raw))
    code, out, error = run_main(["sweep", "tiny.yaml"], monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["sweep"], "name a sweep"),
        (["sweep", "digits-gama-end"], "did you mean 'digits-gamma-end'?"),
        (["sweep", "list.yaml"], "must be a mapping"),
        (["sweep", "broken.yaml"], "error: broken.yaml is not valid YAML"),
        (["sweep", "tiny.yaml", "--trials", "0"], "--trials must be above 0"),
        (["sweep", "tiny.yaml", "--timeout", "-1"], "--timeout must be above 0"),
        (["sweep", "tiny.yaml", "--device", "gpu"], "gpu"),
        (["sweep", "tiny.yaml", "--storage", "not a url"], "--storage is not the URL of a database"),
        (["sweep", "tiny.yaml", "--storage", "mysql://host/x"], "'mysql' is not a database that sweeps can use"),
        (["sweep", "tiny.yaml", "--storage", "sqlite://"], "a database in memory"),
        (["sweep", "tiny.yaml", "--storage", "postgresql://me:secret@127.0.0.1:1/x"], "does not work as it should"),
        (
            ["sweep", "tiny.yaml", "--storage", "postgresql://127.0.0.1:1/x?user=me&password=secret"],
            "127.0.0.1:1/x does",
        ),
        (["sweep", "tiny.yaml", "--storage", "postgresql://me:my@secret@127.0.0.1:1/x"], "must be written as %40"),
        (["sweep", "tiny.yaml", "--show"], "there is no sweep in"),
        (["sweep", "tiny.yaml", "--set", "train.epochs"], "write it as field.path=value"),
        (["sweep", "tiny.yaml", "--set", "train.epoch=3"], "train.epoch: unknown field; did you mean 'epochs'?"),
        (["sweep", "tiny.yaml", "--set", f"{LR}=0.1"], f"{LR} is in `set`, too; leave it out of one"),
        (["sweep", "tiny.yaml", "--set", "train.seed=[1"], "is not valid YAML"),
    ],
)
def test_a_bad_command_costs_one_line(
    args: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path)
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "broken.yaml").write_text("recipe: [")
    code, _, error = run_main(args, monkeypatch, capsys)
    assert code == 2
    assert error.startswith("error: ") and error.count("\n") == 1 and says in error
    assert "secret" not in error
    assert not (tmp_path / "sweeps").exists()


def test_without_optuna_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(SweepError, match=r"generalist-at\[sweep\]"):
        storage.choose_place(None, tmp_path)


# -- measurements -----------------------------------------------------------------------------------------------------


def test_the_example_names_what_runs_really_log(tmp_path: Path) -> None:
    """Else an expression would be accepted before the sweep and fail after its first trial."""
    path = write_sweep(tmp_path, search={LR: {"values": [0.1]}})
    shared = work(path, tmp_path / "out")
    (record,) = RunDirectory(tmp_path / "out/trials/0000").read_metrics()[-1:]
    example = example_record(shared.sweep.recipe(shared.sweep.choice(0)))

    def names(value: Any) -> Any:
        return {key: names(inner) for key, inner in value.items()} if isinstance(value, dict) else None

    logged = {key: names(value) for key, value in record.items() if key not in {"train", "redistributed"}}
    found = names(example)
    assert {key: found[key] for key in logged} == logged
    assert set(found) - set(logged) == {
        "natural", "robust", "worst", "linf", "drift", "mixing_gap", "ensemble", "train_seconds"
    }  # fmt: skip


def test_training_time_counts_every_step_once() -> None:
    records = [{"epoch": i, "step": 10 * i, "images_per_second": speed} for i, speed in ((1, 100.0), (2, 50.0))]
    assert train_seconds(records, batch_size=5) == 10 * 5 / 100 + 10 * 5 / 50


def test_training_time_is_that_of_the_epochs_that_a_branch_has_trained() -> None:
    records = [{"epoch": i, "step": 10 * i, "images_per_second": 50.0} for i in (120, 121)]
    assert train_seconds(records, batch_size=5) == 2 * 10 * 5 / 50


def test_the_time_of_a_recipe_with_stages_is_that_of_all(tmp_path: Path) -> None:
    stages = [{"name": "one", "change": {"train": {"batch_size": 10}}}, {"name": "two"}]
    recipe = load_recipe("digits-d", overrides=["train.batch_size=20", f"stages={json.dumps(stages)}"])
    run = RunDirectory(tmp_path)
    validation = {"accuracy": {"global": {"natural": 0.9}}, "ensemble": 0.9, "drift": 0.0, "mixing_gap": 0.0}
    record = {"epoch": 1, "step": 6, "images_per_second": 4.0, "best_epoch": 1, "validation": validation}
    for part in (run, run.stage("one")):
        part.path.mkdir(parents=True, exist_ok=True)
        part.metrics.write_text(json.dumps(record) + "\n")
    found = final_measurements(run, recipe, epoch="best")
    assert found["train_seconds"] == 6 * 10 / 4 + 6 * 20 / 4


# -- from end to end --------------------------------------------------------------------------------------------------


def test_a_sweep_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path, measures={"drift": "drift", "seconds": "train_seconds"})
    args = ["sweep", "tiny.yaml", "--device", "cpu"]
    code, out, _ = run_main([*args, "--trials", "1"], monkeypatch, capsys)
    assert code == 0 and "1 complete of 4 trials" in out
    code, _, error = run_main([*args, "--set", "train.epochs=3"], monkeypatch, capsys)
    assert code == 2 and "another sweep" in error  # the folder is that of trials without the change
    code, out, _ = run_main([*args, "--csv", "found.csv"], monkeypatch, capsys)
    assert code == 0 and "4 complete of 4 trials" in out
    rows = read_rows(tmp_path / "tiny.yaml", tmp_path / "sweeps/tiny")
    assert [(row.number, row.state) for row in rows] == [(number, "complete") for number in range(4)]
    for row in rows:
        run = RunDirectory(tmp_path / f"sweeps/tiny/trials/{row.number:04}")
        last = run.read_metrics()[-1]
        chosen = next(record for record in run.read_metrics() if record["epoch"] == last["best_epoch"])
        accuracy = chosen["validation"]["accuracy"]["global"]
        assert row.values == (pytest.approx(accuracy["natural"] + accuracy["linf:0.18"]),)
        assert row.measures["drift"] == chosen["validation"]["drift"] and row.epoch == last["best_epoch"]
        assert run.model.is_file() and run.last.is_file()
        recipe = load_recipe(run.recipe)
        assert str(recipe.learners[0].optimizer.lr) == row.choice[LR]
    table = list(csv.DictReader((tmp_path / "found.csv").open()))
    assert [line["state"] for line in table] == ["complete"] * 4
    assert [float(line["natural + robust"]) for line in table] == [row.values[0] for row in rows if row.values]
    best = max(rows, key=lambda row: row.values or (0.0,))
    _, out, _ = run_main([*args, "--show"], monkeypatch, capsys)
    assert f"best: trial {best.number}, run: sweeps/tiny/trials/{best.number:04}" in out
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "sweeps/tiny/trials").rglob("*"))
    assert run_main(args, monkeypatch, capsys)[0] == 0  # nothing is left to do
    assert before == sorted(path.stat().st_mtime_ns for path in (tmp_path / "sweeps/tiny/trials").rglob("*"))


def test_the_list_names_the_shipped_sweeps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(["sweep", "--list"], monkeypatch, capsys)
    assert code == 0 and all(name in out for name in shipped_sweeps())


@pytest.mark.slow
def test_tpe_searches_two_objectives(tmp_path: Path) -> None:
    search = {LR: {"low": 0.01, "high": 0.2, "log": True}, EVERY: {"low": 1, "high": 3, "integer": True}}
    path = write_sweep(
        tmp_path, search=search, method="tpe", trials=3, objectives=["natural", "linf"], set={"train.epochs": 1}
    )
    work(path, tmp_path / "out")
    rows = read_rows(path, tmp_path / "out")
    assert [row.state for row in rows] == ["complete"] * 3
    assert all(row.values is not None and len(row.values) == 2 for row in rows)
    assert len({row.choice[LR] for row in rows}) == 3
    raised = write_sweep(
        tmp_path, search=search, method="tpe", trials=4, objectives=["natural", "linf"], set={"train.epochs": 1}
    )
    work(raised, tmp_path / "out")
    assert [row.number for row in read_rows(raised, tmp_path / "out")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_trials_that_fall_behind_are_pruned(tmp_path: Path) -> None:
    """The first learns; the second's rate is so low that it stays below the median of the first."""
    path = write_sweep(
        tmp_path,
        search={LR: {"values": [0.1, 1e-6]}},
        set={"train.epochs": 6, "train.checkpoint_epochs": 1, "mixing.decay": 0.5},
        pruning={"kind": "median", "warmup": 2, "startup": 1},
    )
    work(path, tmp_path / "out")
    good, bad = read_rows(path, tmp_path / "out")
    assert (good.state, bad.state) == ("complete", "pruned")
    assert bad.epoch is not None and 2 <= bad.epoch < 6 and bad.values is None
    assert len(RunDirectory(tmp_path / "out/trials/0001").read_metrics()) == bad.epoch
    assert not RunDirectory(tmp_path / "out/trials/0001").last.exists()


def test_a_trial_that_diverges_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from generalist import api

    path, train = write_sweep(tmp_path), api.train

    def train_or_diverge(recipe: Any, **options: Any) -> RunDirectory:
        if recipe.learners[0].optimizer.lr == 0.1:
            raise DivergedError("learner 'linf': the loss is nan")
        return train(recipe, **options)

    monkeypatch.setattr(api, "train", train_or_diverge)
    shared = work(path, tmp_path / "out")
    rows = trials.rows(shared)
    assert [row.state for row in rows] == ["failed", "failed", "complete", "complete"]
    assert rows[0].error == "learner 'linf': the loss is nan"
    assert "the loss is nan" in to_csv(rows, shared.sweep)


def test_what_is_not_the_trials_fault_stops_the_worker_and_frees_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from generalist import api

    path = write_sweep(tmp_path)

    def full(recipe: Any, **options: Any) -> RunDirectory:
        raise GeneralistError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(api, "train", full)
        for _ in range(trials.MAX_LOSSES + 1):  # more often than a worker may die: an error is no death
            with pytest.raises(GeneralistError, match="no space left"):
                work(path, tmp_path / "out")
    assert [row.state for row in read_rows(path, tmp_path / "out")] == ["waiting"]
    work(path, tmp_path / "out")
    assert [row.state for row in read_rows(path, tmp_path / "out")] == ["complete"] * 4


def test_a_trial_that_always_raises_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes first, being an older one: without an end to it no worker would ever come to the next."""
    from generalist import api

    path, train = write_sweep(tmp_path, search={LR: {"values": [0.1, 0.05]}}, set={"train.epochs": 1}), api.train

    def train_or_raise(recipe: Any, **options: Any) -> RunDirectory:
        if recipe.learners[0].optimizer.lr == 0.1:
            raise ImportError("no module named 'extra'")
        return train(recipe, **options)

    monkeypatch.setattr(api, "train", train_or_raise)
    for _ in range(trials.MAX_LOSSES):
        with pytest.raises(ImportError, match="extra"):  # as it is, and not as what the database lacks
            work(path, tmp_path / "out")
    work(path, tmp_path / "out")
    assert [row.state for row in read_rows(path, tmp_path / "out")] == ["failed", "complete"]


@pytest.mark.parametrize("name", ["what?", "a%20b", "100%"])
def test_the_database_lies_in_the_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    assert storage.choose_place(None, tmp_path / name).file == tmp_path / name / "sweep.db"


def test_a_database_of_another_optuna_is_refused_in_a_line(tmp_path: Path) -> None:
    place = storage.choose_place(None, tmp_path / "out")
    sweep = load_sweep(write_sweep(tmp_path))
    storage.open_shared(sweep, place)
    with closing(sqlite3.connect(tmp_path / "out/sweep.db")) as database:
        database.execute("update alembic_version set version_num = 'v99.0.0'")
        database.commit()
    with pytest.raises(SweepError, match="no longer compatible"):
        storage.open_shared(sweep, place)


def test_a_stopped_trial_goes_on_where_it_was(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, search={LR: {"values": [0.1]}}, set={"train.checkpoint_epochs": 1})

    seen: list[int] = []

    def stop_late(record: dict[str, Any]) -> None:
        seen.append(record["epoch"])
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(path, tmp_path / "out", listener=Listener(epoch=stop_late))
    work(path, tmp_path / "out", listener=Listener(epoch=lambda record: seen.append(record["epoch"])))
    assert seen == [1, 2, 2]
    (row,) = read_rows(path, tmp_path / "out")
    assert (row.state, row.losses) == ("complete", 0)
    whole = work(path, tmp_path / "whole")
    assert trials.rows(whole)[0].values == row.values
    weights = [(tmp_path / name / "trials/0000/last.safetensors").read_bytes() for name in ("out", "whole")]
    assert weights[0] == weights[1]


def test_a_stopped_sweep_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any, **kwargs: Any) -> None:
        raise InterruptedRunError("stopped in epoch 1 at step 3; a checkpoint is kept, go on with --resume", 15)

    path = write_sweep(tmp_path, search={LR: {"values": [0.1]}})
    monkeypatch.setattr(worker.api, "train", stopped)
    with pytest.raises(InterruptedRunError, match=r"stopped in trial 0, .* start the sweep again to go on") as ending:
        work(path, tmp_path / "out")
    assert ending.value.exit_code == 143, "of SIGTERM"
    (row,) = read_rows(path, tmp_path / "out")
    assert (row.state, row.losses) == ("waiting", 0)


def test_a_folder_belongs_to_one_sweep(tmp_path: Path) -> None:
    one = write_sweep(tmp_path, "one", search={LR: {"values": [0.1]}}, set={"train.epochs": 1})
    two = write_sweep(tmp_path, "two", search={LR: {"values": [0.05]}}, set={"train.epochs": 1})
    work(one, tmp_path / "out")
    with pytest.raises(SweepError, match="runs of another sweep"):
        work(two, tmp_path / "out")
    same_name = write_sweep(tmp_path, "again", name="one", search={LR: {"values": [0.05]}}, set={"train.epochs": 1})
    with pytest.raises(SweepError, match="another sweep of the name 'one'"):
        work(same_name, tmp_path / "elsewhere", storage=f"sqlite:///{tmp_path}/out/sweep.db")
    (tmp_path / "foreign/trials").mkdir(parents=True)
    with pytest.raises(SweepError, match="'trials' that was not made by a sweep"):
        work(one, tmp_path / "foreign")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sweep.yaml").write_text("x: 1  # somebody's")
    with pytest.raises(SweepError, match=r"'sweep.yaml' that was not made by a sweep"):
        work(one, tmp_path / "mine")
    assert (tmp_path / "mine/sweep.yaml").read_text() == "x: 1  # somebody's"


@pytest.mark.parametrize("show", [True, False])
def test_a_database_of_somebody_else_stays_as_it_is(
    tmp_path: Path, show: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so does a file of the lock's name."""
    path, database, lock = write_sweep(tmp_path), tmp_path / "theirs.db", tmp_path / "theirs.db.lock"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("create table birds (name text)")
        connection.commit()
    lock.write_text("precious")
    before = database.read_bytes()
    words = ["sweep", str(path), "--out", str(tmp_path / "out"), "--storage", f"sqlite:///{database}"]
    code, _, err = run_main([*words, *(["--show"] if show else [])], monkeypatch, capsys)
    assert code == 2 and ("there is no sweep in" if show else "is a database of another program") in " ".join(
        err.split()
    )
    assert database.read_bytes() == before and lock.read_text() == "precious"
    (tmp_path / "text.db").write_text("no database")
    words[-1] = f"sqlite:///{tmp_path}/text.db"
    assert run_main(words, monkeypatch, capsys)[0] == 2 and (tmp_path / "text.db").read_text() == "no database"


# -- results ----------------------------------------------------------------------------------------------------------


def _rows(*values: tuple[float, ...] | None) -> list[Row]:
    return [Row(n, "complete" if v else "failed", {}, v) for n, v in enumerate(values)]


def test_the_front_is_what_nothing_beats() -> None:
    rows = _rows((0.9, 0.3), (0.8, 0.5), (0.7, 0.5), None, (0.9, 0.3), (0.6, 0.6))
    assert [row.number for row in front(rows, ["maximize", "maximize"])] == [0, 1, 4, 5]
    assert [row.number for row in front(rows, ["maximize", "minimize"])] == [0, 4]
    assert [row.number for row in front(_rows((0.1,), (0.3,), (0.2,)), ["maximize"])] == [1]
    assert [row.number for row in front(_rows((0.1,), (0.3,), (0.2,)), ["minimize"])] == [0]
    assert front(_rows(None), ["maximize"]) == []
