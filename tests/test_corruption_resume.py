"""Corruptions that were stopped: nothing finished is measured again, nothing of another evaluation is taken over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_out_of_distribution import linear, official
from torch import Tensor, nn

import generalist
from generalist.core.errors import GeneralistError, RunError
from generalist.data.sets import from_arrays
from generalist.evaluation.counts import Count, open_counts
from generalist.evaluation.out_of_distribution import FILE
from generalist.evaluation.suite import Moment

WISH: dict[str, Any] = {"corruptions": ["contrast", "fog"], "perturbations": ["tilt", "scale"]}
BATCHES = 2 * 5 * 3 + 2 * 12
"""Twelve images in batches of 5: three for each corruption and severity; sequences come one by one."""


class Counted(nn.Module):
    """A network that counts what it is asked, and can fail at some question."""

    def __init__(self, inputs: int = 64, classes: int = 10, *, stop: int = -1) -> None:
        super().__init__()
        self.inner = linear(inputs, classes)
        self.asked, self.stop = 0, stop

    def forward(self, x: Tensor) -> Tensor:
        if self.asked == self.stop:
            raise KeyboardInterrupt
        self.asked += 1
        logits: Tensor = self.inner(x)
        return logits


def evaluate(out: Path, model: nn.Module | None = None, **changes: Any) -> Path:
    """The directory of an evaluation of twelve digits."""
    settings = {"attacks": ["natural"], "samples": 12, "batch_size": 5, "resume": True, **WISH, **changes}
    found = generalist.evaluate(model or Counted(), "digits", out=out, **settings)
    return Path(found.summary["directory"])


def asked_for(out: Path, **changes: Any) -> int:
    """How often the network is asked when the evaluation goes on, beyond what is asked where nothing is left."""
    model, idle = Counted(), Counted()
    evaluate(out, model, **changes)
    evaluate(out, idle, **changes)
    return model.asked - idle.asked


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """corruptions.json of an evaluation that nobody stopped."""
    return (evaluate(tmp_path / "whole") / FILE).read_bytes()


def test_nothing_finished_is_measured_again(tmp_path: Path, whole: bytes) -> None:
    out = tmp_path / "out"
    folder = evaluate(out, corruptions=None, perturbations=False)  # the attacks are done
    before = Counted()
    evaluate(out, before, corruptions=None, perturbations=False)
    for more in (7, 13, 20):  # within the first batch, in the second, among the sequences
        with pytest.raises(KeyboardInterrupt):
            evaluate(out, Counted(stop=before.asked + more))
        assert not (folder / FILE).exists()
    assert asked_for(out) == BATCHES - 7 - 13 - 20
    assert (folder / FILE).read_bytes() == whole


def test_a_file_cut_at_any_byte(tmp_path: Path) -> None:
    path, identity = tmp_path / "counts.jsonl", {"weights": "w\u00fc", "seed": 0}
    wanted = {("fog/1", batch): Count(batch, 9) for batch in range(3)} | {("tilt", 0): Count(7, 62, 3)}

    def go_on() -> Count:
        with open_counts(path, identity, resume=True) as counts:
            for (what, batch), count in wanted.items():
                if (what, batch) not in counts:
                    counts.add(what, batch, count)
            return counts.total("fog/1", 3) + counts.total("tilt", 1)

    assert go_on() == Count(10, 89, 3)
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        assert go_on() == Count(10, 89, 3)
        assert path.read_bytes() == data


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with (
        open_counts(tmp_path / "counts.jsonl", {}, resume=True),
        pytest.raises(RunError, match="in use by another process"),
        open_counts(tmp_path / "counts.jsonl", {}, resume=True),
    ):
        pass


def test_a_result_that_was_cut_off_is_written_again_from_what_was_counted(tmp_path: Path, whole: bytes) -> None:
    folder = evaluate(tmp_path / "out")
    (folder / FILE).write_bytes(whole[:100])
    assert asked_for(tmp_path / "out") == 0
    assert (folder / FILE).read_bytes() == whole


def test_asked_for_more_only_that_is_measured(tmp_path: Path, whole: bytes) -> None:
    folder = evaluate(tmp_path / "out", corruptions=["fog"], perturbations=["scale"])
    assert asked_for(tmp_path / "out") == BATCHES // 2
    assert (folder / FILE).read_bytes() == whole
    assert asked_for(tmp_path / "out", corruptions=["fog"], perturbations=False) == 0
    found, before = json.loads((folder / FILE).read_bytes()), json.loads(whole)
    assert found["corruptions"]["corruptions"] == before["corruptions"]["corruptions"], "nothing measured is lost"
    assert found["perturbations"] == before["perturbations"]


class Other(Counted):
    """The same network by another name, which is another one to a checksum."""


def test_what_belongs_to_another_evaluation_is_not_taken_over(tmp_path: Path) -> None:
    evaluate(tmp_path / "out")
    for changes in ({"seed": 1}, {"samples": 13}, {"batch_size": 6}):
        fresh, beside = (evaluate(tmp_path / name, **changes) / FILE for name in (f"new{changes}", "out"))
        assert fresh.read_bytes() == beside.read_bytes()
    other = Other()
    evaluate(tmp_path / "out", other)
    assert other.asked > BATCHES


def test_another_batch_size_of_the_same_attacks(tmp_path: Path) -> None:
    """Left out it is 12 of twelve images for the attacks, and 500 for the corruptions."""
    first = evaluate(tmp_path / "out", batch_size=None, perturbations=False)
    assert evaluate(tmp_path / "out", batch_size=12, perturbations=False) == first
    assert asked_for(tmp_path / "out", batch_size=None, perturbations=False) == 0
    assert len(list(first.glob("corruptions-*.jsonl"))) == 2


def damaged(line: int, change: Callable[[str], str]) -> Callable[[list[str]], None]:
    def damage(lines: list[str]) -> None:
        lines[line] = change(lines[line])

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damaged(0, lambda line: line.replace('"seed":0', '"seed":1')), "another evaluation"),
        (damaged(0, lambda line: "[]\n"), "another evaluation"),
        (damaged(0, lambda line: "\xff\n"), "another evaluation"),
        (damaged(2, lambda line: "{\n"), "line 3 of .* is damaged"),
        (
            damaged(2, lambda line: '{"what": "fog/1", "batch": 0, "right": 5, "answers": 4, "flips": 0}\n'),
            "answers can be right or flip",
        ),
        (
            damaged(2, lambda line: '{"what": "fog/1", "batch": 0, "right": 0, "answers": 0, "flips": 0}\n'),
            "answers can be right or flip",
        ),
        (damaged(2, lambda line: '{"what": "fog/1", "batch": -1, "right": 1, "answers": 4, "flips": 0}\n'), "-1 is no"),
        (
            damaged(2, lambda line: '{"what": "fog/1", "batch": 0, "right": true, "answers": 4, "flips": 0}\n'),
            "True is no",
        ),
        (damaged(2, lambda line: "7\n"), "damaged"),
    ],
)
def test_damage_is_told(tmp_path: Path, damage: Callable[[list[str]], None], says: str) -> None:
    folder = evaluate(tmp_path)
    (path,) = folder.glob("corruptions-*.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    damage(lines)
    path.write_text("".join(lines), encoding="latin-1")
    with pytest.raises(RunError, match=says):
        evaluate(tmp_path)


def test_without_resume_a_result_that_lies_there_is_replaced(tmp_path: Path, whole: bytes) -> None:
    folder = evaluate(tmp_path / "out")
    with pytest.raises(RunError, match="is already complete: --resume shows it without repeating anything"):
        evaluate(tmp_path / "out", resume=False)
    (folder / "records-1-of-1.jsonl").unlink()
    model = Counted()
    evaluate(tmp_path / "out", model, resume=False)
    assert model.asked > BATCHES and (folder / FILE).read_bytes() == whole


def test_official_files_that_were_exchanged_are_read_again(tmp_path: Path) -> None:
    labels = torch.arange(20) % 10
    official(tmp_path, labels.numpy())
    mine = from_arrays(torch.zeros(20, 3, 32, 32), labels, classes=[str(i) for i in range(10)])
    settings: dict[str, Any] = {"attacks": ["natural"], "corruptions": "fog", "official": tmp_path, "resume": True}

    def asked() -> int:
        model = Counted(3072)
        generalist.evaluate(model, mine, out=tmp_path / "out", **settings)
        return model.asked

    asked()
    idle = asked()
    file = tmp_path / "CIFAR-10-C" / "fog.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert asked() - idle == 5  # one batch for each severity
    assert asked() == idle


def test_progress_counts_on_from_the_attacks(tmp_path: Path) -> None:
    moments: list[Moment] = []
    evaluate(tmp_path, listener=moments.append)
    assert {moment.steps for moment in moments} == {2}
    places = {moment.what: moment.step for moment in moments}
    assert places == {"natural": 0, "corruptions": 1, "perturbations": 2}
    ends = {moment.what: moment for moment in moments}
    assert (ends["corruptions"].done, ends["corruptions"].total) == (120, 120)
    assert (ends["perturbations"].done, ends["perturbations"].total) == (24, 24)
    found = json.loads(next(tmp_path.rglob(FILE)).read_bytes())["corruptions"]["corruptions"]
    right = sum(row["correct"] for entry in found.values() for row in entry["severities"].values())
    assert ends["corruptions"].robust == right and ends["perturbations"].robust is None
    dones = [moment.done for moment in moments if moment.what == "corruptions"]
    assert dones == sorted(set(dones)) and len(dones) == 30


def test_progress_of_what_is_left(tmp_path: Path) -> None:
    evaluate(tmp_path, corruptions="fog", perturbations=False)
    moments: list[Moment] = []
    evaluate(tmp_path, perturbations=False, listener=moments.append)
    assert [(moment.what, moment.total) for moment in moments] == [("corruptions", 60)] * 15
    with pytest.raises(GeneralistError, match="unknown"):
        evaluate(tmp_path, corruptions="fogg", listener=moments.append)
