"""The command line under torchrun: lost, hanging and diverging ranks, signals, restarts, two nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from distributed_helpers import environment, free_port

import generalist
from generalist.core.run import RunDirectory
from generalist.recipe import load_recipe, to_yaml
from generalist.training import checkpoint as checkpoints

SMALL = [
    "train.epochs=4",
    "train.checkpoint_epochs=1",
    "learners.linf.attack.steps=2",
    "validation.steps=2",
    "validation.every=2",
    "model.width=8",
    "train.parallel.layout=learners",
]


def arguments(out: Path, *changes: str) -> list[str]:
    """Of `generalist`, for a run of seconds in which rank 0 has the linf learner and rank 1 the natural one."""
    sets = [word for change in (*SMALL, *changes) for word in ("--set", change)]
    return ["train", "digits-d", "--out", str(out), "--device", "cpu", *sets]


def torchrun(args: Sequence[str], *options: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", *(options or ("--standalone", "--nproc-per-node=2"))]
    command = [*launcher, "-m", "generalist", *args]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ranks(args: Sequence[str], *, folders: Sequence[Path | None] = (None, None)) -> list[subprocess.Popen[str]]:
    """The two processes of a job without a launcher that would end them, each in its folder."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "generalist", *args],
            env=environment(RANK=str(rank), **job),
            cwd=folders[rank],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def workers(launcher: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def logged(run: Path) -> int:
    return len(RunDirectory(run).read_metrics())


def assert_equal_runs(run: Path, other: Path) -> None:
    """Bit for bit."""
    for name in ("model.safetensors", "last.safetensors"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    found, expected = (checkpoints.load_newest(RunDirectory(path), warn=print) for path in (run, other))
    assert found is not None and expected is not None
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(bool((tensor == expected.tensors[name]).all()) for name, tensor in found.tensors.items())
    assert logged(run) == logged(other)


def assert_same_losses(run: Path, other: Path) -> None:
    records, expected = (RunDirectory(path).read_metrics() for path in (run, other))
    assert len(records) == len(expected) > 0
    for record, wanted in zip(records, expected, strict=True):
        for learner in ("linf", "natural"):
            assert abs(record["train"][learner]["loss"] - wanted["train"][learner]["loss"]) < 1e-9


def test_a_rank_that_diverges_ends_the_job_with_one_line(tmp_path: Path) -> None:
    args = arguments(tmp_path / "run", "learners.natural.optimizer.lr=1e18", "train.parallel.timeout=60")
    first, second = ranks(args)
    (_, quiet), (_, told) = first.communicate(timeout=120), second.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (2, 2), quiet + told
    assert "error" not in quiet
    assert re.fullmatch(r"error: rank 1: learner 'natural': the (loss|weights).*", told.strip())


@pytest.mark.parametrize(
    ("state", "ending", "code", "told"),
    [
        ("teller", "raise GeneralistError('lost')", 2, "error: lost\n"),
        ("joined", "raise GeneralistError('mine')", 2, "error: mine\n"),
        ("joined", "sys.exit()", 0, ""),
        ("joined", "sys.exit(3)", 3, ""),
    ],
)
def test_a_rank_ends_without_taking_down_its_connections(state: str, ending: str, code: int, told: str) -> None:
    """Whether its job has failed or not: the group may live longer than it should."""
    program = f"""
import atexit, os, sys
from generalist.console import clear_endings
from generalist.core import ranks
from generalist.core.errors import GeneralistError

class Connection:
    def __del__(self):
        os.abort()

connection = Connection()
atexit.register(print, "files are closed")
ranks.telling.{state} = True
with clear_endings():
    {ending}
"""
    ended = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "files are closed\n", told)


@pytest.mark.slow
def test_the_ranks_of_a_script_end_well_though_their_group_lives_on(tmp_path: Path) -> None:
    """A dispatch mode, such as torch.compile has, makes PyTorch keep it. Without time to let go one job in three aborts
    on a busy machine, which three at once make."""
    program = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from generalist.core import distributed

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))

