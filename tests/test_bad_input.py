"""The user's mistakes and hostile files: each ends in one clear line, runs nothing, loses nothing, leaves nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input_files import BASE, TOUCH, Hostile, cut, damage_checkpoints, flip, save_cifar10, save_mnist, save_npz
from bad_input_table import ROWS, SUBPROCESS, Row
from safetensors.torch import save_file

from generalist import cli, load, train
from generalist.core.errors import GeneralistError
from generalist.core.run import RunDirectory
from generalist.data.options import DataOptions, ExtraOptions, load_splits
from generalist.training.checkpoint import load_newest


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound run of the base recipe."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "base.yaml").write_text(BASE)
    return train(folder / "base.yaml", out=folder / "run", device="cpu").path


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a sound recipe and a module that must not be imported; no data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GENERALIST_DATA", "data")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "canary_code.py").write_text(f"import os\nos.system({TOUCH!r})\nthing = None\n")
    return tmp_path


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file and directory below, with the files' contents."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def complaint(args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `generalist ARGS` prints to stderr; it must end with the code of a user's mistake."""
    monkeypatch.setattr(sys, "argv", ["generalist", *args])
    with pytest.raises(SystemExit) as ending:
        cli.main()
    text = capsys.readouterr().err
    assert ending.value.code == 2, text
    return text


