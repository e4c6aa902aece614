"""Folders with files that are no whole images, and how many hands decode the others."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sweep_helpers import wait_until

from generalist import api, train
from generalist.core.errors import DataError, RecipeError
from generalist.core.random import integers
from generalist.data import corrupt, decode
from generalist.data.augment import AugmentOptions
from generalist.data.decode import default_workers, problem_of
from generalist.data.folder import load_folder, make_resident
from generalist.data.options import DataOptions, load_splits
from generalist.data.sets import iterate
from generalist.recipe import load_recipe


def write_image(path: Path, key: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = integers(256, key, "test/corrupt", shape=(30, 40, 3)).to(torch.uint8).numpy()
    Image.fromarray(pixels).save(path)
    return path


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_bomb() -> bytes:
    """A few hundred bytes that say they are 30,000 x 30,000 pixels."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", zlib.compress(bytes(1000))) + _chunk(b"IEND", b"")


BAD = ["truncated.jpg", "truncated.png", "empty.jpg", "text.png", "bomb.png"]


def spoil(folder: Path) -> None:
    """One file of each kind that can go wrong."""
    for name in ("truncated.jpg", "truncated.png"):
        whole = write_image(folder / name, key=50).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) * 2 // 3])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.png").write_text("this is no image")
    (folder / "bomb.png").write_bytes(png_bomb())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GENERALIST_DATA", str(tmp_path / "cache"))
    base = tmp_path / "images"
    for number in range(8):
        write_image(base / "train/cat" / f"{number}.png", key=number)
        write_image(base / "train/dog" / f"{number}.jpg", key=20 + number)
    for number in range(2):
        write_image(base / "val/dog" / f"{number}.png", key=40 + number)
    return base


@pytest.mark.parametrize("name", BAD)
def test_each_kind_is_found(name: str, root: Path) -> None:
    spoil(root / "train/cat")
    problem = problem_of(root / "train/cat" / name)
    assert problem and str(root) not in problem and "\n" not in problem
    assert problem_of(root / "train/cat/0.png") is None and problem_of(root / "train/dog/0.jpg") is None


@pytest.mark.parametrize("name", BAD)
def test_refuse_names_the_file_and_the_way_out(name: str, root: Path) -> None:
    spoil(root / "train/dog")
    images, _ = load_folder(root, resolution=16)
    position = images.files.index(root / "train/dog" / name)
    with pytest.raises(DataError, match=name) as caught:
        list(iterate(images, [torch.tensor([0, position])], options=AugmentOptions()))
    assert "data.corrupt: skip" in str(caught.value) or "shrink it" in str(caught.value)


def test_skip_leaves_them_out_and_says_which(root: Path) -> None:
    clean, _ = load_folder(root, resolution=16)
    spoil(root / "train/cat")
    (root / "val/dog/0.png").write_bytes(b"")
    options = DataOptions(name="folder", root=str(root), resolution=16, corrupt="skip")
    splits = load_splits(options)
    assert splits.test is not None and len(splits.test) == 1
    assert len(splits.train) == 16 and splits.train.labels.tolist() == clean.labels.tolist()
    assert splits.train.checksum() == clean.checksum()
    assert torch.equal(splits.train.batch(torch.arange(16)).x, clean.batch(torch.arange(16)).x)
    assert sorted(line.partition(": ")[0] for line in splits.skipped["train"]) == sorted(
        f"train/cat/{name}" for name in BAD
    )
    train_note, test_note = splits.notes()
    assert train_note.startswith("train: 5 corrupt image(s) left out: train/cat/")
    assert test_note.startswith("test: 1 corrupt image(s) left out: val/dog/0.png: ")
    assert load_splits(options.model_copy(update={"corrupt": "refuse"})).notes() == []
    resident = load_splits(options.model_copy(update={"resident": True}))
    assert len(resident.train) == 16 and resident.notes() == splits.notes()


