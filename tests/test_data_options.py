"""The recipe's data section: what it accepts and what it loads."""

import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from generalist.core.errors import DataError, GeneralistError
from generalist.data.dataset import materialise
from generalist.data.files import data_root
from generalist.data.options import DataOptions, ExtraOptions, Splits, load_splits
from generalist.data.sets import ImageSet, check_joins, from_arrays

IMAGES = np.arange(6 * 8 * 8, dtype=np.uint8).reshape(6, 8, 8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "cifar11"}, "did you mean 'cifar10'"),
        ({"name": "os.path"}, "unknown data set"),
        ({"name": str(Path(__file__).parent)}, "--data folder --root DIR"),
        ({"name": "x/" + "y" * 5000}, "unknown data set"),
        ({"name": "folder"}, "needs `root`"),
        ({"name": "cifar10", "resolution": 64}, "leave it out"),
        ({"name": "cifar10", "center_crop": 0.5}, "leave it out"),
        ({"name": "cifar10", "workers": 2}, "leave it out"),
        ({"name": "folder", "root": "x", "augmentation": {"cutout": 16}}, "augmentation.cutout"),
        ({"name": "folder", "root": "x", "augmentation": {"erase": 0.5}}, "augmentation.erase"),
        ({"name": "folder", "root": "x", "augmentation": {"color": 0.5}}, "augmentation.color"),
        ({"name": "folder", "root": "x", "augmentation": {"crop": 0, "shift": 5}}, "augmentation.shift"),
        ({"name": "digits", "resident": False}, "folder"),
        ({"name": "folder", "root": "x", "extra": {"file": "a.npz", "ratio": 0.5}}, "resident: true"),
        ({"extra": {"ratio": 0.5}}, "one of the two"),
        ({"extra": {"ratio": 0.5, "file": "a", "name": "digits"}}, "one of the two"),
        ({"extra": {"ratio": 0.5, "name": "digit"}}, "did you mean 'digits'"),
        ({"extra": {"ratio": 1.0, "name": "digits"}}, "less than 1"),
        ({"extra": {"ratio": 0.5, "name": "digits"}}, "is the training set itself"),
        ({"workers": 0}, "greater than or equal to 1"),
        ({"unknown": 1}, "Extra inputs"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataOptions(**fields)


def test_every_field_is_documented() -> None:
    for options in (DataOptions, ExtraOptions):
        for name, field in options.model_fields.items():
            assert field.description, name


def test_root_comes_from_the_option_the_environment_or_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENERALIST_DATA", "from-environment")
    assert data_root("given") == Path("given")
    assert data_root(None) == Path("from-environment")
    monkeypatch.delenv("GENERALIST_DATA")
    monkeypatch.setenv("HOME", "home")
    assert data_root(None) == Path("home/.cache/generalist")


def test_digits_is_the_default() -> None:
    splits = load_splits(DataOptions())
    assert isinstance(splits, Splits)
    assert (len(splits.train), splits.extra) == (1297, None)
    assert splits.test is not None and len(splits.test) == 500


def test_missing_data_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="generalist data get cifar10"):
        load_splits(DataOptions(name="cifar10", root=str(tmp_path)))


@pytest.mark.parametrize("name", ["folder", "cifar10", "cifar100", "svhn", "mnist"])
def test_what_the_system_does_not_let_us_read(name: str) -> None:
    """A permission that is missing, as a rule; a name that no directory can have needs no other user."""
    with pytest.raises(DataError, match=r"cannot read .*: File name too long"):
        load_splits(DataOptions(name=name, root="long" * 100))


def test_arrays() -> None:
    options = DataOptions(name="arrays")
    assert load_splits(options, arrays=(IMAGES, LABELS)).test is None
    both = load_splits(options, arrays={"train": (IMAGES, LABELS), "test": (IMAGES[:2], LABELS[:2])})
    assert both.test is not None and both.test.classes == both.train.classes == ["0", "1", "2"]
    given = from_arrays(IMAGES, LABELS)
    assert load_splits(options, arrays={"train": given}).train is given
    for wrong in (None, "x", (IMAGES,), {"test": (IMAGES, LABELS)}, {"train": (IMAGES, LABELS), "val": None}):
        with pytest.raises(DataError, match="arrays"):
            load_splits(options, arrays=wrong)
    with pytest.raises(DataError, match="set it to arrays"):
        load_splits(DataOptions(), arrays=(IMAGES, LABELS))


