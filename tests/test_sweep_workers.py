"""Workers that die: no finished trial is lost, and the one in hand goes on from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sweep_helpers import read_rows, start_worker, wait_until, work, write_sweep

from generalist.core.errors import GeneralistError
from generalist.core.run import RunDirectory
from generalist.sweep import trials
from generalist.sweep.definition import load_sweep
from generalist.sweep.storage import Shared, choose_place, open_shared
from generalist.training.loop import Listener

LR = "learners.linf.optimizer.lr"


def open_tiny(tmp_path: Path, **changes: Any) -> Shared:
    path = write_sweep(tmp_path, **changes)
    return open_shared(load_sweep(path), choose_place(None, tmp_path / "out"))


def test_a_killed_workers_trial_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """kill -9 in the middle of the second trial; the next worker does the rest and repeats nothing that is done."""
    changes = {"train.epochs": 400, "train.checkpoint_epochs": 1}
    path = write_sweep(tmp_path, search={"short": {"variants": {"yes": {"train.epochs": 1}, "no": {}}}}, set=changes)
    out = tmp_path / "out"
    second = RunDirectory(out / "trials/0001")
    worker = start_worker(path, out)
    try:
        wait_until(lambda: len(list(second.checkpoints.glob("*.sha256"))) >= 2)
    finally:
        worker.kill()
        worker.wait()
    first = (out / "trials/0000/last.safetensors").stat().st_mtime_ns
    assert [row.state for row in read_rows(path, out)] == ["complete", "running"]
    done = len(second.read_metrics())

    class EnoughError(GeneralistError):
        pass

    seen: list[int] = []

    def stop(record: dict[str, Any]) -> None:
        seen.append(record["epoch"])
        raise EnoughError

    with pytest.raises(EnoughError):  # it need not run to the end to show where it went on
        work(path, out, listener=Listener(epoch=stop))
    assert done - 2 <= seen[0] <= done + 1
    assert (out / "trials/0000/last.safetensors").stat().st_mtime_ns == first
    rows = read_rows(path, out)
    assert [row.state for row in rows] == ["complete", "waiting"]
    assert [row.losses for row in rows] == [0, 1]
    assert len(json.loads(second.environment.read_text())["resumed"]) == 1


def test_a_trial_of_a_living_worker_is_left_alone(tmp_path: Path) -> None:
    shared = open_tiny(tmp_path, search={LR: {"values": [0.1, 0.05]}})
    mine = trials.claim(shared)
    other = trials.claim(open_tiny(tmp_path, search={LR: {"values": [0.1, 0.05]}}))
    assert mine is not None and other is not None
    assert [mine.number, other.number] == [0, 1]
    assert trials.claim(shared) is None
    assert [row.state for row in trials.rows(shared)] == ["running", "running"]
    mine.hold.close()  # as its death would
    again = trials.claim(shared)
    assert again is not None and (again.number, again.choice) == (0, mine.choice)
    assert [row.losses for row in trials.rows(shared)] == [1, 0]


def test_a_living_worker_with_another_folder_is_left_alone(tmp_path: Path) -> None:
    """The lock file of a worker that stopped earlier does not say that the one now at its trial is dead."""
    sweep = load_sweep(write_sweep(tmp_path, search={LR: {"values": [0.1]}}))
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    one, two = (open_shared(sweep, choose_place(url, tmp_path / name)) for name in ("one", "two"))
    first = trials.claim(one)
    assert first is not None
    trials.free(one, first)
    first.hold.close()
    lock = trials.lock_file(tmp_path / "one", 0)
    lock.write_text(f"{lock.read_text()}0")  # the two have one process in this test
    assert trials.claim(two) is not None
    assert trials.claim(one) is None
    assert [(row.state, row.losses) for row in trials.rows(one)] == [("running", 0)]


def test_a_worker_elsewhere_is_dead_when_its_heart_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock file tells of a worker on another machine, only its signs of life do."""
    settings: dict[str, Any] = {"search": {LR: {"values": [0.1]}}, "heartbeat": 1}
    with monkeypatch.context() as patch:
        patch.setattr(trials, "worker_name", lambda: "elsewhere:1")
        shared = open_tiny(tmp_path, **settings)
        lost = trials.claim(shared)
    assert lost is not None
    lost.hold.close()
    trials.lock_file(tmp_path / "out", 0).unlink()
    assert trials.claim(shared) is None  # it may live yet
    found: list[trials.Claim] = []

    def claimed() -> bool:
        found.extend(claim for claim in [trials.claim(shared)] if claim is not None)
        return bool(found)

    wait_until(claimed, seconds=30)
    assert found[0].number == 0 and found[0].attempt != lost.attempt
    with pytest.raises(trials.TakenOverError):  # the dead one speaks: too late
        trials.finish(shared, lost, [1.0], measures={}, epoch=1)
    trials.free(shared, lost)
    assert [row.state for row in trials.rows(shared)] == ["running"]


