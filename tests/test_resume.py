"""Interruption, damage and branching: a run that goes on is the run that was never stopped."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import random as python_random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from training_helpers import NATURAL, ROBUST, make_trainer, stop_after, tiny_images, tiny_recipe, tiny_splits, train

import generalist
from generalist.core.errors import GeneralistError, InterruptedRunError, RecipeError, RunError
from generalist.core.files import sha256
from generalist.core.run import RunDirectory
from generalist.recipe import Recipe, to_yaml
from generalist.training import checkpoint as checkpoints
from generalist.training.artefacts import branch_files, load_weights
from generalist.training.loop import Listener, Trainer

AVERAGING = {"decay": 0.9}
FAST = {"epochs": 4, "batch_size": 6, "seed": 3, "precision": "fp32"}
STEPS = 12


def plain() -> Recipe:
    return tiny_recipe(
        [ROBUST, {**NATURAL, "optimizer": {"kind": "adam", "lr": 0.01}}],
        mixing={"redistribution": {"every": 2, "start_epoch": 2}},
        train=FAST,
    )


def averaged() -> Recipe:
    return tiny_recipe(
        [{**ROBUST, "averaging": AVERAGING}, {**NATURAL, "averaging": AVERAGING}],
        mixing={"source": "averaged", "redistribution": {"every": 1, "start_epoch": 2}},
        train={**FAST, "last_batch": "fill", "checkpoint_epochs": 3},
    )


def published() -> Recipe:
    # Nothing is held out in this style: batches of 8 make three iterations an epoch, as elsewhere.
    return tiny_recipe(
        style="published-code",
        mixing={"redistribution": {"every": 2, "start_epoch": 2}},
        train={**FAST, "batch_size": 8},
        validation={"every": 2, "images": 9},
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"plain": plain, "averaged": averaged, "published": published}


def metrics_of(path: Path) -> list[dict[str, Any]]:
    records = RunDirectory(path).read_metrics()
    return [{key: value for key, value in record.items() if key != "images_per_second"} for record in records]


def assert_same_run(one: Trainer, other: Trainer) -> None:
    mine, theirs = one.live_tensors(), other.live_tensors()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    assert metrics_of(one.directory.path) == metrics_of(other.directory.path)
    for file in ("model.safetensors", "last.safetensors"):
        assert sha256(one.directory.path / file) == sha256(other.directory.path / file)
    assert one.directory.snapshot_epochs() == other.directory.snapshot_epochs()


def signal_at(steps: set[int], number: int = signal.SIGTERM) -> Listener:
    """A listener that sends this process a signal after each of the given steps."""

    def iteration(done: int, total: int) -> None:
        if done in steps:
            steps.remove(done)
            os.kill(os.getpid(), number)

    return Listener(iteration=iteration)


def run_interrupted(recipe: Recipe, path: Path, steps: set[int]) -> Trainer:
    """Run to the end, through as many interruptions as `steps` says."""
    remaining = set(steps)
    for _ in range(len(steps) + 1):
        trainer = make_trainer(recipe, path, listener=signal_at(remaining))
        trainer.resume()
        try:
            trainer.run()
        except InterruptedRunError:
            continue
        assert not remaining
        return trainer
    raise AssertionError("the run never came to its end")


@pytest.mark.parametrize("kind", RECIPES)
def test_interrupted_once_at_any_step_equals_uninterrupted(tmp_path: Path, kind: str) -> None:
    recipe = RECIPES[kind]()
    whole = train(recipe, tmp_path / "whole")
    for step in range(1, STEPS + 1):
        broken = run_interrupted(recipe, tmp_path / f"broken-{step}", {step})
        assert_same_run(broken, whole)


@pytest.mark.parametrize("kind", RECIPES)
def test_interrupted_many_times_equals_uninterrupted(tmp_path: Path, kind: str) -> None:
    recipe = RECIPES[kind]()
    whole = train(recipe, tmp_path / "whole")
    chance = python_random.Random(0)
    for attempt in range(3):
        steps = set(chance.sample(range(1, STEPS + 1), 7))
        assert_same_run(run_interrupted(recipe, tmp_path / f"broken-{attempt}", steps), whole)


def test_an_interruption_says_where_and_how_to_go_on(tmp_path: Path) -> None:
    trainer = make_trainer(plain(), tmp_path, listener=signal_at({4}, signal.SIGINT))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(InterruptedRunError, match=r"epoch 2 at step 4.*--resume") as caught:
        trainer.run()
    assert caught.value.exit_code == 128 + signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is handler, "the caller's signal handler is back"
    assert (tmp_path / "checkpoints" / "step-000000004.pt").is_file()


def test_resume_of_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    whole = train(plain(), tmp_path)
    before = {name: tensor.clone() for name, tensor in whole.live_tensors().items()}
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    again = make_trainer(plain(), tmp_path)
    assert again.resume()
    again.run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.live_tensors().items())
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("name", ["metrics.jsonl", "model.safetensors", "last.safetensors", "snapshots/2"])
def test_without_a_checkpoint_resume_starts_anew_unless_something_would_be_lost(tmp_path: Path, name: str) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert not make_trainer(plain(), tmp_path).resume()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).mkdir() if name.startswith("snapshots") else (tmp_path / name).write_text("precious")
    with pytest.raises(RunError, match=f"no checkpoint to continue from.*replace its {name.split('/')[0]}"):
        make_trainer(plain(), tmp_path).resume()


def test_killed_at_a_random_moment_equals_uninterrupted(tmp_path: Path) -> None:
    recipe = tiny_recipe(mixing={"redistribution": {"every": 2, "start_epoch": 2}}, train={**FAST, "epochs": 120})
    recipe = recipe.model_copy(update={"validation": recipe.validation.model_copy(update={"every": 10})})
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    helper = Path(__file__).with_name("training_helpers.py")
    killed = tmp_path / "killed"
    after = python_random.Random().uniform(0.001, 0.3)
    command = [sys.executable, str(helper), str(tmp_path / "recipe.json"), str(killed), str(after)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == -signal.SIGVTALRM, "the run was too short to be killed"
    trainer = make_trainer(recipe, killed)
    assert trainer.resume()
    assert 0 < trainer.step < 120 * trainer.steps_per_epoch
    trainer.run()
    assert_same_run(trainer, train(recipe, tmp_path / "whole"))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def stopped(path: Path, step: int = 8, recipe: Recipe | None = None) -> list[Path]:
    """A run that was stopped, and its checkpoints, newest first."""
    with pytest.raises(InterruptedRunError):
        make_trainer(recipe or plain(), path, listener=signal_at({step})).run()
    found = sorted(path.glob("checkpoints/step-*.pt"), reverse=True)
    assert [file.name for file in found] == [f"step-{step:09d}.pt", "step-000000006.pt"]
    return found


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "no checksum", "wrong checksum"])
def test_a_damaged_newest_checkpoint_falls_back_with_a_warning(tmp_path: Path, damage: str) -> None:
    newest, _ = stopped(tmp_path / "broken")
    data = newest.read_bytes()
    if damage == "truncated":
        newest.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        newest.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    elif damage == "empty":
        newest.write_bytes(b"")
    elif damage == "no checksum":
        newest.with_suffix(".sha256").unlink()
    else:
        newest.with_suffix(".sha256").write_bytes(b"\xff\x00")
    said: list[str] = []
    trainer = make_trainer(plain(), tmp_path / "broken", listener=Listener(say=said.append))
    assert trainer.resume()
    assert trainer.step == 6
    assert len(said) == 1 and newest.name in said[0] and "falling back" in said[0]
    trainer.run()
    assert_same_run(trainer, train(plain(), tmp_path / "whole"))


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    for file in stopped(tmp_path):
        file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(RunError, match=r"no checkpoint .* is intact"):
        make_trainer(plain(), tmp_path).resume()


def test_two_checkpoints_are_kept_and_nothing_else(tmp_path: Path) -> None:
    train(plain(), tmp_path)
    names = sorted(file.name for file in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000000009.pt", "step-000000009.sha256", "step-000000012.pt", "step-000000012.sha256"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_a_killed_process_left_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    """Each would be as large as a checkpoint, and one more with every kill."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    left = (".step-000000002.new.77.tmp", "step-000000002.new", "step-000000002.sha256", ".step-000000002.sha256.7.tmp")
    for name in (*left, "notes.txt"):
        (folder / name).write_text("half")
    train(plain(), tmp_path)
    names = {file.name for file in folder.iterdir()}
    assert names == {f"step-{step:09d}.{end}" for step in (9, 12) for end in ("pt", "sha256")} | {"notes.txt"}


