"""What could go wrong around a run: other data, other processes, hostile values, randomness that is not ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import run_main
from torch import Tensor, nn
from training_helpers import NATURAL, ROBUST, make_trainer, tiny_images, tiny_recipe, tiny_splits, train

from generalist import api
from generalist import stages as stages_module
from generalist.console import show_run
from generalist.core.errors import InterruptedRunError, RunError
from generalist.core.files import sha256
from generalist.core.run import RunDirectory
from generalist.data.options import Splits
from generalist.models.registry import MODELS
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, Objective, Progress
from generalist.recipe import Recipe, to_yaml
from generalist.training import checkpoint as checkpoints
from generalist.training.artefacts import branch_files, load_weights, save_weights
from generalist.training.global_learner import _lerp_shares
from generalist.training.loop import Listener

IMAGES, LABELS = tiny_images().images.numpy(), tiny_images().labels.numpy()


def quick(**changes: Any) -> Recipe:
    return tiny_recipe(**changes)


def api_train(recipe: Recipe, out: Path, **options: Any) -> RunDirectory:
    data = options.pop("data", {"train": (IMAGES, LABELS)})
    return api.train(recipe, out=out, data=data, device="cpu", **options)


def stop_at(step: int) -> Listener:
    def stop(done: int, total: int) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return Listener(iteration=stop)


def test_a_run_goes_on_with_its_own_data_only(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        api_train(quick(), out, listener=stop_at(4))
    before = (out / "environment.json").read_bytes()
    other = {"train": (255 - IMAGES, LABELS)}
    with pytest.raises(RunError, match="other images"):
        api_train(quick(), out, resume=True, data=other)
    assert (out / "environment.json").read_bytes() == before
    first = json.loads(before)["data"]
    api_train(quick(), out, resume=True)
    environment = json.loads((out / "environment.json").read_text())
    assert environment["data"] == first
    assert len(environment["resumed"]) == 1


def test_a_run_that_appears_meanwhile_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    foreign = api_train(quick(train={"seed": 9}), tmp_path / "foreign")

    def lock_late(self: RunDirectory, original: Any = RunDirectory.lock) -> Any:
        if not out.exists():
            foreign.path.rename(out)
        return original(self)

    monkeypatch.setattr(RunDirectory, "lock", lock_late)
    with pytest.raises(RunError, match="exists already"):
        api_train(quick(), out)
    assert "seed: 9" in (out / "recipe.yaml").read_text()


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock"])
def test_a_run_whose_files_are_links_changes_no_other_file(tmp_path: Path, name: str) -> None:
    out, precious = tmp_path / "run", tmp_path / "precious"
    with pytest.raises(InterruptedRunError):
        api_train(quick(), out, listener=stop_at(4))
    precious.write_text("not a run's")
    (out / name).unlink()
    (out / name).symlink_to(precious)
    with pytest.raises(RunError, match="is a link"):
        api_train(quick(), out, resume=True)
    assert precious.read_text() == "not a run's"


class DropoutNet(nn.Module):
    """Draws from torch's own generator in every training step."""

    def __init__(self, *, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16 * in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(nn.functional.dropout(x.flatten(1), 0.5, self.training))
        return logits


def test_dropout_is_a_function_of_seed_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS._things, "dropout", DropoutNet)
    recipe = quick(model={"name": "dropout"})
    state = torch.get_rng_state()
    first = train(recipe, tmp_path / "first")
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is given back"
    torch.manual_seed(12345)
    stopped = make_trainer(recipe, tmp_path / "second", listener=stop_at(5))
    with pytest.raises(InterruptedRunError):
        stopped.run()
    torch.rand(7)
    second = make_trainer(recipe, tmp_path / "second")
    assert second.resume()
    second.run()
    assert torch.equal(first.global_learner.vector, second.global_learner.vector)
    other = train(quick(model={"name": "dropout"}, train={"seed": 4}), tmp_path / "other")
    assert not torch.equal(first.learners[1].flat.vector, other.learners[1].flat.vector)