def _with_extra(path: Path) -> Splits:
    return load_splits(DataOptions(extra=ExtraOptions(file=str(path), ratio=0.5)))


@pytest.mark.parametrize("names", [("images", "labels"), ("image", "label")])
def test_extra_file(tmp_path: Path, names: tuple[str, str]) -> None:
    np.savez(tmp_path / "more.npz", **{names[0]: IMAGES, names[1]: LABELS})
    extra = _with_extra(tmp_path / "more.npz").extra
    assert extra is not None
    assert torch.equal(extra.images[:, 0], torch.from_numpy(IMAGES))
    assert len(extra.classes) == 10


def test_extra_by_name() -> None:
    options = DataOptions(name="arrays", extra=ExtraOptions(name="digits", ratio=0.5))
    extra = load_splits(options, arrays=load_splits(DataOptions()).train).extra
    assert extra is not None and len(extra) == 1297


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_wrong_extra_files(tmp_path: Path) -> None:
    path, marker = tmp_path / "more.npz", tmp_path / "ran"
    attack = np.array([_Attack(marker)], dtype=object)
    np.savez(path, images=attack, labels=LABELS)
    with pytest.raises(DataError, match="cannot read"):
        _with_extra(path)
    path.write_bytes(pickle.dumps(_Attack(marker)))
    with pytest.raises(DataError, match="cannot read"):
        _with_extra(path)
    assert not marker.exists()
    np.savez(path, images=IMAGES)
    with pytest.raises(DataError, match="no array 'labels'"):
        _with_extra(path)
    np.savez(path, images=IMAGES, labels=LABELS + 8)
    with pytest.raises(DataError, match="label 10"):
        _with_extra(path)
    np.savez(path, images=IMAGES[:, :4], labels=LABELS)
    with pytest.raises(DataError, match=r"more\.npz has images of \(1, 4, 8\), but digits of .* resize"):
        _with_extra(path)
    with pytest.raises(DataError, match="cannot read"):
        _with_extra(tmp_path / "absent.npz")
    np.savez(path, images=IMAGES, labels=LABELS)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match="cannot read"):
        _with_extra(path)
    with path.open("wb") as stream:
        np.save(stream, IMAGES)
    with pytest.raises(DataError, match=r"\.npz"):
        _with_extra(path)


def _patched(path: Path, offset: int, value: int) -> None:
    """Write a number of two bytes into the local header of each member and into its copy in the directory."""
    content = bytearray(path.read_bytes())
    for signature, shift in ((b"PK\3\4", 0), (b"PK\1\2", 2)):
        at = content.find(signature)
        while at >= 0:
            content[at + shift + offset : at + shift + offset + 2] = value.to_bytes(2, "little")
            at = content.find(signature, at + 1)
    path.write_bytes(content)


@pytest.mark.parametrize(("offset", "value"), [(4, 250), (6, 1), (6, 32), (8, 99)])
def test_extra_files_that_no_numpy_wrote(tmp_path: Path, offset: int, value: int) -> None:
    """Of a later version, encrypted, patched, of an unknown compression: zipfile fails in a way of its own for each."""
    path = tmp_path / "more.npz"
    np.savez(path, images=IMAGES, labels=LABELS)
    _patched(path, offset, value)
    with pytest.raises(DataError, match="cannot read"):
        _with_extra(path)


def test_an_extra_file_that_unpacks_to_more_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "more.npz"
    np.savez_compressed(path, images=np.zeros((2000, 8, 8), np.uint8), labels=np.zeros(2000, np.int64))
    monkeypatch.setattr("generalist.data.options.memory_budget", lambda: 100_000)
    assert path.stat().st_size < 2000
    with pytest.raises(DataError, match=r"unpacks to 144\d{3} bytes"):
        _with_extra(path)


