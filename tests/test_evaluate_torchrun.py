"""`generalist evaluate` under torchrun: the parts of two processes are the whole of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import run_main
from distributed_helpers import environment, free_port
from evaluation_helpers import verdicts, without_times

from generalist import train
from generalist.core.run import RunDirectory

ATTACKS = ["--attacks", "natural,pgd-3,apgd-ce", "--samples", "61", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    changes = ["train.epochs=2", "model.width=4", "validation.steps=1"]
    return train("digits-t", overrides=changes, out=tmp_path_factory.mktemp("torchrun") / "run", device="cpu")


def torchrun(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "generalist", *args], env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow
def test_two_processes_find_what_one_finds(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["evaluate", str(run.path), *ATTACKS]
    assert run_main([*args, "--out", str(tmp_path / "one")], monkeypatch, capsys)[0] == 0
    done = torchrun(*args, "--out", str(tmp_path / "two"), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    (one,), (two,) = (list((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert one.name == two.name
    assert {p.name for p in two.iterdir()} == {
        "records-1-of-2.jsonl", "records-2-of-2.jsonl", "summary.json", "examples.npz"
    }  # fmt: skip
    assert verdicts(two) == verdicts(one)
    summary = json.loads((one / "summary.json").read_text())
    assert without_times(json.loads((two / "summary.json").read_text())) == without_times(summary)
    printed = json.loads(done.stdout)  # by one process, and nothing else
    assert without_times({k: v for k, v in printed.items() if k != "directory"}) == without_times(summary)
    # One that was stopped goes on: half of a part's records are gone, the other part is whole.
    records = two / "records-2-of-2.jsonl"
    records.write_bytes(records.read_bytes()[: records.stat().st_size // 2])
    (two / "summary.json").unlink()
    done = torchrun(*args, "--out", str(tmp_path / "two"), "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Accuracy (%) of best on 61 images") == 1
    assert verdicts(two) == verdicts(one)
    assert without_times(json.loads((two / "summary.json").read_text())) == without_times(summary)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--shards", "1/2"], "leave --shards out"),
        (["--corruptions", "common"], "corruptions are measured by one process"),
        (["--perturbations"], "corruptions are measured by one process"),
    ],
)
def test_what_one_process_alone_can_do_is_refused(
    more: list[str], says: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in (("0", 1), ("1", 0)):  # of two processes that refuse it, one says so
        monkeypatch.setenv("RANK", rank)
        code, out, error = run_main(["evaluate", str(run.path), *more], monkeypatch, capsys)
        assert (code, out, error.count("\n")) == (2, "", told) and (says in error) == bool(told)


def test_a_mistake_is_said_once(run: RunDirectory, tmp_path: Path) -> None:
    args = ["evaluate", str(run.path), "--attacks", "natural", "--samples", "1", "--device", "cpu"]
    done = torchrun(*args, "--out", str(tmp_path / "out"))
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and "1 images cannot be cut into 2 parts" in told[0]
    assert "please report" not in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_processes_that_evaluate_different_things_are_refused(run: RunDirectory, tmp_path: Path) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    args = ["evaluate", str(run.path), "--samples", "8", "--device", "cpu", "--out", str(tmp_path / "out")]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "generalist", *args, "--attacks", f"natural,pgd-{rank + 1}"],
            env=environment(RANK=str(rank), **job),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = "".join(process.communicate(timeout=240)[1] for process in both)
    assert [process.returncode for process in both] == [2, 2]
    assert told.count("error") == 1 and "rank 1 differs from rank 0 in the weights, images or attacks" in told


def test_a_sweep_does_not_run_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, error = run_main(["sweep", "digits-c"], monkeypatch, capsys)
    assert code == 2 and "once for each GPU" in error