def test_a_checkpoint_is_plain_tensors(tmp_path: Path) -> None:
    train(plain(), tmp_path)
    content = torch.load(tmp_path / "checkpoints" / "step-000000012.pt", weights_only=True)
    assert content["format"] == 1
    assert {"live.global.weights", "live.learner.natural.optimizer.square"} <= content["tensors"].keys()
    assert isinstance(content["values"], str)


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_crafted_checkpoint_runs_no_code(tmp_path: Path, how: str) -> None:
    run = RunDirectory(tmp_path)
    run.checkpoints.mkdir()
    path, target = run.checkpoints / "step-000000001.pt", tmp_path / "owned"
    if how == "torch":
        torch.save({"format": 1, "tensors": {}, "values": _Payload(target)}, path)
    else:
        path.write_bytes(pickle.dumps(_Payload(target), protocol=2))
    path.with_suffix(".sha256").write_text(sha256(path))
    said: list[str] = []
    with pytest.raises(RunError, match="no checkpoint"):
        checkpoints.load_newest(run, warn=said.append)
    assert not target.exists()
    assert "cannot be read" in said[0]


@pytest.mark.parametrize(
    "content",
    [
        {"format": 2, "tensors": {}, "values": "{}"},
        {"format": 1, "tensors": [], "values": "{}"},
        {"format": 1, "tensors": {"a": 3}, "values": "{}"},
        {"format": 1, "tensors": {1: torch.zeros(1)}, "values": "{}"},
        {"format": 1, "tensors": {"a": torch.zeros(1).to_sparse()}, "values": "{}"},
        {"format": 1, "tensors": {"a": torch.zeros(1, device="meta")}, "values": "{}"},
        {"format": 1, "tensors": {"a": torch.zeros(1, dtype=torch.complex64)}, "values": "{}"},
        {"format": 1, "tensors": {}, "values": "[]"},
        {"format": 1, "tensors": {}, "values": "{"},
        {"format": 1},
        [],
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: Any) -> None:
    run = RunDirectory(tmp_path)
    run.checkpoints.mkdir()
    path = run.checkpoints / "step-000000001.pt"
    torch.save(content, path)
    path.with_suffix(".sha256").write_text(sha256(path))
    with pytest.raises(RunError):
        checkpoints.load_newest(run, warn=lambda text: None)


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path)
    with pytest.raises(RunError, match="does not fit the recipe"):
        make_trainer(averaged(), tmp_path).resume()
    other = tiny_recipe([ROBUST, {**NATURAL, "name": "other"}], train=FAST)
    with pytest.raises(RunError, match="does not fit the recipe"):
        make_trainer(other, tmp_path).resume()