def test_extra_images_have_the_same_classes() -> None:
    """As many classes are not enough: a 3 among the house numbers is no cat."""
    animals = from_arrays(IMAGES, LABELS, classes=["cat", "dog", "frog"], name="animals")
    numbers = from_arrays(IMAGES, LABELS, classes=["0", "1", "2"], name="numbers")
    with pytest.raises(DataError, match="numbers has the class '0' where animals has 'cat'"):
        check_joins(animals, numbers)
    check_joins(animals, from_arrays(IMAGES, LABELS))  # what has no names has the first's


def test_a_test_split_goes_with_its_train_split() -> None:
    wide = np.concatenate([IMAGES, IMAGES], axis=2)
    names = {"train": ["a", "b", "c"], "test": ["b", "a", "c"]}
    swapped = {part: from_arrays(IMAGES, LABELS, classes=classes) for part, classes in names.items()}
    for arrays, message in (
        ({"train": (IMAGES, LABELS), "test": (wide, LABELS)}, r"the test split of arrays has images of \(1, 8, 16\)"),
        ({"train": (IMAGES, LABELS), "test": from_arrays(IMAGES, LABELS + 1)}, "4 classes"),
        (swapped, "the class 'b' where arrays has 'a'"),
    ):
        with pytest.raises(DataError, match=message):
            load_splits(DataOptions(name="arrays"), arrays=arrays)


class Items(Dataset[Any]):
    """A map-style data set of a list of items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> Any:
        return self.items[position]


def _as(kind: str) -> list[Any]:
    grey = [torch.from_numpy(image) for image in IMAGES]
    makers: dict[str, Any] = {
        "pil": lambda t: Image.fromarray(t.numpy()),
        "tensor": lambda t: t[None],
        "array": lambda t: t.numpy(),
        "float": lambda t: t[None].double().div(255).float(),
        "bfloat16": lambda t: (t > 99)[None].to(torch.bfloat16),
    }
    return [(makers[kind](image), label) for image, label in zip(grey, LABELS.tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["pil", "tensor", "array", "float"])
def test_a_dataset_becomes_an_image_set(kind: str) -> None:
    data = materialise(Items(_as(kind)), name="mine")
    assert data.shape == (1, 8, 8)
    assert torch.equal(data.batch(torch.arange(6)).x[:, 0], torch.from_numpy(IMAGES).double().div(255).float())
    assert data.labels.tolist() == LABELS.tolist()


def test_images_in_bfloat16() -> None:
    data = materialise(Items(_as("bfloat16")), name="mine")
    assert torch.equal(data.images[:, 0], torch.from_numpy(IMAGES > 99).float())


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "empty"),
        ([IMAGES[0]], r"\(image, label\)"),
        ([(IMAGES[0], 0), (IMAGES[0][:4], 1)], "one size"),
        ([(IMAGES[0], 0), (IMAGES[0] / 255.0, 1)], "one size"),
        ([("cat.png", 0)], "PIL image"),
        ([(IMAGES[0], "cat")], "class number"),
        ([(IMAGES[0], True)], "class number"),
        ([(IMAGES[0], 0.5)], "class number"),
        ([(torch.zeros(8, 8).to_sparse(), 0)], "item 0 must be one array or tensor"),
    ],
)
def test_wrong_datasets(items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        materialise(Items(items), name="mine")


def test_a_dataset_that_counts_its_classes_instead_of_naming_them() -> None:
    data = Items(_as("array"))
    data.classes = 3  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="`classes` must be the classes' names, not 3"):
        materialise(data, name="mine")


def test_a_test_split_that_numbers_its_classes_otherwise_is_refused() -> None:
    """As a folder does that lacks a class: its labels would mean others than the network's."""
    data = Items(_as("array"))
    data.classes = ["dog", "cat", "eel"]  # type: ignore[attr-defined]
    assert materialise(data, name="mine", classes=["dog", "cat", "eel"]).classes == ["dog", "cat", "eel"]
    for known in (["cat", "dog", "eel"], ["ant", "dog", "cat", "eel"]):
        with pytest.raises(
            DataError, match="mine: the test split's classes, dog, cat, eel, are not those of the train"
        ):
            materialise(data, name="mine", classes=known)
    unnamed = materialise(Items(_as("array")), name="mine", classes=["cat", "dog", "eel"])
    assert unnamed.classes == ["cat", "dog", "eel"]


