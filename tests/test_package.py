"""The wheel holds everything and runs outside the source tree; the house's rules hold for the tree itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import generalist

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
SHOW = """
import generalist, generalist.cli
print(generalist.__file__, flush=True)
for args in (["--version"], ["recipes", "show", "digits-t"]):
    generalist.cli.app(args, standalone_mode=False)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without the network from the running environment's hatchling."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_data_recipes_and_the_typing_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"generalist/py.typed", "generalist/data/digits.npz", "generalist/cli.py"} <= names
    assert {"generalist/report/report.css", "generalist/report/report.js"} <= names
    recipes = {f"generalist/recipes/{path.name}" for path in (ROOT / "src/generalist/recipes").glob("*.yaml")}
    assert len(recipes) > 20 and recipes <= names
    sweeps = {f"generalist/sweeps/{path.name}" for path in (ROOT / "src/generalist/sweeps").glob("*.yaml")}
    assert len(sweeps) > 15 and sweeps <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "tests/" in name or name.endswith(".pyc")]
    assert wheel.name.startswith(f"generalist_at-{generalist.__version__}-")


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment outside the tree with the wheel and, borrowed, the libraries that it needs; returns its python.

    The libraries come by links, one by one, so that the editable install of the source tree stays behind.
    """
    folder = tmp_path_factory.mktemp("outside")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    borrowed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    for entry in sorted(entry for directory in borrowed for entry in directory.iterdir()):
        if "generalist" not in entry.name.lower() and entry.suffix != ".pth" and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    zipfile.ZipFile(wheel).extractall(packages)
    return folder / "bin" / "python"


def run_outside(python: Path, folder: Path, *args: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
    command = [str(python), *args]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_works_outside_the_tree(outside: Path, tmp_path: Path) -> None:
    shown = run_outside(outside, tmp_path, "-c", SHOW)
    where, version, recipe = shown.split("\n", 2)
    assert Path(where).is_relative_to(outside.parents[1]) and not Path(where).is_relative_to(ROOT)
    assert version == f"generalist {generalist.__version__}"
    assert recipe == (ROOT / "src/generalist/recipes/digits-t.yaml").read_text()
    args = ["train", "digits-t", "--set", "train.epochs=1", "--set", "validation.steps=1", "--out", "run"]
    run_outside(outside, tmp_path, "-m", "generalist", *args)
    assert (tmp_path / "run" / "last.safetensors").is_file()


def test_the_command_is_an_entry_point(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "generalist = generalist.__main__:main" in archive.read(name).decode()


# -- the rules of the house ------------------------------------------------------------------------------------------


def tracked_files() -> list[Path]:
    """The files of the project: those under version control, and those that soon will be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a checkout")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_rooms_import_only_downward() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run([*command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "1 kept, 0 broken" in done.stdout


def test_no_path_of_a_machine_is_in_a_file() -> None:
    """Home and temporary directories, and this checkout's own place."""
    here = re.escape(str(ROOT))
    pattern = re.compile(rf"{here}\b|/home/[a-z]\w*/|/Users/\w+/|/(root|tmp)/\w".encode())
    for path in tracked_files():
        found = pattern.search(path.read_bytes()) if path != Path(__file__) else None
        assert found is None, f"{path.relative_to(ROOT)} has {found[0]!r}" if found else ""


def test_files_are_short_enough_to_read() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "src").rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_no_randomness_but_our_own() -> None:
    """Generators have state; ours has none. Building a model is the one place that seeds torch's."""
    pattern = re.compile(r"np\.random|numpy\.random|torch\.(Generator|manual_seed|rand\(|randn\(|randint|randperm)")
    offenders = [path.name for path in (ROOT / "src").rglob("*.py") if pattern.search(path.read_text())]
    assert offenders == []


@pytest.mark.parametrize(
    ("own", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")]
)
def test_waiting_threads_leave_the_cores_to_others(own: dict[str, str], expected: str) -> None:
    """Unless the user has a wish of his own."""
    mine = {name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}
    program = "import generalist, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run([sys.executable, "-c", program], env=mine | own, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
