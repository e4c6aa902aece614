"""The readers of CIFAR, SVHN and IDX files, on small generated files, whole and damaged."""

import gzip
import os
import pickle
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from generalist.core.errors import DataError
from generalist.core.random import integers
from generalist.data.cifar import CLASSES_10, CLASSES_100, PIXELS, load_cifar10, load_cifar100, read_binary, read_pickle
from generalist.data.idx import STEMS, load_fashion_mnist, load_mnist, read_idx
from generalist.data.svhn import load_svhn, read_svhn


def _bytes(*shape: int, high: int = 256, purpose: str = "test") -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = integers(high, 0, purpose, shape=shape).to(torch.uint8).numpy()
    return array


# CIFAR: python layout


def _write_pickle(path: Path, data: Any, labels: Any, key: bytes = b"labels", protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({b"data": data, key: labels, b"batch_label": b"test"}, protocol=protocol))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_cifar10_python_layout(tmp_path: Path, protocol: int) -> None:
    data = {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        data[name] = _bytes(4, PIXELS, purpose=name)
        _write_pickle(tmp_path / "cifar10" / "cifar-10-batches-py" / name, data[name], [0, 9, 3, 4], protocol=protocol)
    train, test = load_cifar10(tmp_path)
    assert test is not None
    assert (len(train), len(test)) == (20, 4)
    assert train.shape == (3, 32, 32)
    assert train.classes == CLASSES_10
    assert torch.equal(train.images[4:8], torch.from_numpy(data["data_batch_2"]).reshape(4, 3, 32, 32))
    assert test.labels.tolist() == [0, 9, 3, 4]


def test_cifar100_python_layout_has_fine_labels(tmp_path: Path) -> None:
    for name in ("train", "test"):
        _write_pickle(tmp_path / "cifar-100-python" / name, _bytes(3, PIXELS), [99, 0, 5], key=b"fine_labels")
    train, test = load_cifar100(tmp_path)
    assert test is not None
    assert train.labels.tolist() == [99, 0, 5]
    assert len(set(CLASSES_100)) == len(train.classes) == 100
    assert train.classes[99] == "worm"


class _Attack:
    """A pickle of this runs a command when an ordinary unpickler reads it."""

    def __init__(self, function: Any, argument: str) -> None:
        self.call = (function, (argument,))

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function", [os.system, eval, exec, getattr(os, "popen", os.system)])
def test_crafted_pickle_does_not_run(tmp_path: Path, function: Any) -> None:
    marker = tmp_path / "ran"
    command = f"touch {marker}" if function not in (eval, exec) else f"open({str(marker)!r}, 'w')"
    path = tmp_path / "data_batch_1"
    for content in ({b"data": _Attack(function, command), b"labels": [0]}, _Attack(function, command)):
        path.write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(DataError, match="asks for"):
            read_pickle(path, label_key=b"labels", classes=10)
    assert not marker.exists()


def test_the_attack_would_run_elsewhere(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    pickle.loads(pickle.dumps(_Attack(os.system, f"touch {marker}"), protocol=2))
    assert marker.exists()


@pytest.mark.parametrize(
    "raw", [b"", b"cos\nsystem\n", b"\x80\x02}", b"\x80\x05K\x01.", b"garbage" * 50, b"\x80\x02]."]
)
def test_damaged_pickle(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(raw)
    with pytest.raises(DataError, match="download it again"):
        read_pickle(path, label_key=b"labels", classes=10)


ENCODE = b"c_codecs\nencode\n"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02}r" + (1 << 23).to_bytes(4, "little") + b".",  # an entry far down in the table of things seen
        b"\x80\x02X"
        + (1 << 20).to_bytes(4, "little")
        + b"a" * (1 << 20)
        + b"q\x00"
        + (ENCODE + b"h\x00\x85R") * 99
        + b".",
    ],
    ids=["memo", "encode"],
)
def test_a_small_pickle_takes_little_memory(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="download it again"):
            read_pickle(path, label_key=b"labels", classes=10)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "labels"),
    [
        (_bytes(2, PIXELS), [0]),
        (_bytes(2, PIXELS), [0, 10]),
        (_bytes(2, PIXELS), [0, -1]),
        (_bytes(2, PIXELS), [0, True]),
        (_bytes(2, PIXELS), [0, b"x"]),
        (_bytes(2, PIXELS), None),
        (_bytes(2, PIXELS - 1), [0, 1]),
        (_bytes(2, PIXELS).astype(np.int32), [0, 1]),
        (np.asfortranarray(_bytes(2, PIXELS)), [0, 1]),
        (np.array([None, None], dtype=object), [0, 1]),
        (b"text", [0, 1]),
        (_bytes(0, PIXELS), []),
    ],
)
def test_pickle_with_wrong_content(tmp_path: Path, data: Any, labels: Any) -> None:
    _write_pickle(tmp_path / "batch", data, labels)
    with pytest.raises(DataError):
        read_pickle(tmp_path / "batch", label_key=b"labels", classes=10)


