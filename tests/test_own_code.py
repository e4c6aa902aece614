"""Faults in code that came by import path are told as what they are: the user's, with the place where they lie."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from generalist import cli
from generalist.core import registry
from generalist.core.errors import GeneralistError
from generalist.core.registry import import_object

FILES = {
    "own_syntax.py": "def net(:\n",
    "own_name.py": "import math\nx = undefined\n",
    "own_needs.py": "import no_such_package\n",
    "own_data.py": """
from torch.utils.data import Dataset

class Broken(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, i):
        return {}["image"]

def data(split):
    return Broken()

def nothing(split):
    raise ValueError("no disk")
""",
    "own_objective.py": """
from generalist.objectives.at import AdversarialTraining

class Broken(AdversarialTraining):
    def loss(self, inputs, progress):
        return self.learner.forward(inputs.batch.x).nothing, {}
""",
}
TRAIN = ["train", "digits-at", "--trust-code", "--device", "cpu", "--set", "model.width=4", "--out", "run"]


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "IMPORTED_FROM", set())
    yield
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def complaint(args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["generalist", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "said", "hint"),
    [
        ("own_syntax:net", "SyntaxError: invalid syntax (own_syntax.py, line 1)", False),
        ("own_name:net", "NameError: name 'undefined' is not defined (own_name.py, line 2)", False),
        ("own_needs:net", "No module named 'no_such_package'", False),
        ("own_missing:net", "No module named 'own_missing'", True),
    ],
)
def test_a_module_that_cannot_be_imported(path: str, said: str, hint: bool) -> None:
    with pytest.raises(GeneralistError) as caught:
        import_object(path, trust_code=True)
    assert said in str(caught.value)
    assert ("PYTHONPATH=." in str(caught.value)) == hint


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        ("data", "own_data:data: item 0 fails: KeyError: 'image' (own_data.py, line 8)"),
        ("nothing", 'own_data:nothing("train") fails: ValueError: no disk (own_data.py, line 14)'),
    ],
)
def test_a_data_set_that_fails(
    thing: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = complaint([*TRAIN, "--set", f"data.name=own_data:{thing}"], monkeypatch, capsys)
    assert text == f"error: {said}\n"


def test_an_objective_that_fails_is_not_called_a_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What to mend is in the traceback, so that stays."""
    text = complaint(
        [*TRAIN, "--set", "learners.linf.objective=own_objective:Broken", "--set", "train.epochs=1"],
        monkeypatch,
        capsys,
    )
    assert "has no attribute 'nothing'" in text and "bug in generalist" not in text
    last = text.splitlines()[-1]
    assert last == f"the error is in your own code: look at {tmp_path / 'own_objective.py'}, line 6 first"
