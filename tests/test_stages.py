"""Recipes in stages: each in its own directory, from fresh weights or another's, and resumable at any point."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from training_helpers import make_trainer

from generalist import cli, train
from generalist.core.errors import GeneralistError, InterruptedRunError, RecipeError, RunError
from generalist.core.run import RunDirectory
from generalist.data.options import load_splits
from generalist.recipe import load_recipe
from generalist.stage_plans import Plan
from generalist.training.artefacts import artefact_file, branch_files, load_weights
from generalist.training.loop import Listener
from generalist.weights import weights_file

RECIPE: dict[str, Any] = {
    "data": {"name": "digits", "augmentation": {"crop": 1, "flip": False}},
    "model": {"name": "small", "width": 4},
    "learners": [
        {
            "name": "linf",
            "objective": "at",
            "threat": "linf:0.1",
            "attack": {"steps": 1},
            "optimizer": {"lr": 0.1},
        },
        {"name": "natural", "objective": "nt"},
    ],
    "mixing": {"redistribution": {"every": 1}},
    "train": {"epochs": 3, "batch_size": 256, "checkpoint_epochs": 1},
    "validation": {"images": 100, "steps": 1, "every": 1},
    "stages": [
        {
            "name": "warm-up",
            "change": {
                "learners": [{"name": "natural", "objective": "nt", "optimizer": {"lr": 0.1}}],
                "train": {"epochs": 2},
            },
        },
        {"name": "main", "start": "warm-up"},
    ],
}
STEPS = 4
"""Iterations of an epoch: 1197 images in batches of 256."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train(RECIPE, out=tmp_path_factory.mktemp("stages") / "run", device="cpu")


def stopping_at(number: int) -> Listener:
    """A listener that stops the process's training after so many iterations, counted over all stages."""
    calls = 0

    def iteration(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise InterruptedRunError("stopped", 15)

    return Listener(iteration=iteration)


def same_weights(first: Path, second: Path) -> bool:
    one, other = load_weights(first)[0], load_weights(second)[0]
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_times(run: RunDirectory) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "images_per_second"} for record in run.read_metrics()]


def assert_equal_runs(one: RunDirectory, other: RunDirectory) -> None:
    for first, second in ((one, other), (one.stage("warm-up"), other.stage("warm-up"))):
        assert same_weights(first.last, second.last)
        assert same_weights(first.model, second.model)
        assert without_times(first) == without_times(second)
        assert first.snapshot_epochs() == second.snapshot_epochs()
    assert one.recipe.read_text() == other.recipe.read_text()


def test_each_stage_has_its_own_run(uninterrupted: RunDirectory) -> None:
    first = uninterrupted.stage("warm-up")
    assert [record["epoch"] for record in first.read_metrics()] == [1, 2]
    assert [record["epoch"] for record in uninterrupted.read_metrics()] == [1, 2, 3]
    for run in (first, uninterrupted):
        assert all(path.is_file() for path in (run.recipe, run.environment, run.model, run.last))
    assert sorted(first.read_metrics()[0]["lr"]) == ["natural"]
    assert sorted(uninterrupted.read_metrics()[0]["lr"]) == ["linf", "natural"]


def test_the_run_keeps_the_whole_recipe_and_each_stage_its_own(uninterrupted: RunDirectory) -> None:
    whole = load_recipe(uninterrupted.recipe)
    assert whole == load_recipe(RECIPE)
    assert [stage.name for stage in whole.stages] == ["warm-up", "main"]
    own = load_recipe(uninterrupted.stage("warm-up").recipe)
    assert own.stages == [] and own.train.epochs == 2 and [learner.name for learner in own.learners] == ["natural"]