def test_truncated_pickle(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    _write_pickle(path, _bytes(2, PIXELS), [0, 1])
    whole = path.read_bytes()
    for length in (1, 10, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="download it again"):
            read_pickle(path, label_key=b"labels", classes=10)


# CIFAR: binary layout


def test_cifar10_binary_layout(tmp_path: Path) -> None:
    rows = _bytes(4, PIXELS)
    records = np.concatenate([np.array([[0], [9], [1], [2]], np.uint8), rows], axis=1)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    train, test = load_cifar10(tmp_path)
    assert test is not None
    assert (len(train), len(test)) == (20, 4)
    assert test.labels.tolist() == [0, 9, 1, 2]
    assert torch.equal(test.images, torch.from_numpy(rows).reshape(4, 3, 32, 32))
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match="data_batch_3"):
        load_cifar10(tmp_path)


def test_cifar100_binary_layout_has_fine_labels(tmp_path: Path) -> None:
    records = np.concatenate([np.array([[19, 77]], np.uint8), _bytes(1, PIXELS)], axis=1)
    for name in ("train", "test"):
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    train, _ = load_cifar100(tmp_path)
    assert train.labels.tolist() == [77]


@pytest.mark.parametrize("suffix", ["", ".bin"])
@pytest.mark.parametrize(
    "folder", ["cifar100/cifar-100-python", "cifar-100-binary", "cifar100/cifar-100-binary", "cifar100", "."]
)
def test_cifar_lies_where_others_put_it(tmp_path: Path, folder: str, suffix: str) -> None:
    directory = tmp_path / folder
    directory.mkdir(parents=True, exist_ok=True)
    images = _bytes(2, PIXELS)
    for name in ("train", "test"):
        if suffix:
            rows = np.concatenate([np.zeros((2, 1), np.uint8), np.full((2, 1), 7, np.uint8), images], axis=1)
            (directory / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            _write_pickle(directory / name, images, [7, 7], key=b"fine_labels")
    train, test = load_cifar100(tmp_path)
    assert test is not None
    assert torch.equal(train.images.flatten(1), torch.from_numpy(images))
    assert test.labels.tolist() == [7, 7]


@pytest.mark.parametrize("content", [b"", b"\x00" * (PIXELS + 2), b"\x0a" * (PIXELS + 1)])
def test_damaged_binary(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "batch.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match="download it again"):
        read_binary(path, label_bytes=1, classes=10)


def test_an_incomplete_layout_does_not_hide_a_whole_one(tmp_path: Path) -> None:
    """`data get` is content with the whole one: whoever unpacked half of another would not get away from it."""
    whole, half = tmp_path / "cifar10" / "cifar-10-batches-bin", tmp_path / "cifar10" / "cifar-10-batches-py"
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        whole.mkdir(parents=True, exist_ok=True)
        (whole / f"{name}.bin").write_bytes(bytes([7]) + bytes(PIXELS))
    _write_pickle(half / "test_batch", _bytes(1, PIXELS), [3])
    train, test = load_cifar10(tmp_path)
    assert test is not None and test.labels.tolist() == [7] and len(train) == 5
    (whole / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"batches-py/data_batch_1 is missing.: run `generalist data get cifar10"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("load", [load_cifar10, load_cifar100, load_svhn, load_mnist, load_fashion_mnist])
def test_missing_data_names_the_remedy(tmp_path: Path, load: Any) -> None:
    with pytest.raises(DataError, match="generalist data get"):
        load(tmp_path)


# IDX


def _idx(array: np.ndarray[Any, Any]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("name", "load"), [("mnist", load_mnist), ("fashion-mnist", load_fashion_mnist)])
def test_idx_sets(tmp_path: Path, suffix: str, name: str, load: Any) -> None:
    (tmp_path / name).mkdir()
    for stem in STEMS:
        array = _bytes(5, 28, 28) if "images" in stem else np.array([0, 9, 1, 2, 3], np.uint8)
        content = _idx(array)
        (tmp_path / name / (stem + suffix)).write_bytes(gzip.compress(content) if suffix else content)
    train, test = load(tmp_path)
    assert train.shape == (1, 28, 28)
    assert test.labels.tolist() == [0, 9, 1, 2, 3]
    assert torch.equal(train.images[:, 0], torch.from_numpy(_bytes(5, 28, 28)))


def _idx_header(*sizes: int) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00\x08",
        _idx_header(2, 28, 28),
        _idx_header(2, 2, 2) + b"1234567",
        _idx_header(2, 2, 2) + b"123456789",
        _idx_header(2**32 - 1, 2**32 - 1, 2**32 - 1) + b"x",
        _idx_header(0, 28, 28),
        bytes([0, 0, 13, 3]) + _idx_header(1, 1, 1)[4:] + b"1",
        _idx_header(4) + b"123412341234",
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_damaged_idx(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"images{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match="download it again"):
        read_idx(path, dimensions=3)


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(_idx(_bytes(5, 28, 28)))
    for content in (whole[: len(whole) // 2], b"not gzip", whole[:-8] + b"\x00" * 8):
        (tmp_path / "images.gz").write_bytes(content)
        with pytest.raises(DataError, match="download it again"):
            read_idx(tmp_path / "images.gz", dimensions=3)


# SVHN


def test_svhn(tmp_path: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    images = _bytes(32, 32, 3, 4)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        scipy_io.savemat(tmp_path / name, {"X": images, "y": np.array([[10], [1], [9], [10]], np.uint8)})
    train, test = load_svhn(tmp_path)
    assert test is not None
    assert train.labels.tolist() == [0, 1, 9, 0]
    assert train.shape == (3, 32, 32)
    assert torch.equal(train.images[2], torch.from_numpy(images[:, :, :, 2].transpose(2, 0, 1).copy()))


@pytest.mark.parametrize(
    "content",
    [
        {"X": np.zeros((32, 32, 3, 2), np.uint8)},
        {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[0], [1]], np.uint8)},
        {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[11], [1]], np.uint8)},
        {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1]], np.uint8)},
        {"X": np.zeros((32, 32, 2), np.uint8), "y": np.array([[1], [1]], np.uint8)},
        {"X": np.zeros((32, 32, 3, 2)), "y": np.array([[1], [1]], np.uint8)},
    ],
)
def test_svhn_with_wrong_content(tmp_path: Path, content: dict[str, Any]) -> None:
    pytest.importorskip("scipy.io").savemat(tmp_path / "x.mat", content)
    with pytest.raises(DataError):
        read_svhn(tmp_path / "x.mat")


def test_damaged_svhn(tmp_path: Path) -> None:
    pytest.importorskip("scipy.io")
    for content in (b"", b"MATLAB 5.0", b"\x00" * 300):
        (tmp_path / "x.mat").write_bytes(content)
        with pytest.raises(DataError):
            read_svhn(tmp_path / "x.mat")


def test_svhn_of_a_size_that_no_set_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by its header: 40 kB of zeros, compressed, can be 40 GB of memory."""
    io = pytest.importorskip("scipy.io")
    images = np.zeros((32, 32, 3, 4), np.uint8)
    io.savemat(tmp_path / "x.mat", {"X": images, "y": np.ones((4, 1), np.uint8)}, do_compression=True)
    assert len(read_svhn(tmp_path / "x.mat")) == 4
    monkeypatch.setattr("generalist.data.svhn.MOST_VALUES", images.size - 1)
    monkeypatch.setattr(io, "loadmat", lambda *_, **__: pytest.fail("the array was read"))
    with pytest.raises(DataError, match="larger than any set of SVHN"):
        read_svhn(tmp_path / "x.mat")


def test_svhn_without_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(DataError, match=r"generalist-at\[svhn\]"):
        read_svhn(tmp_path / "x.mat")