def test_what_was_found_is_remembered_until_a_file_changes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(root / "train/cat")
    read: list[Path] = []
    original = decode.problem_of
    monkeypatch.setattr(decode, "problem_of", lambda path: read.append(path) or original(path))
    cache = tmp_path / "memory"
    settings: dict[str, Any] = {"resolution": 16, "corrupt": "skip", "cache": cache}
    first, _ = load_folder(root, **settings)
    assert len(read) == 16 + 5 + 2
    again, _ = load_folder(root, **settings)
    assert len(read) == 23 and again.skipped == first.skipped
    (root / "train/cat/empty.jpg").write_bytes(b"x")
    changed, _ = load_folder(root, **settings)
    assert len(read) == 23 + 21 and len(changed) == 16
    for file in cache.glob("*.json"):  # a memory that somebody spoilt is not believed
        file.write_text('{"../../etc/passwd": 1}')
    assert load_folder(root, **settings)[0].skipped == changed.skipped
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the directory should be")
    assert len(load_folder(root, **{**settings, "cache": blocked})[0]) == 16


def test_what_the_system_refuses_is_no_damage(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image left out for a missing permission would stay out, remembered, when the permission is there."""
    original = Image.open

    def refuse(path: Path, **how: Any) -> Image.Image:
        if path.name == "3.png":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, **how)

    cache = tmp_path / "memory"
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", refuse)
        with pytest.raises(DataError, match=r"3\.png: Permission denied"):
            load_folder(root, resolution=16, corrupt="skip", cache=cache)
    assert len(load_folder(root, resolution=16, corrupt="skip", cache=cache)[0]) == 16


def test_a_folder_of_nothing_but_damage_is_refused(root: Path) -> None:
    for path in (root / "train").rglob("*.*"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of 16 images can be read"):
        load_folder(root, resolution=16, corrupt="skip")


def test_training_and_evaluation_say_what_they_left_out(root: Path, tmp_path: Path) -> None:
    spoil(root / "train/cat")
    (root / "val/dog/0.png").write_bytes(b"")
    said: list[str] = []
    changes = [
        f"data={json.dumps({'name': 'folder', 'root': str(root), 'resolution': 8, 'corrupt': 'skip'})}",
        "model.width=4",
        "train={epochs: 1, batch_size: 4}",
        "validation={images: 4, steps: 1}",
    ]
    run = train(
        "digits-d", overrides=changes, out=tmp_path / "run", device="cpu", listener=api.Listener(say=said.append)
    )
    assert sum("corrupt image(s) left out" in line for line in said) == 2
    environment = json.loads(run.environment.read_text())
    assert len(environment["skipped"]["train"]) == 5 and len(environment["skipped"]["test"]) == 1
    found = api.evaluate(run, attacks=["natural"], out=tmp_path / "evaluation", device="cpu")
    assert found["natural"].total == 1
    assert any("test: 1 corrupt image(s) left out" in line for line in found.summary["warnings"])


def test_the_fields_belong_to_folders() -> None:
    for change in ("data.corrupt=skip", "data.decoder=processes"):
        with pytest.raises(RecipeError, match="is for `name: folder`"):
            load_recipe("digits-d", overrides=[change])


# -- many hands -------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # every process imports PyTorch
def test_processes_decode_as_threads_do(root: Path) -> None:
    """And exactly what they are asked for; an error in one of them arrives as it is."""
    threads, _ = load_folder(root, resolution=16, workers=2)
    (root / "train/dog/7.jpg").write_bytes(b"")
    processes, _ = load_folder(root, resolution=16, workers=2, decoder="processes")
    try:
        batches = [torch.tensor([3, 14, 0]), torch.tensor([9]), torch.tensor([1, 2, 4, 5, 6])]
        made = [
            list(iterate(images, batches, epoch=3, seed=5, options=AugmentOptions())) for images in (threads, processes)
        ]
        for one, other in zip(*made, strict=True):
            assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y) and torch.equal(one.index, other.index)
            assert all(torch.equal(one.augmentation[name], other.augmentation[name]) for name in ("flip", "box"))
        with pytest.raises(DataError, match=r"7\.jpg"):
            processes.batch(torch.tensor([15]))
        for process in list(processes.decoder.pool._processes.values()):  # type: ignore[attr-defined]
            process.kill()
        batches = [torch.tensor([0, 1])] * 50  # the pool may notice only after a few
        with pytest.raises(DataError, match="a process that decodes images died"):
            list(iterate(processes, batches))
    finally:
        processes.decoder.pool.shutdown()


PARENT = """
import signal, sys
from pathlib import Path
import torch
from generalist.data.folder import load_folder

if __name__ == "__main__":
    images, _ = load_folder(Path(sys.argv[1]), resolution=16, workers=1, decoder="processes")
    images.batch(torch.tensor([0]))
    signal.signal(signal.SIGINT, lambda *_: None)  # as training, which finishes its iteration first
    print(*images.decoder.pool._processes, flush=True)
    sys.stdin.readline()
    print(len(images.batch(torch.tensor([0, 1, 2])).x), flush=True)
    sys.stdin.readline()
"""


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"}


@pytest.mark.slow  # every process imports PyTorch
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
def test_processes_outlive_a_ctrl_c_and_not_their_parent(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, str(script), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdin is not None and parent.stdout is not None
    workers: list[int] = []
    try:
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert workers
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does, to the whole group
        time.sleep(0.5)
        assert all(map(running, workers))
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "3\n"
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(map(running, workers)), seconds=20)
    finally:
        parent.kill()
        parent.wait()
        for worker in filter(running, workers):
            os.kill(worker, signal.SIGKILL)


def test_only_the_samples_asked_for_are_decoded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is given its slice of a batch reads no other file."""
    read: list[str] = []
    original = decode.decode
    monkeypatch.setattr(decode, "decode", lambda path, **how: read.append(path.name) or original(path, **how))
    images, _ = load_folder(root, resolution=16, workers=1)
    whole = torch.tensor([0, 9, 3, 12])
    parts = [images.augmented(whole[rank::2], epoch=1, seed=0, options=AugmentOptions()) for rank in range(2)]
    assert sorted(read) == sorted(images.files[i].name for i in whole.tolist())
    together = images.augmented(whole, epoch=1, seed=0, options=AugmentOptions())
    for rank, part in enumerate(parts):
        assert torch.equal(part.x, together.x[rank::2])


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_of_the_cpu(root: Path) -> None:
    images, _ = load_folder(root, resolution=16, workers=2)
    batches = [torch.tensor([number, number + 1]) for number in range(12)]
    made = [list(iterate(each, batches, options=AugmentOptions())) for each in (images, images.to("cuda"))]
    for one, other in zip(*made, strict=True):
        assert other.x.device.type == "cuda" and torch.equal(one.x, other.x.cpu()) and torch.equal(one.y, other.y.cpu())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_prefetching_keeps_the_order(root: Path, count: int) -> None:
    images, _ = load_folder(root, resolution=8, workers=2)
    batches = [torch.tensor([number, number + 1]) for number in range(count)]
    assert [batch.index.tolist() for batch in iterate(images, batches)] == [b.tolist() for b in batches]


def test_whoever_stops_early_waits_for_nothing(root: Path) -> None:
    images, _ = load_folder(root, resolution=8, workers=1)
    made: list[int] = []

    class Counting:
        resident = False

        def batch(self, index: torch.Tensor) -> Any:
            made.append(int(index[0]))
            return images.batch(index)

    feed = iterate(Counting(), [torch.tensor([number]) for number in range(16)])  # type: ignore[arg-type]
    next(feed)
    feed.close()
    assert len(made) <= 4


def test_workers_fit_the_cores_that_a_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_workers() == 12
    for processes, expected in (("4", 3), ("24", 1), ("none", 12), ("0", 12)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert default_workers() == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert default_workers() == 16


def test_a_resident_folder_is_the_streamed_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generalist.data.folder.RESIDENT_CHUNK", 5)
    images, _ = load_folder(root, resolution=16)
    assert torch.equal(make_resident(images).batch(torch.arange(16)).x, images.batch(torch.arange(16)).x)


def test_reading_alone_needs_no_memory() -> None:
    assert corrupt.find_problems([], [], lambda files: [], cache=None) == {}