def test_a_stage_starts_from_the_stage_that_it_names(tmp_path: Path) -> None:
    """With a learning rate of zero the second stage ends where it started."""
    still = {"learners": [{"name": "natural", "objective": "nt", "optimizer": {"lr": 1e-12, "weight_decay": 0}}]}
    stages = [RECIPE["stages"][0], {"name": "main", "start": "warm-up", "change": still}]
    run = train({**RECIPE, "stages": stages}, overrides=["train.epochs=1"], out=tmp_path / "run", device="cpu")
    before = load_weights(run.stage("warm-up").snapshots / "2" / "natural.safetensors")[0]
    after = load_weights(run.snapshots / "1" / "natural.safetensors")[0]
    # The other stage's momenta must not have come along either: they would have moved the weights.
    for name, tensor in before.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-7)


def test_a_fresh_stage_does_not_depend_on_the_one_before(tmp_path: Path) -> None:
    stages = [RECIPE["stages"][0], {"name": "main", "start": "fresh"}]
    staged = train({**RECIPE, "stages": stages}, out=tmp_path / "staged", device="cpu")
    alone = train({**RECIPE, "stages": []}, out=tmp_path / "alone", device="cpu")
    assert same_weights(staged.last, alone.last)


def test_a_stage_may_start_from_another_run(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    source = uninterrupted.stage("warm-up").path
    stages = [{"name": "main", "start": str(source)}]
    run = train({**RECIPE, "stages": stages}, out=tmp_path / "run", device="cpu")
    assert same_weights(run.last, uninterrupted.last)
    at = train({**RECIPE, "stages": [{"name": "main", "start": f"{source}@2"}]}, out=tmp_path / "at", device="cpu")
    assert same_weights(at.last, uninterrupted.last)


@pytest.mark.parametrize("stop", [1, STEPS, STEPS + 2, 2 * STEPS, 2 * STEPS + 1, 3 * STEPS + 2, 5 * STEPS - 1])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, uninterrupted: RunDirectory, stop: int) -> None:
    """Killed without a last checkpoint, in the middle or at the end of either stage's epochs."""
    out = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        train(RECIPE, out=out, device="cpu", listener=stopping_at(stop))
    run = train(RECIPE, out=out, device="cpu", resume=True)
    assert_equal_runs(run, uninterrupted)