with distributed.start() as group:
    with Mode():
        torch.conv2d(torch.rand(1, 3, 8, 8), torch.rand(4, 3, 3, 3))
    group.check_alike({"this": 1})
    group.from_first(3)
"""
    (tmp_path / "script.py").write_text(program)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for _ in range(3):
        jobs = [
            subprocess.Popen(
                [*launcher, str(tmp_path / "script.py")], env=environment(), stderr=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        told = [job.communicate(timeout=120)[1] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0, 0], told


@pytest.mark.slow
def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    both = ranks(arguments(tmp_path / "run", "train.parallel.mesh=[2,2]"))
    told = "".join(process.communicate(timeout=120)[1] for process in both)
    assert [process.returncode for process in both] == [2, 2]
    assert told.count("error") == 1 and "recipe: train.parallel.mesh: 2 x 2 does not fit 2 processes" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_nodes_with_different_files(tmp_path: Path) -> None:
    """Of weights to start from, rank 0's are taken; another recipe or other images are refused."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    pixels = np.arange(600 * 64, dtype=np.uint8).reshape(600, 8, 8)
    changes = ["train.epochs=1", "train.parallel.layout=data"]
    for seed, node in enumerate(nodes):
        node.mkdir()
        (node / "mine.yaml").write_text(to_yaml(load_recipe("digits-d", overrides=[f"train.seed={seed}"])))
        np.savez(node / "images.npz", pixels ^ seed, np.arange(600) % 3)
        (node / "pictures.py").write_text(
            "import numpy as np, torch\n"
            "pixels, labels = np.load('images.npz').values()\n"
            "everything = torch.utils.data.TensorDataset(torch.tensor(pixels[:, None] / 255.0), torch.tensor(labels))\n"
        )
        generalist.train("digits-d", overrides=[*SMALL, *changes, f"train.seed={seed}"], out=node / "source")
    for out, folders in (("alike", nodes[:1] * 2), ("apart", nodes)):
        told = _ended(ranks([*arguments(tmp_path / out, *changes), "--from", "source"], folders=folders))
        assert told == "", told
    assert_equal_runs(tmp_path / "alike", tmp_path / "apart")
    images = arguments(tmp_path / "images", *changes, "data.name=pictures:everything", "validation.images=60")
    recipe = ["train", "mine.yaml", *arguments(tmp_path / "recipe", *changes)[2:]]
    for args, words in ((images, "its images"), (recipe, "the recipe's train")):
        told = _ended(ranks([*args, "--trust-code"], folders=nodes))
        assert re.fullmatch(rf"error: rank \d: rank 1 differs from rank 0 in {words}: .*", told.strip())