def check_complaint(text: str, says: tuple[str, ...]) -> None:
    lines = text.strip().split("\n")
    assert len(lines) <= 2 and lines[0].startswith("error: "), text
    assert "Traceback" not in text
    for fragment in says:
        assert fragment in text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_a_mistake_is_a_clear_line(
    row: Row,
    workplace: Path,
    finished_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if row.needs_run:
        shutil.copytree(finished_run, workplace / "run")
    row.prepare(workplace)
    before = tree(workplace)
    text = complaint(row.args, monkeypatch, capsys)
    check_complaint(text, row.says)
    assert tree(workplace) == before, "something was changed or left behind"


@pytest.mark.parametrize("row", [row for row in ROWS if row.what in SUBPROCESS], ids=lambda row: row.what)
def test_a_mistake_in_a_process_of_its_own(row: Row, workplace: Path, finished_run: Path) -> None:
    if row.needs_run:
        shutil.copytree(finished_run, workplace / "run")
    row.prepare(workplace)
    before = tree(workplace)
    environment = {**os.environ, "PYTHONPATH": str(workplace), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "generalist", *row.args]
    done = subprocess.run(command, cwd=workplace, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    check_complaint(done.stderr, row.says)
    assert tree(workplace) == before


def test_the_canary_sings_where_code_is_trusted(workplace: Path) -> None:
    """The trap works: what the table proves is that nobody stepped into it."""
    with pytest.raises(GeneralistError):
        train("base.yaml", overrides=["data.name=canary_code:thing"], out="new", trust_code=True)
    assert (workplace / "canary").exists()
    (workplace / "canary").unlink()
    pickle.loads(pickle.dumps(Hostile()))
    assert (workplace / "canary").exists()


def test_the_table_is_large_and_names_each_row_once() -> None:
    assert len(ROWS) >= 60
    assert len({row.what for row in ROWS}) == len(ROWS)
    assert {row.what for row in ROWS} >= SUBPROCESS


# -- random damage: refused or harmless, never a traceback -----------------------------------------------------------


@pytest.mark.parametrize("damage", [flip, cut], ids=["flipped", "cut"])
def test_a_damaged_recipe(
    damage: Callable[[bytes, int], bytes],
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A device that is not there stops those that are still sound."""
    outcomes = set()
    for seed in range(120):
        (workplace / "bad.yaml").write_bytes(damage(BASE.encode(), seed))
        before = tree(workplace)
        text = complaint(["train", "bad.yaml", "--device", "cuda:99"], monkeypatch, capsys)
        check_complaint(text, ())
        assert tree(workplace) == before
        outcomes.add("recipe" if text.startswith("error: recipe:") else "device")
    assert "recipe" in outcomes


def survives(read: Callable[[], object]) -> bool:
    """Whether it is read at all; the one failure allowed is a clear one."""
    try:
        read()
    except GeneralistError:
        return False
    return True


def test_damaged_weights(tmp_path: Path, finished_run: Path) -> None:
    content = (finished_run / "model.safetensors").read_bytes()
    path = tmp_path / "bad.safetensors"
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for seed in range(150):
        path.write_bytes(flip(content, seed, count=1 + seed % 3, within=header))
        survives(lambda: load(path))
        path.write_bytes(cut(content, seed))
        assert not survives(lambda: load(path))


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({}, "does not say which network"),
        ([], "damaged header"),
        ({"model": {"name": "canary_code:thing"}, "classes": ["a", "b"], "shape": [1, 8, 8]}, "--trust-code"),
        ({"model": {"name": "small"}, "classes": ["a", "b"], "shape": [10**9, 8, 8]}, "does not say which network"),
        ({"model": {"name": "small"}, "classes": ["a", "b"], "shape": "abc"}, "does not say which network"),
        ({"model": {"name": "small"}, "classes": ["a", "b"], "shape": [1, 8, float("inf")]}, "does not say"),
        ({"model": {"name": "small"}, "classes": 5, "shape": [1, 8, 8]}, "does not say which network"),
        ({"model": {"name": "small", "wdth": 1}, "classes": ["a"], "shape": [1, 8, 8]}, "does not say which network"),
        ({"model": {"name": "x:y", "width": 9}, "classes": ["a"], "shape": [1, 8, 8]}, "to: model: `width` belongs to"),
        ({"model": {"name": "small"}, "classes": ["a"], "shape": [1, 8, 8]}, "at least 2 classes"),
        ({"model": {"name": "small"}, "classes": ["a", "b"], "shape": [1, 8, 8]}, "do not fit this architecture"),
    ],
)
def test_a_weights_file_that_lies_about_itself(workplace: Path, about: Any, says: str) -> None:
    path = workplace / "lie.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"generalist": json.dumps(about)})
    with pytest.raises(GeneralistError, match=says):
        load(path)
    assert not (workplace / "canary").exists()


@pytest.mark.parametrize("honest", [False, True], ids=["checksum left", "checksum renewed"])
def test_damaged_checkpoints(tmp_path: Path, finished_run: Path, honest: bool) -> None:
    for seed in range(40):
        here = tmp_path / str(seed)
        shutil.copytree(finished_run / "checkpoints", here / "run" / "checkpoints")
        damage_checkpoints(here, lambda content, seed=seed: (flip, cut)[seed % 2](content, seed), honest=honest)
        read = survives(lambda here=here: load_newest(RunDirectory(here / "run"), warn=lambda text: None))
        assert honest or not read
        shutil.rmtree(here)


def test_a_damaged_npz(tmp_path: Path) -> None:
    path = save_npz(tmp_path)
    content = path.read_bytes()
    options = DataOptions(extra=ExtraOptions(file=str(path), ratio=0.5))
    assert survives(lambda: load_splits(options))
    for seed in range(100):
        path.write_bytes((flip, cut)[seed % 2](content, seed))
        survives(lambda: load_splits(options))


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_damaged_data_files(tmp_path: Path, name: str) -> None:
    {"mnist": save_mnist, "cifar10": save_cifar10}[name](tmp_path)
    options = DataOptions(name=name, root=str(tmp_path / "data"))
    assert survives(lambda: load_splits(options))
    files = sorted(path for path in (tmp_path / "data").rglob("*") if path.is_file())
    for seed in range(60):
        path = files[seed % len(files)]
        content = path.read_bytes()
        path.write_bytes(flip(content, seed, within=16) if seed % 3 else cut(content, seed))
        survives(lambda: load_splits(options))
        path.write_bytes(content)