def test_a_trial_that_kills_its_workers_is_given_up(tmp_path: Path) -> None:
    shared = open_tiny(tmp_path, search={LR: {"values": [0.1]}})
    for _ in range(trials.MAX_LOSSES):
        claim = trials.claim(shared)
        assert claim is not None and claim.number == 0
        claim.hold.close()
    assert trials.claim(shared) is None
    (row,) = trials.rows(shared)
    assert (row.state, row.error) == ("failed", "its worker died 3 times")


def test_an_attempt_that_never_said_whose_it_is_is_cleared_away(tmp_path: Path) -> None:
    """A worker can die between taking a trial and saying so."""
    shared = open_tiny(tmp_path, search={LR: {"values": [0.1, 0.05]}})
    shared.study.enqueue_trial(shared.sweep.choice(0), user_attrs={trials.NUMBER: 0})
    shared.study.ask(trials.distributions(shared.sweep.options.search))  # died here
    shared.study.ask(trials.distributions(shared.sweep.options.search))  # and one before it had a number
    claims = [trials.claim(shared), trials.claim(shared)]
    assert [claim.number for claim in claims if claim] == [0, 1]
    assert trials.claim(shared) is None


def test_what_an_earlier_attempt_reported_counts(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"search": {LR: {"values": [0.1]}}, "pruning": {"kind": "median"}}
    shared = open_tiny(tmp_path, **settings)
    claim = trials.claim(shared)
    assert claim is not None
    claim.trial.report(0.25, 1)
    claim.hold.close()
    again = trials.claim(shared)
    assert again is not None and again.reported == {1}
    assert shared.study.get_trials()[-1].intermediate_values == {1: 0.25}


def test_a_directory_without_a_run_is_cleared_and_one_with_weights_is_not(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, search={LR: {"values": [0.1]}}, set={"train.epochs": 1})
    work(path, tmp_path / "first", trials=1)
    folder = tmp_path / "out/trials/0000"
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text("{}")  # a worker died before it could write more
    (tmp_path / "out/fingerprint").write_text((tmp_path / "first/fingerprint").read_text())
    work(path, tmp_path / "out")
    assert [row.state for row in read_rows(path, tmp_path / "out")] == ["complete"]


@pytest.mark.parametrize("how", ["damaged", "removed"])
def test_a_trial_whose_checkpoints_are_all_damaged_or_gone_begins_anew(tmp_path: Path, how: str) -> None:
    path = write_sweep(tmp_path, search={LR: {"values": [0.1]}}, set={"train.checkpoint_epochs": 1})

    def stop_late(record: dict[str, Any]) -> None:
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(path, tmp_path / "out", listener=Listener(epoch=stop_late))
    folder = tmp_path / "out/trials/0000"
    for file in RunDirectory(folder).checkpoints.iterdir():
        file.write_bytes(b"half") if how == "damaged" else file.unlink()
    metrics = (folder / "metrics.jsonl").read_bytes()
    seen: list[int] = []
    work(path, tmp_path / "out", listener=Listener(epoch=lambda record: seen.append(record["epoch"])))
    assert seen == [1, 2]
    assert [row.state for row in read_rows(path, tmp_path / "out")] == ["complete"]
    assert (tmp_path / "out/trials/0000-damaged/metrics.jsonl").read_bytes() == metrics


def test_finished_runs_count_where_the_database_was_lost(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, search={LR: {"values": [0.1]}}, set={"train.epochs": 1})
    work(path, tmp_path / "out")
    before = read_rows(path, tmp_path / "out")[0].values
    (tmp_path / "out/sweep.db").unlink()
    seen: list[int] = []
    work(path, tmp_path / "out", listener=Listener(epoch=lambda record: seen.append(record["epoch"])))
    assert seen == [] and read_rows(path, tmp_path / "out")[0].values == before
