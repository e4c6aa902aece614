"""Workers that share a real PostgreSQL server, which the test starts itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import postgres
from sweep_helpers import read_rows, start_worker, wait_until, work, write_sweep

from generalist.core.errors import SweepError
from generalist.core.run import RunDirectory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with postgres() as found:
        yield found


def test_two_workers_one_killed_twelve_trials(url: str, tmp_path: Path) -> None:
    """kill -9 of one worker; the other takes its trial over. Every trial ends once, and none is done twice."""
    path = write_sweep(
        tmp_path,
        search={
            "learners.linf.optimizer.lr": {"values": [0.1, 0.05, 0.02, 0.01]},
            "mixing.redistribution.every": {"values": [1, 2, 3]},
        },
        set={"train.epochs": 8, "train.checkpoint_epochs": 1},
        heartbeat=2,
    )
    # Two folders, as on two machines: the one that is killed leaves no lock file where the other would look.
    first, second = tmp_path / "one", tmp_path / "two"
    doomed, survivor = start_worker(path, first, storage=url), start_worker(path, second, storage=url)
    try:
        wait_until(lambda: len(list(first.glob("trials/*/last.safetensors"))) >= 2)
        done = len(list(first.glob("trials/*/last.safetensors")))
        wait_until(lambda: any(not (p / "last.safetensors").exists() for p in first.glob("trials/*")))
        doomed.kill()
        doomed.wait()
        assert survivor.wait(timeout=600) == 0
    finally:
        for worker in (doomed, survivor):
            worker.kill()
            worker.wait()
    rows = read_rows(path, second, storage=url)
    assert [(row.number, row.state) for row in rows] == [(number, "complete") for number in range(12)]
    assert len({tuple(row.choice.items()) for row in rows}) == 12
    assert sum(row.losses for row in rows) <= 1
    ended = {folder: {p.parent.name for p in folder.glob("trials/*/last.safetensors")} for folder in (first, second)}
    assert len(ended[first]) >= done >= 2 and ended[second]
    assert ended[first] | ended[second] == {f"{number:04}" for number in range(12)}
    assert len(ended[first] & ended[second]) <= 1  # killed between its last file and its word to the database
    owners = {row.worker for row in rows}
    assert len(owners) == 2
    for row in rows:
        folder = next(f for f in (second, first) if f"{row.number:04}" in ended[f])
        last = RunDirectory(folder / f"trials/{row.number:04}").read_metrics()[-1]
        assert last["epoch"] == 8 and row.values is not None


def test_a_sweep_joins_with_the_driver_named_and_a_wrong_database_is_one_line(url: str, tmp_path: Path) -> None:
    path = write_sweep(tmp_path, "joined", set={"train.epochs": 1}, method="tpe", trials=3)
    work(path, tmp_path / "out", storage=url, trials=2)
    work(path, tmp_path / "out", storage=url.replace("postgresql://", "postgresql+psycopg://"))
    assert [row.state for row in read_rows(path, tmp_path / "out", storage=url)] == ["complete"] * 3
    with pytest.raises(SweepError, match='database "nowhere" does not exist'):
        work(path, tmp_path / "out", storage=url.replace("/postgres?", "/nowhere?"))
    other = write_sweep(tmp_path, "other", name="joined", set={"train.epochs": 2}, method="tpe", trials=3)
    with pytest.raises(SweepError, match="another sweep of the name"):
        work(other, tmp_path / "other", storage=url)
