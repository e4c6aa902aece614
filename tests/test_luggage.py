"""benchmarks/luggage.py: experiments that are carried to another machine go on there."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import shutil
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from generalist import api
from generalist.core.errors import GeneralistError
from generalist.core.run import RunDirectory
from generalist.training.artefacts import files_of, load_weights

PROGRAMS = Path(__file__).parents[1] / "benchmarks"
MIB = 1 << 20
PLAN = {
    "set": {"train.epochs": 2, "model.width": 4, "validation.steps": 2, "train.snapshots.every": 1},
    "evaluate": ["--attacks natural"],
    "experiments": {
        "d": {"recipe": "digits-d", "set": {"validation.rule": "last"}},
        "branch": {"like": "d", "from": "d@1#global"},
    },
}
PACKED = [
    *("runs/d/last.safetensors", "runs/d/model.safetensors"),
    *("runs/d/snapshots/1/global.safetensors", "runs/d/snapshots/2/global.safetensors"),
]


@pytest.fixture
def luggage(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module("luggage")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What experiments.py leaves when `d` is trained and evaluated."""
    out = tmp_path_factory.mktemp("work") / "out"
    changes = {**PLAN["set"], "validation.rule": "last"}  # type: ignore[dict-item]
    api.train("digits-d", overrides=changes, out=out / "runs" / "d", device="cpu")
    api.evaluate(out / "runs" / "d", attacks=["natural"], device="cpu", out=out / "runs" / "d" / "evaluation")
    return out


@pytest.fixture
def made(trained: Path, tmp_path: Path, luggage: ModuleType) -> tuple[Path, Path]:
    """A copy of it that says what was run, and the plan."""
    work = tmp_path / "out"
    shutil.copytree(trained, work)
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(PLAN, sort_keys=False))
    (work / "logs").mkdir()
    steps = experiments(plan, work).steps_of("d")
    (work / "logs" / "d.log").write_text("".join(f"$ {step.command}\n" for step in steps))
    lines = [{"name": "d", "step": s.kind, "exit": 0, "seconds": 1, "commit": "", "jobs": 1} for s in steps]
    whole = [line | {"command": step.command} for line, step in zip(lines, steps, strict=True)]
    (work / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in whole))
    return work, plan


def experiments(plan: Path, out: Path) -> Any:
    program = importlib.import_module("experiments")
    return program.Experiments(program.read_plan(plan), program.parse([str(plan), "--out", str(out)]))


def test_what_was_carried_goes_on_where_it_was(made: tuple[Path, Path], luggage: ModuleType, tmp_path: Path) -> None:
    work, plan = made
    pieces = luggage.pack(work, tmp_path / "parcels", piece_mib=0.005)
    assert len(pieces) > 2 and all(piece.stat().st_size <= 0.005 * MIB for piece in pieces)
    work.rename(tmp_path / "gone")
    assert sorted(luggage.unpack(tmp_path / "parcels", work)) == PACKED

    there = experiments(plan, work)
    assert there.next_step("d") is None and there.waits_for("branch") is None
    record = there.record("d")
    assert record["environment"]["rounded"] == "float16"
    assert [each["right"].keys() for each in record["evaluations"]] == [{"natural"}]
    for name in PACKED:
        (before, about), (after, header) = load_weights(tmp_path / "gone" / name), load_weights(work / name)
        assert about == header
        for key, tensor in before.items():
            assert after[key].dtype == tensor.dtype
            assert torch.equal(after[key], tensor.half().float() if tensor.is_floating_point() else tensor)
    api.evaluate(work / "runs" / "d", attacks=["natural"], samples=10, device="cpu")
    changes = {**PLAN["set"], "train.start_epoch": 1}  # type: ignore[dict-item]
    source = f"{work / 'runs' / 'd'}@1#global"
    assert api.train("digits-d", overrides=changes, start=source, out=tmp_path / "branch", device="cpu").last.is_file()