@pytest.mark.parametrize("part", ["train", "extra"])
def test_other_images_than_before_are_refused(tmp_path: Path, part: str) -> None:
    """Whichever of them: an extra file that was written anew would go on as if nothing had happened."""
    recipe = tiny_recipe([NATURAL], data={"name": "arrays", "extra": {"name": "digits", "ratio": "1/3"}}, train=FAST)
    splits = tiny_splits(extra=10)
    stop_after(recipe, tmp_path, epoch=1, splits=splits)
    changed = replace(splits, **{part: tiny_images(len(getattr(splits, part)), salt=7)})
    with pytest.raises(RunError, match="trained on other images than these"):
        make_trainer(recipe, tmp_path, splits=changed).resume()
    assert make_trainer(recipe, tmp_path, splits=splits).resume()


def test_a_full_disk_is_a_clear_error_and_leaves_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False

    def iteration(done: int, total: int) -> None:
        nonlocal full
        full = done > 7

    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(RunError, match=r"no space left .* start again \(train and evaluate"):
        make_trainer(plain(), tmp_path / "full", listener=Listener(iteration=iteration)).run()
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.glob("full/checkpoints/*.pt")) == ["step-000000003.pt", "step-000000006.pt"]
    assert not [p for p in (tmp_path / "full").rglob("*") if p.suffix in {".tmp", ".new"}]
    trainer = make_trainer(plain(), tmp_path / "full")
    assert trainer.resume()
    assert trainer.step == 6
    trainer.run()
    assert_same_run(trainer, train(plain(), tmp_path / "whole"))


