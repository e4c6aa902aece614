"""Streamed folders: what is read, what is drawn, and what a hostile folder can do."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from generalist.core.errors import DataError
from generalist.core.random import integers
from generalist.data import decode as decoding
from generalist.data.augment import AugmentOptions
from generalist.data.decode import center_box, decode, random_box
from generalist.data.folder import load_folder, make_resident
from generalist.data.sets import iterate


def _write(path: Path, width: int = 40, height: int = 30, key: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = integers(256, key, "test/folder", shape=(height, width, 3)).to(torch.uint8).numpy()
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    base = tmp_path / "images"
    for number in range(4):
        _write(base / "train" / "cat" / f"{number}.png", key=number)
        _write(base / "train" / "dog" / f"{number}.JPG", width=20 + number, height=50, key=10 + number)
    _write(base / "val" / "dog" / "a.png", key=99)
    (base / "train" / "cat" / "notes.txt").write_text("no image")
    return base


def test_layout(root: Path) -> None:
    train, test = load_folder(root, resolution=16, workers=2)
    assert test is not None
    assert train.classes == test.classes == ["cat", "dog"]
    assert train.labels.tolist() == [0] * 4 + [1] * 4
    assert test.labels.tolist() == [1], "labels follow the train split's classes"
    assert train.shape == (3, 16, 16)
    assert not train.resident


def test_what_editors_leave_behind_is_no_data(root: Path) -> None:
    (root / "train" / ".ipynb_checkpoints").mkdir()
    (root / "train" / "cat" / "._1.png").write_text("no image")
    train, _ = load_folder(root, resolution=16, workers=2)
    assert train.classes == ["cat", "dog"] and len(train) == 8


def test_classes_that_cannot_be_learned_are_named(root: Path) -> None:
    (root / "train" / "emu").mkdir()
    with pytest.raises(DataError, match="train/emu has no images: add some, or remove the folder"):
        load_folder(root, resolution=16)
    _write(root / "alone" / "train" / "cat" / "1.png")
    with pytest.raises(DataError, match="alone/train has one class, 'cat': a classifier needs two"):
        load_folder(root / "alone", resolution=16)


def test_a_class_of_damaged_images_alone_cannot_be_learned(root: Path) -> None:
    for path in (root / "train" / "cat").glob("*.png"):
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match="train/cat has no images that can be read: add some, or remove the folder"):
        load_folder(root, resolution=16, corrupt="skip")


def test_images_are_not_left_out_unnoticed(root: Path) -> None:
    link = root / "train" / "cat" / "gone.png"
    link.symlink_to(root / "train" / "cat" / "absent.png")
    with pytest.raises(DataError, match=r"cat/gone\.png is a broken link"):
        load_folder(root, resolution=16)
    link.unlink()
    _write(root / "train" / "cat" / "more" / "1.png")
    with pytest.raises(DataError, match="cat/more is a folder inside a class folder: move its images up"):
        load_folder(root, resolution=16)
    shutil.rmtree(root / "train" / "cat" / "more")
    whole = load_folder(root, resolution=16)
    (root / "train" / "labels.csv").write_text("what lies there besides may stay")
    assert [len(split or ()) for split in load_folder(root, resolution=16)] == [len(split or ()) for split in whole]
    _write(root / "val" / "1.PNG")
    with pytest.raises(DataError, match=r"val/1\.PNG is next to the class folders: move it into one"):
        load_folder(root, resolution=16)


def test_names_that_are_no_text(root: Path) -> None:
    """A file's is bytes to the system, and said as well as it can be; a class's would go into every output."""
    cat = os.fsencode(root / "train" / "cat")
    Path(os.fsdecode(cat + b"/\xff.png")).write_bytes(b"no image")
    train, _ = load_folder(root, resolution=16, corrupt="skip")
    assert [name.encode().partition(b":")[0] for name in train.skipped] == [b"train/cat/\\udcff.png"]
    os.rename(cat, cat + b"\xff")
    with pytest.raises(DataError, match=r"class 'cat\\\\udcff' is not UTF-8 text"):
        load_folder(root, resolution=16)


def test_evaluation_takes_the_centre(root: Path) -> None:
    train, _ = load_folder(root, resolution=24, center=0.8, workers=2)
    batch = train.batch(torch.tensor([5, 0]))
    assert batch.y.tolist() == [1, 0]
    with Image.open(train.files[0]) as image:  # 40x30: the centred square of 24 is exact, no interpolation
        pixels = np.asarray(image.convert("RGB"))[3:27, 8:32]
    assert torch.equal(batch.x[1], torch.from_numpy(pixels.copy()).permute(2, 0, 1).double().div(255).float())
    assert torch.equal(make_resident(train).batch(torch.tensor([5, 0])).x, batch.x)


def test_augmentation_is_a_pure_function(root: Path) -> None:
    train, _ = load_folder(root, resolution=16, workers=3)
    options = AugmentOptions()
    whole = train.augmented(torch.arange(8), epoch=2, seed=1, options=options)
    for part in torch.tensor([3, 1, 7, 0, 5, 2, 6, 4]).split(3):
        batch = train.augmented(part, epoch=torch.tensor(2), seed=1, options=options)
        assert torch.equal(batch.x, whole.x[part])
        assert torch.equal(batch.augmentation["box"], whole.augmentation["box"][part])
    assert not torch.equal(whole.x, train.augmented(torch.arange(8), epoch=3, seed=1, options=options).x)
    batches = list(torch.arange(8).split(3))
    streamed = torch.cat([b.x for b in iterate(train, batches, epoch=2, seed=1, options=options)])
    assert torch.equal(streamed, whole.x)


def test_flip_mirrors_the_drawn_crop(root: Path) -> None:
    train, _ = load_folder(root, resolution=16, workers=2)
    index = torch.arange(8)
    plain = train.augmented(index, epoch=0, seed=0, options=AugmentOptions(flip=False))
    mirrored = train.augmented(index, epoch=0, seed=0, options=AugmentOptions(flip=True))
    flip = mirrored.augmentation["flip"]
    assert flip.any() and not flip.all()
    expected = torch.where(flip[:, None, None, None], plain.x.flip(-1), plain.x)
    assert torch.equal(mirrored.x, expected)


def test_random_boxes_keep_to_their_limits() -> None:
    options = AugmentOptions(scale=[0.2, 0.5], ratio=[0.5, 2.0])
    draws = integers(1 << 24, 0, "test/boxes", shape=(500, 10, 4)).double().div(1 << 24).tolist()
    boxes = [random_box(100, 80, sample, options) for sample in draws]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= 100 and 0 <= top < bottom <= 80
        assert 0.18 < (right - left) * (bottom - top) / 8000 < 0.52
        assert 0.45 < (right - left) / (bottom - top) < 2.2
    assert len(set(boxes)) > 450
    left, top, right, bottom = random_box(1000, 10, [[1.0, 1.0, 0.0, 0.0]], AugmentOptions(scale=[1.0, 1.0]))
    assert (right - left) / (bottom - top) == pytest.approx(4 / 3), "the fallback is centred and of an allowed ratio"
    assert left == pytest.approx(1000 - right)
    assert center_box(40, 20, 0.5) == (15, 5, 25, 15)


def test_checksum_sees_names_and_sizes(root: Path) -> None:
    before = load_folder(root, resolution=16)[0].checksum()
    assert before == load_folder(root, resolution=16)[0].checksum()
    (root / "train" / "cat" / "0.png").rename(root / "train" / "cat" / "00.png")
    renamed = load_folder(root, resolution=16)[0].checksum()
    _write(root / "train" / "cat" / "1.png", width=41)
    assert len({before, renamed, load_folder(root, resolution=16)[0].checksum()}) == 3
    train, _ = load_folder(root, resolution=16)
    train.files[0].unlink()
    with pytest.raises(DataError, match=r"cannot read .*00\.png: No such file"):
        train.checksum()


@pytest.mark.parametrize("kind", ["truncated", "text", "empty", "postscript", "directory"])
def test_damaged_files_are_named(root: Path, kind: str) -> None:
    path = root / "train" / "cat" / "bad.png"
    if kind == "truncated":
        whole = _write(path).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "directory":
        path.mkdir()
        assert len(load_folder(root, resolution=16)[0]) == 8, "a directory is no image"
        return
    else:
        path.write_bytes({"text": b"hello", "empty": b"", "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n"}[kind])
    train, _ = load_folder(root, resolution=16)
    position = train.files.index(path)
    with pytest.raises(DataError, match=r"bad\.png"):
        train.batch(torch.tensor([position]))
    with pytest.raises(DataError, match=r"bad\.png"):
        list(iterate(train, [torch.tensor([position])], options=AugmentOptions()))


def test_decompression_bombs_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_PIXELS", 1000)
    with pytest.raises(DataError, match="40x30"):
        decode(root / "train" / "cat" / "0.png", crop=lambda w, h: (0, 0, w, h), mirrored=False, resolution=8)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"0\.png"):
        decode(root / "train" / "cat" / "0.png", crop=lambda w, h: (0, 0, w, h), mirrored=False, resolution=8)


@pytest.mark.parametrize("target", ["fox", "fox/secret.png", "absent"])
def test_links_that_leave_the_root_are_refused_by_name(root: Path, tmp_path: Path, target: str) -> None:
    _write(tmp_path / "elsewhere" / "fox" / "secret.png")
    link = root / "train" / ("cat/link.png" if target.endswith(".png") else "fox")
    link.symlink_to(tmp_path / "elsewhere" / target)
    with pytest.raises(DataError, match=f"train/{link.relative_to(root / 'train')} is a link that leaves .*: copy"):
        load_folder(root, resolution=16)


def test_a_split_that_is_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    _write(tmp_path / "elsewhere" / "dog" / "a.png")
    (root / "val").rename(root / "unused")
    (root / "test").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="test is a link that leaves"):
        load_folder(root, resolution=16)


def test_links_inside_the_root_are_followed(root: Path, tmp_path: Path) -> None:
    (root / "train" / "cat" / "inner.png").symlink_to(root / "train" / "cat" / "0.png")
    (root / "train" / "wolf").symlink_to(root / "train" / "dog")
    (root / "train" / "notes").symlink_to(_write(tmp_path / "elsewhere.png"))
    (tmp_path / "link").symlink_to(root)
    for base in (root, tmp_path / "link"):
        train, _ = load_folder(base, resolution=16)
        assert train.classes == ["cat", "dog", "wolf"]
        assert train.labels.bincount().tolist() == [5, 4, 4]


@pytest.mark.parametrize("place", ["train/wolf", "val", "train/cat/gone.png"])
def test_links_to_nothing_are_refused(root: Path, place: str) -> None:
    """A class, a split or an image would be missed by nobody."""
    if place == "val":
        shutil.rmtree(root / "val")
    (root / place).symlink_to(root / place if place == "train/wolf" else "nowhere")
    with pytest.raises(DataError, match=f"{place} is a broken link: fix or remove it"):
        load_folder(root, resolution=16)


def test_grey_images_of_the_ppm_family_have_a_name_of_their_own(root: Path) -> None:
    (root / "train" / "cat" / "grey.PGM").write_bytes(b"P5 2 2 255\n\xff\xff\xff\xff")
    train, _ = load_folder(root, resolution=16, workers=2)
    assert [path.name for path in train.files if path.suffix == ".PGM"] == ["grey.PGM"]
    assert train.batch(torch.tensor([4])).x.amin() == 1


@pytest.mark.parametrize("suffix", ["png", "tif", "ppm"])
def test_sixteen_bits_become_eight(tmp_path: Path, suffix: str) -> None:
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040
    path = tmp_path / f"grey.{suffix}"
    if suffix == "ppm":
        path.write_bytes(b"P5 8 8 65535\n" + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(path)
    with Image.open(path) as image:
        assert image.mode in ("I;16", "I")
    pixels, _ = decode(path, crop=lambda w, h: (0, 0, w, h), mirrored=False, resolution=8)
    assert np.array_equal(pixels, np.broadcast_to(values >> 8, (3, 8, 8)))
    assert len(np.unique(pixels)) == 64


@pytest.mark.parametrize(
    "values",
    [np.full((8, 8), 0.5, np.float32), *(np.full((8, 8), value, np.int32) for value in (70_000, 200, -1))],
)
def test_pixels_of_no_known_range_are_refused(tmp_path: Path, values: np.ndarray) -> None:
    Image.fromarray(values).save(tmp_path / "odd.tif")
    with pytest.raises(DataError, match=r"odd\.tif.* 8 or 16 bits"):
        decode(tmp_path / "odd.tif", crop=lambda w, h: (0, 0, w, h), mirrored=False, resolution=8)


def test_wrong_layouts(tmp_path: Path, root: Path) -> None:
    with pytest.raises(DataError, match="no folder `train`"):
        load_folder(tmp_path, resolution=16)
    (tmp_path / "train" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="no images"):
        load_folder(tmp_path, resolution=16)
    _write(root / "val" / "cow" / "a.png")
    with pytest.raises(DataError, match="'cow'"):
        load_folder(root, resolution=16)