def test_pictures_of_32_bits_in_memory_are_refused() -> None:
    """Their range is not known: they came out black."""
    picture = Image.fromarray(np.full((8, 8), 200, np.int32))
    with pytest.raises(DataError, match="whose range is not known"):
        materialise(Items([(picture, 0), (picture, 1)]), name="mine")


def test_an_extra_file_of_an_unknown_home_is_a_mistake() -> None:
    with pytest.raises(DataError, match="cannot find the home directory of ~nosuchuser/x"):
        load_splits(DataOptions(extra=ExtraOptions(file="~nosuchuser/x.npz", ratio=0.5)))


def test_labels_may_be_tensors_and_memory_is_limited() -> None:
    items = [(IMAGES[0], torch.tensor(1)), (IMAGES[1], np.int64(0)), (IMAGES[2], np.array([2]))]
    assert materialise(Items(items), name="mine").labels.tolist() == [1, 0, 2]
    with pytest.raises(DataError, match="resident: true"):
        materialise(Items(items), name="mine", memory_limit=191)
    assert len(materialise(Items(items), name="mine", memory_limit=192)) == 3


class _Reusing(Items):
    """Gives every image in one and the same buffer, as readers that save memory do."""

    def __init__(self, kind: str) -> None:
        super().__init__(_as("array"))
        self.buffer = np.empty_like(IMAGES[0])
        self.given: Any = torch.from_numpy(self.buffer) if kind == "tensor" else self.buffer

    def __getitem__(self, position: int) -> Any:
        image, label = super().__getitem__(position)
        self.buffer[:] = image
        return self.given, label


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_dataset_may_reuse_its_buffer(kind: str) -> None:
    data = materialise(_Reusing(kind), name="mine")
    assert torch.equal(data.images[:, 0], torch.from_numpy(IMAGES))


def test_pil_images_of_sixteen_bits() -> None:
    values = IMAGES.astype(np.uint16) << 8
    data = materialise(Items([(Image.fromarray(image), 0) for image in values]), name="mine")
    assert torch.equal(data.images[:, 0], torch.from_numpy(IMAGES))
    with pytest.raises(DataError, match=r"mine: .*item 0.* 8 or 16 bits"):
        materialise(Items([(Image.fromarray(IMAGES[0] / np.float32(255)), 0)]), name="mine")


def test_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_images")
    module.whole = Items(_as("pil"))  # type: ignore[attr-defined]
    module.split = lambda split: Items(_as("pil")[: 6 if split == "train" else 2])  # type: ignore[attr-defined]
    module.train_only = lambda split: Items(_as("pil")) if split == "train" else None  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    module.no_argument = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_images", module)
    with pytest.raises(GeneralistError, match="--trust-code"):
        load_splits(DataOptions(name="my_images:whole"))
    sizes = {}
    for name in ("whole", "split", "train_only"):
        splits = load_splits(DataOptions(name=f"my_images:{name}"), trust_code=True)
        assert isinstance(splits.train, ImageSet)
        sizes[name] = (len(splits.train), None if splits.test is None else len(splits.test))
    assert sizes == {"whole": (6, None), "split": (6, 2), "train_only": (6, None)}
    for name in ("number", "no_argument", "absent"):
        with pytest.raises(GeneralistError, match=name):
            load_splits(DataOptions(name=f"my_images:{name}"), trust_code=True)


def test_folder_streamed_and_resident(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "train" / label).mkdir(parents=True)
        Image.fromarray(IMAGES[0]).resize((20, 20)).save(tmp_path / "train" / label / "x.png")
    streamed = load_splits(DataOptions(name="folder", root=str(tmp_path), resolution=12, workers=1))
    resident = load_splits(DataOptions(name="folder", root=str(tmp_path), resolution=12, resident=True))
    assert streamed.test is None
    assert (streamed.train.resident, resident.train.resident) == (False, True)
    index = torch.tensor([1, 0])
    assert torch.equal(streamed.train.batch(index).x, resident.train.batch(index).x)