class Unmeasured(Objective):
    """Reports a metric that cannot be measured."""

    adversarial = False

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        loss = self.learner.cross_entropy(self.learner.forward(inputs.batch.x), inputs.batch.y)
        return loss, {"empty": torch.tensor(float("nan"))}


def test_a_metric_that_is_nan_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES._things, "unmeasured", Unmeasured)
    trainer = train(quick(learners=[{**NATURAL, "objective": "unmeasured"}]), tmp_path)
    records = trainer.directory.read_metrics()
    assert [record["train"]["natural"]["empty"] for record in records] == [None] * 4


def test_a_new_best_model_has_a_checkpoint(tmp_path: Path) -> None:
    trainer = train(quick(train={"checkpoint_epochs": 100, "epochs": 4}, validation={"every": 1}), tmp_path)
    found = checkpoints.load_newest(trainer.directory, warn=print)
    assert found is not None
    best = found.values["best"]["epoch"]
    assert load_weights(trainer.directory.model)[1]["epoch"] == best
    # Nothing but new bests and the last epoch asked for checkpoints; both are kept.
    steps = sorted(int(p.stem.split("-")[1]) for p in trainer.directory.checkpoints.glob("*.pt"))
    assert steps[-1] == 12 and len(steps) <= 2


def test_where_the_last_is_the_best_checkpoints_come_as_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each validated epoch is the best there: a checkpoint for every one of them would be one too many."""
    saved: list[int] = []
    save = checkpoints.save
    monkeypatch.setattr(checkpoints, "save", lambda *args, step: (saved.append(step), save(*args, step=step)))
    changes = {"train": {"checkpoint_epochs": 3, "epochs": 4}, "validation": {"every": 1, "rule": "last"}}
    trainer = train(quick(**changes), tmp_path)
    assert saved == [9, 12]
    assert load_weights(trainer.directory.model)[1]["epoch"] == 4


def test_a_leak_is_remembered_by_grandchildren(tmp_path: Path) -> None:
    names = ["robust", "natural"]
    runs = {}
    for child, parent, seed in (("a", None, 3), ("b", "a", 4), ("c", "b", 4)):
        trainer = make_trainer(quick(train={"seed": seed}), tmp_path / child)
        trainer.directory.recipe.write_text(to_yaml(quick()))
        if parent:
            trainer.start_from(branch_files(str(tmp_path / parent), names))
        trainer.run()
        runs[child] = trainer
    assert runs["a"].warnings == []
    assert runs["b"].warnings and runs["c"].warnings, "c holds out what a was trained on"


@pytest.mark.parametrize(
    "change",
    [
        {"best": {"x": 1}},
        {"regret": {"ghost": [0.5]}},
        {"regret": {"robust": []}},
        {"step": 10**6},
        {"step": -1},
        {"metrics_bytes": -5},
        {"warnings": "text"},
        {"unseen": ["x"]},
        {"data": 3},
    ],
    ids=lambda change: str(next(iter(change.items()))),
)
def test_values_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    trainer = train(quick(), tmp_path)
    path = sorted(trainer.directory.checkpoints.glob("*.pt"))[-1]
    content = torch.load(path, weights_only=True)
    content["values"] = json.dumps({**json.loads(content["values"]), **change})
    _rewrite(path, content)
    with pytest.raises(RunError):
        make_trainer(quick(), tmp_path).resume()


@pytest.mark.parametrize(("name", "value"), [("nobody.loss", torch.zeros(2)), ("robust.loss", torch.zeros(3))])
def test_sums_that_cannot_be_are_refused(tmp_path: Path, name: str, value: Tensor) -> None:
    trainer = train(quick(), tmp_path)
    path = sorted(trainer.directory.checkpoints.glob("*.pt"))[-1]
    content = torch.load(path, weights_only=True)
    content["tensors"][f"sums.{name}"] = value
    _rewrite(path, content)
    with pytest.raises(RunError, match="no sum"):
        make_trainer(quick(), tmp_path).resume()


def _rewrite(path: Path, content: dict[str, Any]) -> None:
    torch.save(content, path)
    path.with_suffix(".sha256").write_text(sha256(path))


def test_a_branch_that_lost_its_first_checkpoint_resumes_from_its_source(tmp_path: Path) -> None:
    source = api_train(quick(), tmp_path / "source")
    whole = api_train(quick(), tmp_path / "whole", start=str(source.path))
    assert json.loads(whole.environment.read_text())["from"] == str(source.path)
    with pytest.raises(InterruptedRunError):
        api_train(quick(), tmp_path / "broken", start=str(source.path), listener=stop_at(2))
    for path in (tmp_path / "broken" / "checkpoints").iterdir():
        path.unlink()
    (tmp_path / "broken" / "checkpoints").rmdir()  # as if the disk had been full when the first one was written
    broken = api_train(quick(), tmp_path / "broken", resume=True)
    assert sha256(broken.last) == sha256(whole.last)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def killed_at(step: int) -> Listener:
    """Leaves no checkpoint, as `kill -9` would."""

    def kill(done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return Listener(iteration=kill)


@pytest.mark.parametrize("stopped", [4, None])
def test_a_run_whose_checkpoints_were_removed_does_not_begin_anew(
    tmp_path: Path, stopped: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It did, over its own metrics.jsonl and best model, and without a word."""
    out, small = tmp_path / "run", {"name": "small", "width": 2}
    recipe = quick(learners=[NATURAL], data={"name": "digits"}, model=small, train={"epochs": 2, "batch_size": 400})
    with pytest.raises(InterruptedRunError) if stopped else nullcontext():
        api.train(recipe, out=out, device="cpu", listener=stop_at(stopped) if stopped else None)
    shutil.rmtree(out / "checkpoints")
    before = contents(out)
    assert {"metrics.jsonl", "model.safetensors"} <= before.keys()
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    for named in ([str(tmp_path / "recipe.yaml"), "--out", str(out)], [str(out)]):
        code, _, err = run_main(["train", *named, "--resume", "--device", "cpu"], monkeypatch, capsys)
        assert code == 2 and err.startswith(f"error: {out} has no checkpoint to continue from") and err.count("\n") == 1
        assert "restore its checkpoints, or train again with another --out" in err
    assert contents(out) == before


