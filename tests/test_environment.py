"""What a run records of the code that it ran on, and the switches that it puts back."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from training_helpers import tiny_recipe, tiny_splits

from generalist.training import environment


def git(folder: Path, *args: str) -> str:
    nobody = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    name = {f"GIT_{role}_{what}": "nobody" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    command = ["git", "-C", str(folder), *args]
    return subprocess.run(
        command, env={**os.environ, **nobody, **name}, check=True, capture_output=True, text=True
    ).stdout


def test_the_commit_is_that_of_the_package_and_of_no_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment often lies within a project of the user's own, whose commit says nothing of this code."""
    installed = tmp_path / ".venv" / "environment.py"
    installed.parent.mkdir()
    installed.write_text("")
    (tmp_path / "theirs.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "theirs.py")
    git(tmp_path, "commit", "-q", "-m", "theirs")
    monkeypatch.setattr(environment, "__file__", str(installed))
    splits, cpu = tiny_splits(), torch.device("cpu")
    assert environment.describe(splits, cpu, 0)["commit"] is None
    git(tmp_path, "add", "-f", str(installed))
    git(tmp_path, "commit", "-q", "-m", "ours")
    assert environment.describe(splits, cpu, 0)["commit"] == git(tmp_path, "rev-parse", "HEAD").strip()


def test_switches_are_put_back() -> None:
    before = torch.get_num_threads()
    options = tiny_recipe(train={"deterministic": True, "threads": 2}).train
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with environment.switches(options, torch.device("cpu")):
            assert torch.get_num_threads() == 2
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_num_threads() == before
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