def test_a_disk_that_fills_up_within_a_checkpoint_is_a_clear_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch then closes its file, which cannot be, and raises an error of its own."""
    trainer = make_trainer(plain(), tmp_path)
    trainer.checkpoint()
    before = checkpoints.load_newest(trainer.directory, warn=pytest.fail)
    trainer.step += 1
    save = torch.save

    class Full:
        def __init__(self, stream: Any) -> None:
            self.stream, self.left = stream, 2000

        def write(self, content: Any) -> int:
            self.left -= len(content)
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self.stream.write(content))

        def flush(self) -> None:
            self.stream.flush()

    monkeypatch.setattr(torch, "save", lambda content, stream: save(content, Full(stream)))
    with pytest.raises(RunError, match=r"no space left .* start again") as raised:
        trainer.checkpoint()
    assert isinstance(raised.value.__cause__, RuntimeError), "as PyTorch hides it"
    monkeypatch.undo()
    after = checkpoints.load_newest(trainer.directory, warn=pytest.fail)
    assert before is not None and after is not None and after.values == before.values


def test_the_lock_refuses_a_second_process(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with run.lock(), pytest.raises(RunError, match="in use"), run.lock():
        pytest.fail("it was not refused")
    holds = (
        "import fcntl, sys; s = open(sys.argv[1]); fcntl.flock(s, fcntl.LOCK_EX); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", holds, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="in use by another process"), run.lock():
            pytest.fail("it was not refused")
        other.kill()
    with run.lock():
        assert other.returncode == -signal.SIGKILL, "the lock ends with its holder"


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*given: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(RunError, match=r"cannot be locked .* choose another --out"), RunDirectory(tmp_path).lock():
        pass


# -- snapshots and branches -------------------------------------------------------------------------------------------


def finished(path: Path, **changes: Any) -> Trainer:
    recipe = tiny_recipe(
        [{**ROBUST, "averaging": AVERAGING}, NATURAL], train={**FAST, "snapshots": {"every": 2, **changes}}
    )
    trainer = train(recipe, path)
    (path / "recipe.yaml").write_text(to_yaml(recipe))
    return trainer


def test_a_branch_starts_from_every_learner_of_the_snapshot(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    files = branch_files(f"{tmp_path / 'run'}@2", ["robust", "natural"])
    assert set(files) == {"global", "robust", "robust.average", "natural"}
    branch = make_trainer(averaged(), tmp_path / "branch")
    branch.start_from(files)
    robust, natural = branch.learners
    for vector, name in [
        (robust.flat.vector, "robust"),
        (natural.flat.vector, "natural"),
        (branch.global_learner.vector, "global"),
    ]:
        state, about = load_weights(tmp_path / "run" / "snapshots" / "2" / f"{name}.safetensors")
        assert about["epoch"] == 2
        assert torch.equal(vector, robust.flat.read(state)[0]), name
    assert robust.average is not None and natural.average is not None
    state, _ = load_weights(files["robust.average"])
    assert torch.equal(robust.average.vector, robust.flat.read(state)[0])
    assert torch.equal(natural.average.vector, natural.flat.vector), (
        "an average that was not kept starts at the learner"
    )
    assert int(robust.flat.counters[0]) == 6
    assert not any(tensor.any() for tensor in robust.optimizer.state.values())
    branch.run()


def test_a_learner_that_the_run_did_not_have_starts_from_the_global_one(tmp_path: Path) -> None:
    finished(tmp_path / "run", dtype="fp16")
    files = branch_files(str(tmp_path / "run"), ["robust", "new"])
    assert files["global"].parent.name == "4"
    branch = make_trainer(tiny_recipe([ROBUST, {**NATURAL, "name": "new"}], train=FAST), tmp_path / "branch")
    branch.start_from(files)
    assert torch.equal(branch.learners[1].flat.vector, branch.global_learner.vector)
    assert not torch.equal(branch.learners[0].flat.vector, branch.global_learner.vector)


def test_a_branch_goes_on_with_the_schedules_of_its_epoch(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    recipe = tiny_recipe(train={**FAST, "start_epoch": 2})
    branch = make_trainer(recipe, tmp_path / "branch")
    branch.start_from(branch_files(f"{tmp_path / 'run'}@2", ["robust", "natural"]))
    branch.run()
    assert [record["epoch"] for record in metrics_of(tmp_path / "branch")] == [3, 4]
    # The last iteration has 11/3 epochs behind it: 0.917 of training, between 0.1 at 2/3 and 0.01 at 1.
    expected = 0.02 * (0.1 + (0.01 - 0.1) * (11 / 12 - 2 / 3) * 3)
    assert metrics_of(tmp_path / "branch")[-1]["lr"]["robust"] == pytest.approx(expected, rel=1e-5)


def test_a_header_that_torch_cannot_read_is_a_damaged_file(tmp_path: Path) -> None:
    tensor = {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}
    header = json.dumps({"weight": tensor}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(RunError, match="not a complete safetensors file"):
        load_weights(tmp_path / "x.safetensors")


def test_how_the_work_is_done_may_change(tmp_path: Path) -> None:
    """What the console advises where memory is short, and when checkpoints are written; what is trained may not."""
    run = generalist.train("digits-d", overrides=SHORT, out=tmp_path / "run", device="cpu")
    other = ["validation.batch_size=7", "train.checkpoint_minutes=1", "train.checkpoint_epochs=3", "train.engine=eager"]
    other += [f"data.root={tmp_path}", "source=other words"]
    generalist.train("digits-d", overrides=[*SHORT, *other], out=run.path, resume=True, device="cpu")
    assert "checkpoint_epochs: 3" in run.recipe.read_text()
    with pytest.raises(RecipeError, match=r"validation\.steps: differs from that of"):
        generalist.train("digits-d", overrides=[*SHORT, "validation.steps=2"], out=run.path, resume=True, device="cpu")


SHORT = ["model.width=4", "train.epochs=1", "validation.images=60", "validation.steps=1"]


def test_minutes_count_where_an_epoch_is_one_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = checkpoints.save
    monkeypatch.setattr(checkpoints, "save", lambda *args, step: (saved.append(step), save(*args, step=step)))
    options = {**FAST, "batch_size": 18, "checkpoint_minutes": 1e-9, "checkpoint_epochs": 1000}
    train(tiny_recipe(train=options, validation={"every": 1000}), tmp_path)
    assert saved == [1, 2, 3, 4]


def test_a_crafted_size_of_the_log_is_no_demand_for_memory(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    lines = run.read_metrics()
    assert run.cut_metrics(10**18) == run.metrics.stat().st_size and run.read_metrics() == lines


def test_what_cannot_be_branched_from_is_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    with pytest.raises(RunError, match=r"no snapshot of epoch 1; kept: 2, 3, 4"):
        branch_files(f"{tmp_path / 'run'}@1", ["robust"])
    with pytest.raises(RunError, match="not a run directory"):
        branch_files(str(tmp_path / "nowhere"), ["robust"])
    (tmp_path / "run" / "snapshots" / "4" / "global.safetensors").write_bytes(b"no weights")
    with pytest.raises(RunError, match="not a complete safetensors file"):
        make_trainer(plain(), tmp_path / "b").start_from(branch_files(str(tmp_path / "run"), ["robust"]))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "recipe.yaml").write_text("{}")
    with pytest.raises(RunError, match="neither snapshots nor weights"):
        branch_files(str(tmp_path / "empty"), ["robust"])


@pytest.mark.parametrize("header", ["[" * 100_000, "[1]", '{"model":'])
def test_a_crafted_header_is_refused(tmp_path: Path, header: str) -> None:
    save_file({"linear.weight": torch.zeros(1)}, tmp_path / "crafted.safetensors", metadata={"generalist": header})
    with pytest.raises(RunError, match=r"crafted.safetensors"):
        load_weights(tmp_path / "crafted.safetensors")


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    other = make_trainer(tiny_recipe(model={"name": "small", "width": 2}, train=FAST), tmp_path / "other")
    with pytest.raises(GeneralistError, match=r"robust\.safetensors: the weights do not fit this architecture"):
        other.start_from(branch_files(str(tmp_path / "run"), ["robust"]))


def test_weights_of_another_normalization_are_refused(tmp_path: Path) -> None:
    """They would bring its numbers along, and the run would not be what its recipe says."""
    made = [
        tiny_recipe(train={**FAST, "epochs": 1}, model={"name": "tiny", "normalize": {"mean": [mean], "std": [0.2]}})
        for mean in (0.5, 0.1)
    ]
    train(made[0], tmp_path / "run").directory.recipe.write_text(to_yaml(made[0]))
    files = branch_files(str(tmp_path / "run"), ["robust"])
    with pytest.raises(RecipeError, match=r"model\.normalize: it differs from that of .*robust\.safetensors"):
        make_trainer(made[1], tmp_path / "other").start_from(files)
    same = make_trainer(made[0], tmp_path / "same")
    same.start_from(files)
    assert float(same.learners[0].flat.state_dict()["mean"]) == 0.5


def test_a_branch_keeps_the_count_of_the_average_it_continues(tmp_path: Path) -> None:
    source = train(tiny_recipe(), tmp_path / "source")
    source.directory.recipe.write_text(to_yaml(tiny_recipe()))
    branch = make_trainer(tiny_recipe(), tmp_path / "branch")
    branch.start_from(branch_files(str(tmp_path / "source"), ["robust", "natural"]))
    assert branch.global_learner.count.item() == source.step > 0


def test_a_branch_says_when_its_held_out_images_were_trained_on(tmp_path: Path) -> None:
    said: list[str] = []
    source = train(tiny_recipe(), tmp_path / "source")
    source.directory.recipe.write_text(to_yaml(tiny_recipe()))
    files = branch_files(str(tmp_path / "source"), ["robust", "natural"])
    same = make_trainer(tiny_recipe(), tmp_path / "same", listener=Listener(say=said.append))
    same.start_from(files)
    fewer = make_trainer(tiny_recipe(validation={"images": 3}), tmp_path / "fewer", listener=Listener(say=said.append))
    fewer.start_from(files)
    on_test = tiny_recipe(train={"seed": 4}, validation={"split": "test"})
    make_trainer(on_test, tmp_path / "test", listener=Listener(say=said.append)).start_from(files)
    assert said == [] and same.warnings == []
    other = make_trainer(tiny_recipe(train={"seed": 4}), tmp_path / "other", listener=Listener(say=said.append))
    other.start_from(files)
    assert len(said) == 1 and "held out" in said[0]
    other.run()
    assert all("held out" in record["warning"] for record in other.directory.read_metrics())
    assert "held out" in load_weights(other.directory.model)[1]["warning"]