@pytest.mark.parametrize("lost", ["run", "run/stages/one"])
def test_a_stage_whose_checkpoints_were_removed_does_not_begin_anew(tmp_path: Path, lost: str) -> None:
    """Nor does another stage go on before that is found out."""
    recipe = tiny_recipe([NATURAL], stages=[{"name": "one", "change": {"train": {"epochs": 1}}}, {"name": "two"}])
    api_train(recipe, tmp_path / "run")
    shutil.rmtree(tmp_path / lost / "checkpoints")
    before = contents(tmp_path)
    with pytest.raises(RunError, match=f"{lost} has no checkpoint to continue from"):
        api_train(recipe, tmp_path / "run", resume=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("step", [2, 5])
def test_a_run_that_was_killed_before_its_first_due_checkpoint_resumes(tmp_path: Path, step: int) -> None:
    """In its first epoch, and in its second, when an epoch was logged."""
    recipe = quick(train={"checkpoint_epochs": 100}, validation={"every": 4})
    with pytest.raises(KeyboardInterrupt):
        api_train(recipe, tmp_path / "killed", listener=killed_at(step))
    assert len(RunDirectory(tmp_path / "killed").read_metrics()) == (step > 3)
    resumed = api_train(recipe, tmp_path / "killed", resume=True)
    assert sha256(resumed.last) == sha256(api_train(recipe, tmp_path / "whole").last)
    assert [record["epoch"] for record in resumed.read_metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize("stages", [[], [{"name": "one", "change": {"train": {"epochs": 1}}}, {"name": "two"}]])
def test_a_run_that_was_killed_before_its_recipe_was_written_can_be_started(
    tmp_path: Path, stages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder was neither a new one nor a run. What the start before has noted is forgotten with it."""
    out = tmp_path / "run"
    recipe, source = tiny_recipe([NATURAL], stages=stages), api_train(quick(learners=[NATURAL]), tmp_path / "source")

    def killed(path: Path, text: str, original: Any = stages_module.write_text) -> None:
        if path == out / "recipe.yaml":
            raise KeyboardInterrupt
        original(path, text)

    monkeypatch.setattr(stages_module, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        api_train(recipe, out, start=str(source.path))
    monkeypatch.undo()
    (out / ".recipe.yaml.77.tmp").write_text("half")
    first = RunDirectory(out).stage("one") if stages else RunDirectory(out)
    assert json.loads(first.environment.read_text())["from"] == str(source.path)
    run = api_train(recipe, out)
    environment = json.loads(first.environment.read_text())
    assert environment["from"] is None and "resumed" not in environment
    assert sha256(run.last) == sha256(api_train(recipe, tmp_path / "whole").last)


@pytest.mark.parametrize(("name", "text"), [("environment.json", "{}"), ("notes.txt", "mine"), ("a/b", "mine")])
def test_a_folder_with_files_of_somebody_else_is_no_new_run(tmp_path: Path, name: str, text: str) -> None:
    out = tmp_path / "run"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text(text)
    with pytest.raises(RunError, match="exists already; it is not a run: choose another --out"):
        api_train(quick(), out)
    assert contents(out) == {name: text.encode()}


@pytest.mark.parametrize("cut", [1, 40])
def test_a_log_that_a_power_cut_has_torn_is_gone_on_with(tmp_path: Path, cut: int) -> None:
    """Its half line was kept, the next one written behind it, and the run could not be read any more."""
    recipe = quick(train={"checkpoint_epochs": 1})
    with pytest.raises(InterruptedRunError):
        api_train(recipe, tmp_path / "torn", listener=stop_at(7))  # three iterations an epoch
    metrics = RunDirectory(tmp_path / "torn").metrics
    whole = metrics.read_bytes()
    metrics.write_bytes(whole[:-cut])
    resumed = api_train(recipe, tmp_path / "torn", resume=True)
    assert [record["epoch"] for record in resumed.read_metrics()] == [1, 3, 4]
    assert sha256(resumed.last) == sha256(api_train(recipe, tmp_path / "whole").last)


@pytest.mark.parametrize("name", ["stages/one/recipe.yaml", ".lock"])
def test_a_folder_with_a_file_of_a_run_s_name_is_no_new_run(tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("precious")
    recipe = tiny_recipe([NATURAL], stages=[{"name": "one", "change": {"train": {"epochs": 1}}}, {"name": "two"}])
    with pytest.raises(RunError, match="exists already; it is not a run: choose another --out"):
        api_train(recipe, out)
    assert contents(out) == {name: b"precious"}


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999"])
def test_an_environment_without_numbers_is_damaged(tmp_path: Path, text: str) -> None:
    recipe = quick()
    with pytest.raises(InterruptedRunError):
        api_train(recipe, tmp_path / "run", listener=stop_at(4))
    environment = tmp_path / "run" / "environment.json"
    environment.write_text(environment.read_text().replace("{", f'{{"x": {text},', 1))
    with pytest.raises(RunError, match=r"environment\.json is damaged: .* is no number"):
        api_train(recipe, tmp_path / "run", resume=True)


def test_a_checkpoint_with_numbers_that_are_none_is_refused(tmp_path: Path) -> None:
    recipe = quick(train={"checkpoint_epochs": 1})
    with pytest.raises(InterruptedRunError):
        api_train(recipe, tmp_path / "run", listener=stop_at(4))
    run = RunDirectory(tmp_path / "run")
    found = checkpoints.load_newest(run, warn=print)
    assert found is not None
    found.tensors["live.global.count"].fill_(float("nan"))
    checkpoints.save(run, found, step=99)
    with pytest.raises(RunError, match=r"the checkpoint is damaged: 'global\.count' is not finite"):
        api_train(recipe, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "spoiled",
    [{"validation": {}}, {"validation": 1}, {"validation": {"accuracy": {"global": 3}}}, {"best_epoch": "x"}],
    ids=str,
)
def test_a_record_without_a_whole_validation_is_told(tmp_path: Path, spoiled: dict[str, Any]) -> None:
    run = api_train(quick(train={"epochs": 1}, validation={"every": 1}), tmp_path / "run")
    show_run(run)
    run.metrics.write_text(json.dumps(run.read_metrics()[-1] | spoiled) + "\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged: epoch 1 has no whole validation"):
        show_run(run)


def test_images_a_second_are_of_images_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    recipe = quick(train={"epochs": 1, "batch_size": 10**6, "last_batch": "keep"}, validation={"every": 1})
    trainer = make_trainer(recipe, tmp_path)
    end = trainer._end_epoch

    def count(epoch: int, *, images: int, seconds: float) -> None:
        counted.append(images)
        end(epoch, images=images, seconds=seconds)

    monkeypatch.setattr(trainer, "_end_epoch", count)
    trainer.run()
    assert counted == [18]


def test_a_signal_at_the_end_of_a_stage_stops_before_the_next(tmp_path: Path) -> None:
    stages = [{"name": "one", "change": {"train": {"epochs": 1}}}, {"name": "two"}]
    recipe = tiny_recipe([NATURAL], stages=stages)
    with pytest.raises(InterruptedRunError, match="'one'"):
        api_train(recipe, tmp_path / "run", listener=stop_at(3))
    assert not (tmp_path / "run" / "checkpoints").exists()
    resumed = api_train(recipe, tmp_path / "run", resume=True)
    assert sha256(resumed.last) == sha256(api_train(recipe, tmp_path / "whole").last)


def test_constants_stay_as_they_are_in_the_global_learner(tmp_path: Path) -> None:
    normalize = {"mean": [0.1234567], "std": [0.7654321]}
    recipe = quick(model={"name": "tiny", "normalize": normalize}, train={"precision": "fp32", "epochs": 20})
    trainer = train(recipe, tmp_path)
    state = trainer.learners[0].flat.state_dict(trainer.global_learner.vector)
    assert state["mean"].item() == np.float32(0.1234567)
    assert state["std"].item() == np.float32(0.7654321)


@pytest.mark.parametrize("weights", [[0.0, 0.0, 1.0], [1.0, 0.0], [0.2, 0.3, 0.1], [0.0], [0.001, 0.0]])
def test_lerps_give_the_weighted_sum(weights: list[float]) -> None:
    start, sources = 0.7, [float(a + 1) for a in range(len(weights))]
    value = torch.tensor(start, dtype=torch.float64)
    for share, source in zip(_lerp_shares(torch.tensor(weights, dtype=torch.float64)), sources, strict=True):
        value = value + share * (source - value)
    expected = (1 - sum(weights)) * start + sum(w * s for w, s in zip(weights, sources, strict=True))
    assert float(value) == pytest.approx(expected, abs=1e-12)


def test_half_precision_keeps_what_it_cannot_hold(tmp_path: Path) -> None:
    state = {"large": torch.tensor([1e6, 1.0]), "small": torch.tensor([1.0, 2.0]), "count": torch.tensor(3)}
    save_weights(tmp_path / "w.safetensors", state, {}, half=True)
    loaded, _ = load_weights(tmp_path / "w.safetensors")
    assert loaded["large"].dtype == torch.float32 and torch.equal(loaded["large"], state["large"])
    assert loaded["small"].dtype == torch.float16 and loaded["count"].item() == 3


def test_a_run_with_an_at_sign_in_its_name(tmp_path: Path) -> None:
    run = api_train(quick(learners=[ROBUST, NATURAL]), tmp_path / "x@3")
    assert "natural" in branch_files(str(run.path), ["natural"])
    assert branch_files(f"{run.path}@4", ["natural"])["natural"].parent.name == "4"


def test_streamed_splits_are_not_copied_to_the_device_twice(tmp_path: Path) -> None:
    trainer = make_trainer(quick(), tmp_path, splits=Splits(tiny_images(), None))
    assert trainer.validator.images is trainer.train_images
    on_test = make_trainer(quick(validation={"split": "test"}), tmp_path / "t", splits=tiny_splits())
    assert on_test.validator.images is not on_test.train_images