def test_interrupted_in_both_stages(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    out = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        train(RECIPE, out=out, device="cpu", listener=stopping_at(STEPS + 1))
    with pytest.raises(InterruptedRunError):
        train(out, device="cpu", resume=True, listener=stopping_at(STEPS + STEPS + 1))
    assert_equal_runs(train(out, device="cpu", resume=True), uninterrupted)


def test_the_command_line_resumes_a_staged_run(
    tmp_path: Path, uninterrupted: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recipe with --out, and by the run alone, after an interruption of the first stage."""
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(RECIPE))
    for number, args in enumerate([["mine.yaml", "--out", "run-0"], ["run-1"]]):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InterruptedRunError):
            train("mine.yaml", out=f"run-{number}", device="cpu", listener=stopping_at(STEPS + 1))
        monkeypatch.setattr(sys, "argv", ["generalist", "train", *args, "--resume", "--device", "cpu"])
        with pytest.raises(SystemExit) as ending:
            cli.main()
        assert ending.value.code == 0
        assert same_weights(RunDirectory(tmp_path / f"run-{number}").last, uninterrupted.last)


def test_resume_of_a_finished_staged_run_changes_nothing(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    before = without_times(uninterrupted)
    train(RECIPE, out=uninterrupted.path, device="cpu", resume=True)
    assert without_times(uninterrupted) == before


def test_other_stages_are_another_recipe(uninterrupted: RunDirectory) -> None:
    with pytest.raises(RecipeError, match="stages: differs"):
        train({**RECIPE, "stages": RECIPE["stages"][1:]}, out=uninterrupted.path, device="cpu", resume=True)


def test_a_later_stage_that_cannot_be_leaves_nothing_behind(tmp_path: Path) -> None:
    """Everything is checked before the first stage runs."""
    for change in (
        {"train": {"batch_size": 5000}},
        {"model": {"name": "resnet19", "width": None}},
        {"data": {"name": "mnist"}},
    ):
        stages = [RECIPE["stages"][0], {"name": "main", "change": change}]
        with pytest.raises(Exception, match=r"batch_size|resnet18|mnist"):
            train({**RECIPE, "stages": stages}, out=tmp_path / "run", device="cpu", overrides=[f"data.root={tmp_path}"])
        assert list(tmp_path.iterdir()) == []


def test_branch_and_resume_without_the_source(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    """A branch that was killed before its first epoch's checkpoint still goes on from the source's weights."""
    plain = {**RECIPE, "stages": []}
    whole = train(plain, out=tmp_path / "whole", start=uninterrupted, device="cpu")
    out = tmp_path / "branch"
    with pytest.raises(InterruptedRunError):
        train(plain, out=out, start=uninterrupted.path, device="cpu", listener=stopping_at(2))
    assert same_weights(train(RunDirectory(out), resume=True, device="cpu").last, whole.last)
    fresh = train(plain, out=tmp_path / "fresh", device="cpu")
    assert not same_weights(fresh.last, whole.last)


def test_environments_name_the_data_of_their_stage(uninterrupted: RunDirectory) -> None:
    first, last = (json.loads(run.environment.read_text()) for run in (uninterrupted.stage("warm-up"), uninterrupted))
    assert first["data"] == last["data"] and set(last["data"]) == {"train", "test"}


TWO_ENDS: dict[str, Any] = {
    **RECIPE,
    "stages": [
        {
            "name": name,
            "change": {
                "learners": [{"name": name, "objective": "nt", "optimizer": {"lr": rate}}],
                "train": {"epochs": 1},
            },
        }
        for name, rate in (("one", 0.1), ("two", 0.05))
    ]
    + [{"name": "joined", "start": {"linf": "one#one", "natural": "two"}, "change": {"train": {"epochs": 1}}}],
}


def test_learners_start_from_different_stages(tmp_path: Path) -> None:
    """As a path between two endpoints needs it: each learner from a named network of its own source."""
    raw = {**TWO_ENDS, "stages": [dict(stage) for stage in TWO_ENDS["stages"]]}
    raw["stages"][-1]["change"] = {"train": {"epochs": 1}, "learners": _still(RECIPE["learners"])}
    run = train(raw, out=tmp_path / "run", device="cpu")
    ends = {name: load_weights(run.stage(name).snapshots / "1" / f"{name}.safetensors")[0] for name in ("one", "two")}
    joined = {
        name: load_weights(run.snapshots / "1" / f"{name}.safetensors")[0]["classifier.weight"]
        for name in ("linf", "natural")
    }
    assert torch.equal(joined["linf"], ends["one"]["classifier.weight"])
    assert not torch.equal(joined["natural"], joined["linf"])


def _still(learners: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The learners with steps too small to change a float32 weight."""
    return [{**learner, "optimizer": {"lr": 1e-30, "weight_decay": 0.0}} for learner in learners]


def test_a_learner_may_start_fresh_beside_one_that_does_not(tmp_path: Path) -> None:
    stages = [RECIPE["stages"][0], {"name": "main", "start": {"linf": "fresh", "natural": "warm-up"}}]
    said = train({**RECIPE, "stages": stages}, out=tmp_path / "said", device="cpu")
    stages = [RECIPE["stages"][0], {"name": "main", "start": {"natural": "warm-up"}}]
    left_out = train({**RECIPE, "stages": stages}, out=tmp_path / "left-out", device="cpu")
    assert said.last.read_bytes() == left_out.last.read_bytes()


def test_a_stage_that_could_not_take_what_an_earlier_one_leaves_is_refused_before_that_trains(tmp_path: Path) -> None:
    """A run keeps its recipe: it could never have ended."""
    wide = {"model": {"name": "small", "width": 16}}
    stages = [RECIPE["stages"][0], {"name": "main", "start": "warm-up", "change": wide}]
    with pytest.raises(
        RecipeError, match=r"stages\.main.*'warm-up' is another network: there '.*' is \(.*\), and here"
    ):
        train({**RECIPE, "stages": stages}, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    stages[1]["start"] = "fresh"
    train({**RECIPE, "stages": stages}, out=tmp_path / "run", device="cpu")


def test_a_start_for_a_learner_that_is_not_there_is_refused(tmp_path: Path) -> None:
    raw = {**RECIPE, "stages": [RECIPE["stages"][0], {"name": "main", "start": {"linv": "warm-up"}}]}
    with pytest.raises(RecipeError, match=r"stages\.main\.start\.linv.*linf, natural"):
        train(raw, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_run_of_three_stages_resumes_in_the_first(tmp_path: Path) -> None:
    """The second stage has no directory yet when the run goes on, and is no stage that was lost."""
    whole = train(TWO_ENDS, out=tmp_path / "whole", device="cpu")
    with pytest.raises(InterruptedRunError):
        train(TWO_ENDS, out=tmp_path / "run", device="cpu", listener=stopping_at(2))
    run = train(TWO_ENDS, out=tmp_path / "run", device="cpu", resume=True)
    assert same_weights(run.last, whole.last)


def test_a_branch_killed_within_its_first_checkpoint_still_starts_from_its_source(
    tmp_path: Path, uninterrupted: RunDirectory
) -> None:
    """A checkpoint that was never finished leaves a folder behind, which is no reason to train from fresh weights."""
    plain = {**RECIPE, "stages": []}
    whole = train(plain, out=tmp_path / "whole", start=str(uninterrupted.path), device="cpu")
    out = tmp_path / "branch"
    with pytest.raises(InterruptedRunError):
        train(plain, out=out, start=str(uninterrupted.path), device="cpu", listener=stopping_at(2))
    for file in RunDirectory(out).checkpoints.iterdir():
        file.unlink()
    assert same_weights(train(out, resume=True, device="cpu").last, whole.last)


def test_a_resumed_branch_keeps_its_source(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    plain, source = {**RECIPE, "stages": []}, str(uninterrupted.path)
    out = tmp_path / "branch"
    with pytest.raises(InterruptedRunError):
        train(plain, out=out, start=source, device="cpu", listener=stopping_at(2))
    with pytest.raises(RunError, match="leave --from out"):
        train(plain, out=out, start=f"{source}@1", device="cpu", resume=True)
    train(plain, out=out, start=source, device="cpu", resume=True)  # as torchrun does, which repeats the whole command


def curve(*ends: str) -> dict[str, Any]:
    learner = {
        "name": "curve",
        "objective": {"kind": "rmc", "ends": list(ends), "around": "at", "points": 2, "statistics": 50},
        "threat": "linf:0.1",
        "attack": {"steps": 1},
        "optimizer": {"lr": 0.1},
    }
    return {"change": {"learners": [learner], "train": {"epochs": 1}}}


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ({"start": {"linf": "one#won"}}, r"stages\.last: 'one#won': stage 'one' keeps no 'won'; say global, one"),
        ({"start": "one@7"}, r"stages\.last: 'one@7': stage 'one' keeps no epoch 7"),
        ({"start": "one#won"}, r"stages\.last: 'one#won': stage 'one' keeps no 'won'; say global, one"),
        ({"start": "one@first"}, r"stages\.last: 'one@first': write it as STAGE"),
        (curve("one", "two#too"), r"stages\.last: 'two#too': stage 'two' keeps no 'too'"),
        (curve("one", "tow"), r"tow is not a run directory"),
        (curve("one", "#two"), r"'#two' names no run"),
    ],
)
def test_what_no_stage_will_leave_is_refused_before_any_runs(tmp_path: Path, last: dict[str, Any], says: str) -> None:
    """Not when its turn comes, hours later: a run keeps its recipe, so the slip could not be mended then."""
    raw = {**TWO_ENDS, "stages": [*TWO_ENDS["stages"][:2], {"name": "last", **last}]}
    with pytest.raises(GeneralistError, match=says):
        train(raw, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_objectives_name_an_epoch_of_a_stage_as_starts_do(tmp_path: Path) -> None:
    raw = {**TWO_ENDS, "stages": [*TWO_ENDS["stages"][:2], {"name": "last", **curve("one@1#one", "two")}]}
    run = train(raw, out=tmp_path / "run", device="cpu")
    assert len(run.read_metrics()) == 1


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{", '{"resumed": 3}'])
def test_a_crafted_environment_is_refused(tmp_path: Path, text: str) -> None:
    plain = {**RECIPE, "stages": []}
    with pytest.raises(InterruptedRunError):
        train(plain, out=tmp_path / "run", device="cpu", listener=stopping_at(1))
    RunDirectory(tmp_path / "run").environment.write_text(text)
    with pytest.raises(RunError, match=r"environment.json is damaged"):
        train(plain, out=tmp_path / "run", device="cpu", resume=True)


def test_what_there_is_to_say_of_a_later_stage_is_said_once(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    """Every stage is built twice: at first for its complaints, and when its turn comes."""
    stages = [RECIPE["stages"][0], {"name": "main", "start": str(uninterrupted.path)}]
    said: list[str] = []
    overrides = ["train.seed=1", "train.epochs=1"]  # another seed holds out images that the source was trained on
    train({**RECIPE, "stages": stages}, overrides=overrides, out=tmp_path / "run", listener=Listener(say=said.append))
    assert len([text for text in said if "held out here" in text]) == 1


ALONE: dict[str, Any] = {**RECIPE, "learners": RECIPE["learners"][:1], "mixing": {}, "stages": []}


def taught_by(run: RunDirectory) -> str:
    return f"learners.linf.objective={{kind: at-distil, teacher: {run.path}}}"


def test_a_teacher_that_knows_the_held_out_images_is_told_of(tmp_path: Path) -> None:
    """As a source of weights is: what the teacher says of them passes on what it has learnt by heart."""
    overrides = ["train.epochs=1", "validation.split=test"]
    teacher = train(ALONE, overrides=overrides, out=tmp_path / "teacher", device="cpu")
    said: list[str] = []
    listener = Listener(say=said.append)
    run = train(ALONE, overrides=["train.epochs=1", taught_by(teacher)], out=tmp_path / "run", listener=listener)
    assert len([text for text in said if "held out here" in text]) == 1
    assert load_weights(run.model)[1]["unseen"] == []


def test_a_stage_that_teaches_is_told_of_as_a_run_is(tmp_path: Path) -> None:
    stages = [
        {"name": "teach", "change": {"validation": {"split": "test"}}},
        {"name": "learn", "change": {"learners": [{**ALONE["learners"][0], "objective": TAUGHT_BEFORE}]}},
    ]
    said: list[str] = []
    listener = Listener(say=said.append)
    overrides = ["train.epochs=1"]
    run = train({**ALONE, "stages": stages}, overrides=overrides, out=tmp_path / "run", listener=listener)
    assert len([text for text in said if "held out here" in text]) == 1
    assert load_weights(run.model)[1]["unseen"] == []


TAUGHT_BEFORE = {"kind": "at-distil", "teacher": "teach"}


def test_schedules_that_are_half_over_need_weights_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.start_epoch: 1 epochs count as done.*--from RUN@EPOCH"):
        train(ALONE, overrides=["train.epochs=2", "train.start_epoch=1"], out=tmp_path / "run", device="cpu")
    stages = [{"name": "first"}, {"name": "second", "change": {"train": {"start_epoch": 1}}}]
    with pytest.raises(RecipeError, match=r"train\.start_epoch: 1 epochs count as done"):
        train({**ALONE, "stages": stages}, overrides=["train.epochs=2"], out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_teacher_of_another_size_leaves_nothing_behind(tmp_path: Path) -> None:
    teacher = train(ALONE, overrides=["train.epochs=1"], out=tmp_path / "teacher", device="cpu")
    with pytest.raises(GeneralistError, match=r"safetensors: the weights do not fit this architecture"):
        train(ALONE, overrides=["model.width=8", taught_by(teacher)], out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_stage_of_another_normalization_leaves_nothing_behind(tmp_path: Path) -> None:
    stages = [
        {"name": "first"},
        {"name": "second", "start": "first", "change": {"model": {"normalize": {"mean": [0.5], "std": [0.2]}}}},
    ]
    one = "model.normalize={mean: [0.1], std: [0.2]}"
    with pytest.raises(RecipeError, match=r"stages\.second\.change\.model\.normalize: it differs from that of first"):
        train({**ALONE, "stages": stages}, overrides=["train.epochs=1", one], out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


LATER = {"epochs": [2, 2], "values": [0, 0.5]}
"""The weight of a teacher that is heard from the third epoch on."""


@pytest.mark.parametrize(
    "objective", ["at", {"kind": "at-distil", "teacher": "#natural", "match": "logits", "weight": LATER}], ids=str
)
def test_until_the_first_redistribution_a_generalist_is_its_lead_learner(tmp_path: Path, objective: Any) -> None:
    """While gamma is 1 the others leave no trace: two stages, the lead learner alone and then all, end bit for bit in
    the same network."""
    at, natural = RECIPE["learners"]
    linf = {**at, "objective": objective}
    l2 = {**at, "name": "l2", "threat": "l2:0.5", "optimizer": {"lr": 0.05}}

    def learners(*own: dict[str, Any], until: float) -> list[dict[str, Any]]:
        return [{**learner, "schedule": {"epochs": [0, until], "values": [1, 1 - until / 8]}} for learner in own]

    mixing = {
        "decay": 0.9,
        "warmup": False,
        "gamma": {"epochs": [0, 2, 4], "values": [1, 1, 0.4]},
        "redistribution": {"every": 1, "start_epoch": 2},
    }
    whole = {**RECIPE, "mixing": mixing, "learners": learners(linf, natural, l2, until=4), "stages": []}
    whole["train"] = {**RECIPE["train"], "epochs": 4}
    alone = {
        "learners": learners(at, until=2),
        "mixing": {**mixing, "gamma": 1, "redistribution": {"every": 0}},
        "train": {"epochs": 2},
    }
    together = {"name": "together", "start": "alone#global", "change": {"train": {"start_epoch": 2}}}
    runs = [
        train(raw, out=tmp_path / name, device="cpu")
        for name, raw in (
            ("one-stage", whole),
            ("two-stages", {**whole, "stages": [{"name": "alone", "change": alone}, together]}),
        )
    ]
    branch = {**whole, "train": {**whole["train"], "start_epoch": 2}}
    runs.append(train(branch, out=tmp_path / "branch", start=f"{tmp_path / 'one-stage'}@2#global", device="cpu"))
    ends = [load_weights(run.last)[0] for run in runs]
    assert all(torch.equal(tensor, end[name]) for end in ends[1:] for name, tensor in ends[0].items())
    assert [len(run.read_metrics()) for run in runs] == [4, 2, 2]


def test_a_snapshot_that_has_lost_a_learner_is_refused(tmp_path: Path) -> None:
    run = train({**RECIPE, "stages": []}, overrides=["train.epochs=2"], out=tmp_path / "run", device="cpu")
    lost, names = run.snapshots / "2" / "natural.safetensors", ["linf", "natural", "of another recipe"]
    assert branch_files(str(run.path), names).keys() == {"global", "linf", "natural"}
    lost.unlink()
    for asked in (lambda: branch_files(str(run.path), names), lambda: artefact_file(f"{run.path}#natural", "global")):
        with pytest.raises(RunError, match=r"2/natural.safetensors is missing: put it back, or .*run@2#global"):
            asked()
    assert branch_files(f"{run.path}@2", ["linf"]).keys() == {"global", "linf"}
    with pytest.raises(RunError, match="keeps no learner 'natural'; choose best, last, global, linf"):
        weights_file(run.path, "natural")


def test_a_variant_with_more_learners_branches_off_one_with_fewer(tmp_path: Path) -> None:
    """Generalist-T from the epoch in which Generalist-D's learners meet, the natural one a teacher from the first epoch
    on: bit for bit what T gives in one run."""
    at, natural = RECIPE["learners"]
    linf = {**at, "objective": {"kind": "at-distil", "teacher": "#natural", "match": "logits"}}
    l2 = {**at, "name": "l2", "threat": "l2:0.5", "optimizer": {"lr": 0.05}}
    mixing = {
        "decay": 0.999,  # its warm-up, which is not over at the branch, goes on where it stood
        "gamma": {"fractions": [0, 0.5, 1], "values": [1, 1, 0.4]},
        "redistribution": {"every": 1, "start": 0.5},
    }
    d = {**RECIPE, "mixing": mixing, "learners": [linf, natural], "stages": []}
    d["train"] = {**RECIPE["train"], "epochs": 4}
    t = {**d, "learners": [linf, natural, l2]}
    whole = train(t, out=tmp_path / "t", device="cpu")
    source = train(d, out=tmp_path / "d", device="cpu")
    assert source.snapshot_epochs()[0] == 2, "kept without being asked for"
    branch = train(
        t, overrides=["train.start_epoch=2"], out=tmp_path / "branch", start=f"{source.path}@2#global", device="cpu"
    )
    ends = [load_weights(run.last)[0] for run in (whole, branch)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_a_path_may_have_a_number_sign(tmp_path: Path) -> None:
    run = train(RECIPE, overrides=["train.epochs=1"], out=tmp_path / "try#1" / "run", device="cpu")
    plain = {**RECIPE, "stages": []}
    shutil.copytree(run.path, tmp_path / "mine#linf")
    sources = {
        "all": f"{run.path}",
        "one": f"{run.path}#linf",
        "stage": f"{run.path}/stages/warm-up@2#natural",
        "moved": f"{tmp_path}/mine#linf",
    }
    branches = {
        name: train(plain, overrides=["train.epochs=1"], out=tmp_path / name, start=source, device="cpu")
        for name, source in sources.items()
    }
    ends = {name: next(iter(load_weights(branch.last)[0].values())) for name, branch in branches.items()}
    assert torch.equal(ends["moved"], ends["all"]), "a run of that name comes first"
    assert not torch.equal(ends["one"], ends["all"]) and not torch.equal(ends["one"], ends["stage"])


@pytest.mark.parametrize("subject", ["nobody", "", "../../last", "linf.average"])
def test_what_a_run_does_not_keep_is_no_source(tmp_path: Path, uninterrupted: RunDirectory, subject: str) -> None:
    with pytest.raises(RunError, match=r"keeps no|is not a run directory"):
        train({**RECIPE, "stages": []}, out=tmp_path / "run", start=f"{uninterrupted.path}#{subject}", device="cpu")
    assert not (tmp_path / "run").exists()


def test_all_learners_start_from_one_learner(tmp_path: Path, uninterrupted: RunDirectory) -> None:
    recipe = load_recipe({**RECIPE, "stages": []})
    trainer = make_trainer(recipe, tmp_path / "run", splits=load_splits(recipe.data))
    source = f"{uninterrupted.path}#natural"
    trainer.start_from(Plan(recipe, trainer.directory, source).source_files())
    wanted, _ = trainer.learners[0].flat.read(load_weights(artefact_file(source, "global"))[0])
    for vector in (*(learner.flat.vector for learner in trainer.learners), trainer.global_learner.vector):
        assert torch.equal(vector, wanted)
    assert trainer.global_learner.count == 0, "a learner's weights are no average: its warm-up begins anew"