def _ended(both: Sequence[subprocess.Popen[str]]) -> str:
    return "".join(process.communicate(timeout=120)[1] for process in both)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_within_the_timeout(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second = ranks(arguments(run, "train.parallel.timeout=15", "train.epochs=500"))
    wait_for(lambda: logged(run) >= 1, first)
    second.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        _, told = first.communicate(timeout=120)
    finally:
        second.kill()
        second.communicate()
    assert time.monotonic() - stopped < 60  # fifteen seconds, those to ask around, and a busy machine
    assert first.returncode == 2
    assert re.fullmatch(r"error: rank 0: rank 1 has died, or has not answered for 15 s .*", told.strip())


@pytest.mark.slow
def test_a_killed_worker_comes_back_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = torchrun(arguments(tmp_path / "whole"))
    assert whole.wait(timeout=240) == 0
    run = tmp_path / "run"
    launcher = torchrun(arguments(run), "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    wait_for(lambda: len([*RunDirectory(run).checkpoints.glob("step-*.pt")]) > 1, launcher)  # it begins with one
    victims = workers(launcher)
    os.kill(victims[-1], signal.SIGKILL)
    output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0
    assert f"resuming {run} at step" in output
    assert_equal_runs(run, tmp_path / "whole")


@pytest.mark.slow
def test_all_ranks_stop_at_one_iteration_when_asked_to(tmp_path: Path) -> None:
    whole = torchrun(arguments(tmp_path / "whole"))
    assert whole.wait(timeout=240) == 0
    run = tmp_path / "run"
    launcher = torchrun(arguments(run))
    wait_for(lambda: logged(run) >= 1, launcher)
    launcher.send_signal(signal.SIGTERM)
    _, told = launcher.communicate(timeout=240)
    assert launcher.returncode != 0
    assert len(re.findall(r"^error: stopped in epoch \d+ at step \d+", told, re.MULTILINE)) == 1
    resumed = torchrun([*arguments(run, "train.parallel.timeout=300"), "--resume"])  # this may be changed
    output, _ = resumed.communicate(timeout=240)
    assert resumed.returncode == 0 and f"resuming {run} at step" in output
    assert_equal_runs(run, tmp_path / "whole")


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """Two launchers with two processes each, which meet at one address: two groups of two ranks."""
    meet = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    layout = "train.parallel.layout=both"
    nodes = [torchrun(arguments(tmp_path / "run", layout, "train.precision=fp64"), *meet) for _ in range(2)]
    outputs = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sum("run: " in output for output, _ in outputs) == 1  # rank 0 alone talks
    environment_text = (tmp_path / "run" / "environment.json").read_text()
    assert re.search(r'"mesh": \[\s*2,\s*2\s*\]', environment_text)
    alone = subprocess.run(
        [sys.executable, "-m", "generalist", *arguments(tmp_path / "alone", "train.precision=fp64")],
        env=environment(),
        timeout=240,
        check=False,
    )
    assert alone.returncode == 0
    assert_same_losses(tmp_path / "run", tmp_path / "alone")


def test_the_script_for_slurm(tmp_path: Path) -> None:
    """With many nodes, whose list is longer than a pipe holds; srun gets its cores, and the job a port of its own."""
    programs = {"scontrol": 'printf "node%d\\n" {1..40000}', "srun": 'echo "$SRUN_CPUS_PER_TASK" "$@"'}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = Path(__file__).parents[1] / "examples" / "train.slurm"
    slurm = {"JOB_NODELIST": "many", "JOB_ID": "71234", "JOB_NUM_NODES": "40000", "GPUS_ON_NODE": "8"}
    job = {f"SLURM_{name}": value for name, value in {**slurm, "CPUS_PER_TASK": "32"}.items()}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(script), "digits-d", "runs/a b"]
    done = subprocess.run(command, env=environment(PATH=path, **job), capture_output=True, text=True, check=True)
    assert done.stdout == (
        "32 torchrun --nnodes=40000 --nproc-per-node=8 --max-restarts=3 --rdzv-backend=c10d "
        "--rdzv-endpoint=node1:21234 --rdzv-id=71234 -m generalist train digits-d --out runs/a b\n"
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("layout", "engine"), [("learners", "graph"), ("data", "auto")])
def test_ranks_that_share_a_gpu(tmp_path: Path, layout: str, engine: str) -> None:
    """Learners apart record their iterations; divided batches cannot be recorded then, and say so."""
    changes = ("train.precision=fp64", f"train.engine={engine}", f"train.parallel.layout={layout}")
    shared = torchrun([*arguments(tmp_path / "shared", *changes), "--device", "cuda:0"])
    output, told = shared.communicate(timeout=240)
    assert shared.returncode == 0, told
    assert ("eager engine: ranks share a GPU" in output) == (layout == "data")
    alone = [*arguments(tmp_path / "alone", "train.precision=fp64", "train.engine=eager"), "--device", "cuda"]
    subprocess.run([sys.executable, "-m", "generalist", *alone], env=environment(), timeout=240, check=True)
    assert_same_losses(tmp_path / "shared", tmp_path / "alone")
