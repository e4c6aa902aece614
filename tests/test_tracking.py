"""Trackers: what they are told, what TensorBoard's file holds, and that one that fails never costs a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cli_helpers import run_main
from torch import Tensor

import generalist
from generalist.core.errors import GeneralistError, InterruptedRunError
from generalist.core.run import RunDirectory
from generalist.recipe import Recipe, load_recipe
from generalist.tracking import flat_numbers, flat_settings, grid, make_trackers
from generalist.training.artefacts import load_weights
from generalist.training.loop import Listener
from generalist.training.validation import Validator

RECIPE: dict[str, Any] = {
    "name": "tracked",
    "data": {"name": "digits", "augmentation": {"crop": 1, "flip": False}},
    "model": {"name": "small", "width": 2},
    "learners": [
        {"name": "linf", "objective": "at", "threat": "linf:0.1", "attack": {"steps": 1}, "optimizer": {"lr": 0.1}},
        {"name": "natural", "objective": "nt"},
    ],
    "train": {"epochs": 3, "batch_size": 256, "checkpoint_epochs": 1},
    "validation": {"images": 100, "steps": 1, "every": 1},
}


class Recorder:
    """A tracker of one's own that remembers; fails where it is told to."""

    name = "recorder"

    def __init__(self, fails_at: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails_at = fails_at

    def _note(self, what: str, value: Any) -> None:
        self.calls.append((what, value))
        if what == self.fails_at:
            raise ConnectionError("the network\nis down")

    def start(self, recipe: Recipe, run: RunDirectory, epochs_done: int) -> None:
        self._note("start", (recipe, run, epochs_done))

    def epoch(self, record: Mapping[str, Any]) -> None:
        self._note("epoch", dict(record))

    def images(self, epoch: int, images: Mapping[str, Tensor]) -> None:
        self._note("images", (epoch, dict(images)))

    def end(self, summary: Mapping[str, Any]) -> None:
        self._note("end", dict(summary))


def weights(run: RunDirectory) -> dict[str, Tensor]:
    return load_weights(run.last)[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run that nobody follows."""
    return generalist.train(RECIPE, out=tmp_path_factory.mktemp("plain") / "run", device="cpu")


# -- the interface ----------------------------------------------------------------------------------------------------


def test_a_tracker_is_told_everything_and_changes_nothing(tmp_path: Path, plain: RunDirectory) -> None:
    tracker = Recorder()
    run = generalist.train(RECIPE, out=tmp_path / "run", device="cpu", trackers=tracker)
    whats = [what for what, _ in tracker.calls]
    assert whats == ["start", "images", *["epoch", "images"] * 3, "end"]
    recipe, where, done = tracker.calls[0][1]
    assert recipe.name == "tracked" and where.path == run.path and done == 0
    assert [value for what, value in tracker.calls if what == "epoch"] == run.read_metrics()
    summary = tracker.calls[-1][1]
    assert summary["status"] == "finished" and summary["epoch"] == 3
    assert summary["accuracy"] == run.read_metrics()[-1]["validation"]["accuracy"]["global"]
    mine, theirs = weights(run), weights(plain)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_the_images_are_the_attacked_validation_images(tmp_path: Path) -> None:
    tracker = Recorder()
    generalist.train(RECIPE, out=tmp_path / "run", device="cpu", trackers=[tracker])
    (_, first), *later = [value for what, value in tracker.calls if what == "images"]
    assert first["training images"].shape == (16, 1, 8, 8)
    epoch, shown = later[-1]
    assert epoch == 3 and list(shown) == ["validation images", "attacked, linf:0.1"]
    distance = (shown["attacked, linf:0.1"] - shown["validation images"]).abs().amax((1, 2, 3))
    assert (distance > 0.01).all() and (distance <= 0.1 + 1e-6).all()


@pytest.mark.parametrize("what", ["start", "images", "epoch", "end"])
def test_a_tracker_that_fails_costs_one_warning_and_not_the_run(what: str, tmp_path: Path, plain: RunDirectory) -> None:
    said: list[str] = []
    broken, other = Recorder(fails_at=what), Recorder()
    run = generalist.train(
        RECIPE, out=tmp_path / "run", device="cpu", trackers=[broken, other], listener=Listener(say=said.append)
    )
    warnings = [text for text in said if text.startswith("warning")]
    assert len(warnings) == 1 and "ConnectionError: the network is down" in warnings[0] and "\n" not in warnings[0]
    assert broken.calls[-1][0] == what and [w for w, _ in broken.calls].count(what) == 1
    assert other.calls[-1][0] == "end"
    assert len(run.read_metrics()) == 3
    mine, theirs = weights(run), weights(plain)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_images_that_cannot_be_made_cost_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("too little")

    monkeypatch.setattr(Validator, "examples", fail)
    said: list[str] = []
    tracker = Recorder()
    generalist.train(RECIPE, out=tmp_path / "run", device="cpu", trackers=[tracker], listener=Listener(say=said.append))
    assert [what for what, _ in tracker.calls] == ["start", "images", "epoch", "epoch", "epoch", "end"]
    assert sum("no images are shown" in text for text in said) == 1


class Stopping(Recorder):
    """Sends itself Ctrl-C after the first epoch, as a user would."""

    def epoch(self, record: Mapping[str, Any]) -> None:
        super().epoch(record)
        if record["epoch"] == 1:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)


def test_a_stopped_run_says_so_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    first, second = Stopping(), Recorder()
    with pytest.raises(InterruptedRunError):
        generalist.train(RECIPE, out=tmp_path / "run", device="cpu", trackers=[first])
    assert first.calls[-1] == ("end", first.calls[-1][1]) and first.calls[-1][1]["status"] == "stopped"
    generalist.train(tmp_path / "run", resume=True, device="cpu", trackers=[second])
    assert second.calls[0][1][2] == 1
    assert [value["epoch"] for what, value in second.calls if what == "epoch"] == [2, 3]


def test_stages_are_tracked_one_by_one(tmp_path: Path) -> None:
    stages = [{"name": "one", "change": {"train": {"epochs": 1}}}, {"name": "two", "start": "one"}]
    tracker = Recorder()
    generalist.train(RECIPE | {"stages": stages}, out=tmp_path / "run", device="cpu", trackers=[tracker])
    starts = [value for what, value in tracker.calls if what == "start"]
    assert [run.path.relative_to(tmp_path) for _, run, _ in starts] == [Path("run/stages/one"), Path("run")]
    assert [value["epoch"] for what, value in tracker.calls if what == "end"] == [1, 3]


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("tensorbord", "", "did you mean 'tensorboard'"),
        ("tensorboard", "tensorboard", r"generalist-at[tensorboard]"),
        ("wandb", "wandb", "pip install wandb"),
        ("mlflow", "mlflow", "pip install mlflow"),
    ],
)
def test_a_tracker_that_cannot_be_had_stops_before_anything_runs(
    name: str,
    missing: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    out = tmp_path / "run"
    code, _, err = run_main(["train", "digits-d", "--out", str(out), "--track", name], monkeypatch, capsys)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not out.exists()


def test_an_object_that_is_no_tracker_is_refused() -> None:
    with pytest.raises(GeneralistError, match="start, epoch, images and end, not int"):
        make_trackers([3])  # type: ignore[list-item]
    assert len(make_trackers([Recorder(), Recorder()])) == 2


def test_numbers_settings_and_grids() -> None:
    record = {"a": {"b": 1, "c": float("nan"), "d": None, "e": True, "f": "x"}, "g": 0.5}
    assert flat_numbers(record) == {"a/b": 1.0, "g": 0.5}
    settings = flat_settings({"learners": [{"name": "x", "lr": None}], "values": [1, 2], "on": True})
    assert settings == {"learners.0.name": "x", "values": "[1, 2]", "on": True}
    picture = grid(torch.ones(10, 3, 4, 4), columns=8)
    assert picture.shape == (3, 12, 48) and picture.dtype == torch.uint8
    assert int((picture == 255).sum()) == 10 * 3 * 16
    assert grid(torch.ones(1, 5, 4, 4)).shape == (1, 6, 6)


# -- TensorBoard ------------------------------------------------------------------------------------------------------


def events(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance=dict.fromkeys(("scalars", "images", "tensors"), 0))
    found.Reload()
    return found


def test_tensorboard_holds_scalars_images_and_hyper_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    recipe = tmp_path / "tracked.yaml"
    recipe.write_text(json.dumps(RECIPE))
    args = ["train", str(recipe), "--out", str(out), "--device", "cpu", "--track", "tensorboard"]
    code, _, err = run_main(args, monkeypatch, capsys)
    assert code == 0, err
    found = events(out / "tensorboard")
    metrics = RunDirectory(out).read_metrics()
    natural = found.Scalars("validation/accuracy/global/natural")
    assert [event.step for event in natural] == [1, 2, 3]
    expected = [record["validation"]["accuracy"]["global"]["natural"] for record in metrics]
    assert [event.value for event in natural] == pytest.approx(expected)
    assert {"lr/linf", "gamma/natural", "images_per_second"} <= set(found.Tags()["scalars"])
    assert set(found.Tags()["images"]) == {"training images", "validation images", "attacked, linf:0.1"}
    picture = found.Images("attacked, linf:0.1")[-1]
    assert (picture.step, picture.height, picture.width) == (3, 20, 80)
    assert "recipe/text_summary" in found.Tags()["tensors"]
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["train.epochs"].number_value == 3
    assert hparams["learners.0.threat.norm"].string_value == "linf"


def test_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    """Epoch 2 was written, but the last checkpoint is of epoch 1: epoch 2 comes again."""
    pytest.importorskip("tensorboard")
    recipe = load_recipe(RECIPE)
    for done, epochs in ((0, [1, 2]), (1, [2, 3])):
        (tracker,) = make_trackers("tensorboard")
        tracker.start(recipe, RunDirectory(tmp_path), done)
        for epoch in epochs:
            tracker.epoch({"epoch": epoch, "value": 10 * done + epoch})
        tracker.end({"status": "finished"})
    found = events(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in found.Scalars("value")] == [(1, 1), (2, 12), (3, 13)]


# -- services, with modules that only write down what they are told ---------------------------------------------------


def test_weights_and_biases_is_told_and_a_resumed_run_is_the_same_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {"log": [], "init": [], "finish": []}

    def init(**arguments: Any) -> Any:
        told["init"].append(arguments)
        log = lambda values, step: told["log"].append((step, values))  # noqa: E731
        finish = lambda exit_code: told["finish"].append(exit_code)  # noqa: E731
        return SimpleNamespace(id=arguments["id"] or "abc123", log=log, finish=finish, summary={})

    fake = ModuleType("wandb")
    fake.init, fake.Image = init, lambda picture: ("image", picture.shape, picture.dtype)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with pytest.raises(InterruptedRunError):
        generalist.train(RECIPE, out=tmp_path / "run", device="cpu", trackers=["wandb", Stopping()])
    generalist.train(tmp_path / "run", resume=True, device="cpu", trackers=["wandb"])
    first, second = told["init"]
    assert first["project"] == "generalist" and first["id"] is None and first["config"]["train"]["epochs"] == 3
    assert second["id"] == "abc123" and second["resume"] == "allow"
    assert told["finish"] == [1, 0]
    numbers = [(step, values) for step, values in told["log"] if "lr/linf" in values]
    assert [step for step, _ in numbers] == [1, 2, 3]
    pictures = [values["attacked, linf:0.1"] for _, values in told["log"] if "attacked, linf:0.1" in values]
    assert len(pictures) == 3 and pictures[0][1] == (20, 80, 1)


class FakeMlflowClient:
    """As much of MLflow's client as is used."""

    def __init__(self) -> None:
        self.told: dict[str, list[Any]] = {"batch": [], "image": [], "text": [], "status": []}

    def get_experiment_by_name(self, name: str) -> None:
        assert name == "generalist"

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        assert (experiment_id, run_name) == ("7", "run")
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def update_run(self, run_id: str, status: str) -> None:
        self.told["status"].append((run_id, status))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert run_id == "r1" and len(params) <= 100
        self.told["batch"].append((list(metrics), list(params)))

    def log_text(self, run_id: str, text: str, file: str) -> None:
        self.told["text"].append(file)

    def log_image(self, run_id: str, picture: Any, file: str) -> None:
        self.told["image"].append((file, picture.shape))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.told["status"].append((run_id, status))


def test_mlflow_is_told_and_a_resumed_run_is_the_same_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeMlflowClient()
    fake = ModuleType("mlflow")
    fake.MlflowClient = lambda: client  # type: ignore[attr-defined]
    fake.entities = SimpleNamespace(Param=lambda *a: a, Metric=lambda *a: a)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    with pytest.raises(InterruptedRunError):
        generalist.train(RECIPE, out=tmp_path / "run", device="cpu", trackers=["mlflow", Stopping()])
    generalist.train(tmp_path / "run", resume=True, device="cpu", trackers=["mlflow"])
    assert client.told["status"] == [("r1", "KILLED"), ("r1", "RUNNING"), ("r1", "FINISHED")]
    assert client.told["text"] == ["recipe.yaml"]
    params = dict(param for _, params in client.told["batch"] for param in params)
    assert params["learners.0.threat.norm"] == "linf" and params["train.epochs"] == "3"
    steps = [metrics[0][3] for metrics, _ in client.told["batch"] if metrics]
    assert steps == [1, 2, 3]
    names = {metric[0] for metrics, _ in client.told["batch"] for metric in metrics}
    assert "validation/accuracy/global/linf_0.1" in names
    assert ("images/epoch-0003-attacked-linf-0.1.png", (20, 80, 1)) in client.told["image"]


@pytest.mark.parametrize("text", ["{", "[]", '{"wandb": "../../etc"}', '{"wandb": 3}'])
def test_damaged_ids_begin_a_new_entry(text: str, tmp_path: Path) -> None:
    from generalist.tracking.services import known_ids, remember

    run = RunDirectory(tmp_path)
    (tmp_path / "tracking.json").write_text(text)
    assert known_ids(run) == {}
    remember(run, "mlflow", "r1")
    assert known_ids(run) == {"mlflow": "r1"}