def test_networks_are_packed_once_and_only_as_many_as_there_is_room_for(
    made: tuple[Path, Path], luggage: ModuleType, tmp_path: Path
) -> None:
    work, _ = made
    size = len(luggage.rounded(work / PACKED[0])) / MIB
    with pytest.raises(GeneralistError, match=r"--mib .*snapshots/1/global\.safetensors alone has"):
        luggage.pack(work, tmp_path / "small", mib=size / 2)
    for number, packed in enumerate((PACKED[2:3], [*PACKED[:2], PACKED[3]], []), start=1):
        folder = tmp_path / str(number)
        pieces = luggage.pack(work, folder, mib=1.9 * size)
        assert pieces[0].name == f"luggage-{number:04d}-1-of-1.part"
        assert sorted(luggage.unpack(folder, tmp_path / f"{number}-out")) == packed
        assert (tmp_path / f"{number}-out" / "steps.jsonl").is_file()
    luggage.pack(work, tmp_path / "again", again=True)
    assert len(luggage.unpack(tmp_path / "again", tmp_path / "again-out")) == 4


def test_snapshots_are_those_that_there_were(made: tuple[Path, Path], luggage: ModuleType, tmp_path: Path) -> None:
    """A source without an epoch is the last snapshot; in a training that has not ended its best network may be one."""
    work, _ = made
    for ended in (True, False):
        if not ended:
            (work / "runs/d/last.safetensors").unlink()
            shutil.rmtree(work / "runs/d/snapshots/2")
            shutil.copy(work / "runs/d/snapshots/1/global.safetensors", work / "runs/d/model.safetensors")
        luggage.pack(work, tmp_path / f"parcels-{ended}", again=True)
        luggage.unpack(tmp_path / f"parcels-{ended}", tmp_path / f"out-{ended}")
        run = RunDirectory(tmp_path / f"out-{ended}" / "runs/d")
        assert files_of(run, None, []) == {"global": run.snapshots / ("2" if ended else "1") / "global.safetensors"}


def test_parcels_that_are_not_whole_are_refused(made: tuple[Path, Path], luggage: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(GeneralistError, match="holds no experiments"):
        luggage.pack(tmp_path / "nothing", tmp_path)
    for wrong in ({"mib": 0}, {"piece_mib": -1}):
        with pytest.raises(GeneralistError, match="--mib and --piece-mib are above 0"):
            luggage.pack(made[0], tmp_path / "none", **wrong)
    assert not (tmp_path / "none").exists()
    with pytest.raises(GeneralistError, match="holds no parcels"):
        luggage.unpack(tmp_path, tmp_path / "new")
    pieces = luggage.pack(made[0], tmp_path / "parcels", piece_mib=0.005)
    content = pieces[1].read_bytes()
    pieces[1].write_bytes(content[:-100])
    with pytest.raises(GeneralistError, match=r"parcel 1 in .* is damaged: delete luggage-0001-1-of-"):
        luggage.unpack(tmp_path / "parcels", tmp_path / "new")
    pieces[1].unlink()
    with pytest.raises(
        GeneralistError, match="of parcel 1 piece 2 is missing; without it delete the others, and pack --again"
    ):
        luggage.unpack(tmp_path / "parcels", tmp_path / "new")
    for piece in pieces:
        piece.unlink(missing_ok=True)
    luggage.pack(made[0], tmp_path / "parcels", again=True)
    assert sorted(luggage.unpack(tmp_path / "parcels", tmp_path / "new")) == PACKED


@pytest.mark.parametrize("name", ["../x.json", "/x.json", "a/x.json", "runs/d/x.py", "logs/../x.log"])
def test_a_parcel_with_other_files_is_refused(name: str, luggage: ModuleType, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as parcel:
        parcel.addfile(tarfile.TarInfo(name), io.BytesIO())
    content = buffer.getvalue()
    (tmp_path / "luggage-0001-1-of-1.part").write_bytes(hashlib.sha256(content).digest() + content)
    with pytest.raises(GeneralistError, match="none of the files that are packed"):
        luggage.unpack(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command(made: tuple[Path, Path], luggage: ModuleType, tmp_path: Path, capsys: Any) -> None:
    work, _ = made
    luggage.main(["pack", str(work), "--into", str(tmp_path / "parcels")])
    assert "luggage-0001-1-of-1.part" in capsys.readouterr().out
    luggage.main(["unpack", str(tmp_path / "parcels"), "--into", str(tmp_path / "new")])
    assert sorted(capsys.readouterr().out.split()) == PACKED
    with pytest.raises(SystemExit) as ended:
        luggage.main(["unpack", str(work), "--into", str(tmp_path / "new")])
    assert ended.value.code == 2
