"""Official corrupted sets, damaged ones too, and what evaluation says of corrupted images and of sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corruption_definitions import corrupted, pictures
from torch import Tensor, nn

from generalist.core.errors import DataError, GeneralistError
from generalist.data.cifar_c import load_cifar_c, load_cifar_p
from generalist.data.corruptions import SEQUENCES, perturb_sequence
from generalist.data.sets import ImageSet, from_arrays
from generalist.evaluation.corruptions import STABILITY, _flips, evaluate_corruptions, evaluate_perturbations

# The official layouts


class Constant(nn.Module):
    """Names a class by the brightness of an image: the level of its mean out of ten."""

    def forward(self, x: Tensor) -> Tensor:
        level = (x.mean((1, 2, 3)) * 10).floor().clamp(0, 9).long()
        return nn.functional.one_hot(level, 10).float()


def write_c(directory: Path, count: int = 4, names: tuple[str, ...] = ("fog", "snow")) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    labels = np.arange(count) % 10
    np.save(directory / "labels.npy", np.tile(labels, 5).astype(np.uint8))
    made = {}
    for number, name in enumerate(names):
        made[name] = np.random.default_rng(number).integers(0, 256, (5 * count, 32, 32, 3)).astype(np.uint8)
        np.save(directory / f"{name}.npy", made[name])
    return made


@pytest.mark.parametrize("folder", ["CIFAR-10-C", "cifar-10-c", "."])
def test_official_corruptions(tmp_path: Path, folder: str) -> None:
    made = write_c(tmp_path / folder)
    files = load_cifar_c(tmp_path)
    assert files.names == ["fog", "snow"] and len(files) == 4 and files.shape == (3, 32, 32)
    assert isinstance(files.arrays["fog"], np.memmap)
    batch = files.to("cpu").batch("snow", 3, torch.tensor([2, 0]))
    assert batch.y.tolist() == [2, 0] and batch.index.tolist() == [2, 0]
    expected = torch.from_numpy(made["snow"][[2 * 4 + 2, 2 * 4]]).permute(0, 3, 1, 2).float() / 255
    assert torch.equal(batch.x, expected)
    assert load_cifar_c(tmp_path, names=["snow"]).names == ["snow"]
    with pytest.raises(DataError, match="did you mean 'snow'"):
        load_cifar_c(tmp_path, names=["snwo"])
    for name, severity, index in (("frost", 1, [0]), ("fog", 6, [0]), ("fog", 1, [4]), ("fog", 1, [-1])):
        with pytest.raises(DataError):
            files.batch(name, severity, torch.tensor(index))


def test_missing_official_files_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"unpack .*CIFAR-100-C\.tar"):
        load_cifar_c(tmp_path, classes=100)
    with pytest.raises(DataError, match=r"unpack .*CIFAR-10-P\.tar"):
        load_cifar_p(tmp_path)
    np.save(tmp_path / "labels.npy", np.zeros(5, np.uint8))
    with pytest.raises(DataError, match="no files"):
        load_cifar_c(tmp_path)


def _damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "longer":
        path.write_bytes(whole + b"0")
    elif how == "header":
        path.write_bytes(whole[:20] + b"\xff" * 40 + whole[60:])
    elif how == "pickle":
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    elif how == "huge":
        path.write_bytes(whole.replace(b"(20, 32, 32, 3)", b"(9**99,32,32,3)"))
    elif how == "zip":
        with path.open("wb") as stream:
            np.savez(stream, a=np.zeros(3))
    elif how == "floats":
        np.save(path, np.zeros((20, 32, 32, 3), np.float32))
    elif how == "fewer":
        np.save(path, np.zeros((19, 32, 32, 3), np.uint8))
    else:
        path.write_bytes(whole[: int(how)])


DAMAGES = ["0", "5", "64", "128", "5000", "longer", "header", "pickle", "huge", "zip", "floats", "fewer"]


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_official_files(tmp_path: Path, how: str) -> None:
    write_c(tmp_path)
    _damage(tmp_path / "fog.npy", how)
    with pytest.raises(DataError, match="download it again"):
        load_cifar_c(tmp_path)


@pytest.mark.parametrize(
    "labels",
    [np.zeros(19, np.uint8), np.arange(20), np.full(20, 10), np.zeros(20), np.zeros((20, 1), int), np.zeros(0, int)],
)
def test_wrong_official_labels(tmp_path: Path, labels: Any) -> None:
    write_c(tmp_path)
    np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(DataError, match="labels"):
        load_cifar_c(tmp_path)


def test_official_sequences(tmp_path: Path) -> None:
    directory = tmp_path / "CIFAR-10-P"
    directory.mkdir()
    levels = np.array([[0, 0, 30, 30], [55, 55, 55, 255]], np.uint8)
    np.save(directory / "tilt.npy", np.broadcast_to(levels[..., None, None, None], (2, 4, 32, 32, 3)))
    np.save(directory / "gaussian_noise.npy", np.broadcast_to(levels[..., None, None, None], (2, 4, 32, 32, 3)))
    with pytest.raises(DataError, match="give the labels"):
        load_cifar_p(tmp_path)
    files = load_cifar_p(tmp_path, labels=torch.tensor([0, 2]))
    assert files.sequences("tilt", torch.tensor([1])).x.shape == (1, 4, 3, 32, 32)
    result = evaluate_perturbations(Constant(), files, names=files.names, batch_size=1)
    # Classes are 0 0 1 1 and 2 2 2 9: two flips of six in order, three of six against the first frame.
    assert result.sequences["tilt"].flip_rate == pytest.approx(2 / 6)
    assert result.sequences["gaussian_noise"].flip_rate == pytest.approx(3 / 6)
    assert result.sequences["tilt"].accuracy == pytest.approx(5 / 8)
    assert result.mean_flip_rate == pytest.approx(2.5 / 6)
    assert not result.generated and result.to_dict()["source"] == "official files"
    np.save(directory / "tilt.npy", np.zeros((2, 1, 32, 32, 3), np.uint8))
    with pytest.raises(DataError, match="two frames"):
        load_cifar_p(tmp_path, labels=torch.tensor([0, 2]))
    np.save(directory / "tilt.npy", np.zeros((3, 4, 32, 32, 3), np.uint8))
    with pytest.raises(DataError, match="shape"):
        load_cifar_p(tmp_path, labels=torch.tensor([0, 2]))


# Evaluation


def labelled(count: int = 12) -> ImageSet:
    """Images with the labels that `Constant` gives them as they are."""
    x = pictures(count)
    return from_arrays(x, Constant()(x).argmax(1), classes=[str(number) for number in range(10)])


def test_accuracy_by_corruption_and_severity() -> None:
    images = labelled()
    result = evaluate_corruptions(Constant(), images, names=["fog", "contrast", "fog"], severities=[1, 5], batch_size=5)
    assert list(result.accuracies) == ["fog", "contrast"] and result.severities == [1, 5]
    for name, by_severity in result.accuracies.items():
        for severity, accuracy in by_severity.items():
            x = corrupted(images.images, name, severity)
            right = int((Constant()(x).argmax(1) == images.labels).sum())
            assert (accuracy.correct, accuracy.total) == (right, 12)
    values = {name: [a.value for a in found.values()] for name, found in result.accuracies.items()}
    assert result.level5 == pytest.approx((values["fog"][1] + values["contrast"][1]) / 2)
    assert result.mean == pytest.approx(sum(map(sum, values.values())) / 4)
    assert values["fog"][1] < 1


def test_index_and_batch_size_change_nothing_else() -> None:
    images, index = labelled(), torch.tensor([7, 1, 4])
    results = [
        evaluate_corruptions(Constant(), images, names=["snow"], index=index, batch_size=size) for size in (1, 2, 500)
    ]
    assert results[0] == results[1] == results[2]
    right = [Constant()(corrupted(images.images, "snow", 5)[i : i + 1]).argmax(1) == images.labels[i] for i in index]
    assert results[0].accuracies["snow"][5].correct == sum(map(int, right))


def test_result_as_json() -> None:
    found = evaluate_corruptions(Constant(), labelled(), names=["fog"], severities=[2]).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["source"] == "generated, not the official files" and found["level5_mean"] is None
    assert found["corruptions"]["fog"]["severities"]["2"]["total"] == 12
    assert found["mean"] == found["mean_by_severity"]["2"] == found["corruptions"]["fog"]["mean"]


def test_official_files_are_evaluated_as_they_are(tmp_path: Path) -> None:
    write_c(tmp_path)
    levels = np.repeat(np.arange(5) * 26, 4).astype(np.uint8)  # of class s - 1 at severity s
    np.save(tmp_path / "fog.npy", np.broadcast_to(levels[:, None, None, None], (20, 32, 32, 3)))
    result = evaluate_corruptions(Constant(), load_cifar_c(tmp_path), names=["fog"], batch_size=3)
    assert [accuracy.correct for accuracy in result.accuracies["fog"].values()] == [1, 1, 1, 1, 0]
    assert not result.generated and result.seed is None and result.level5 == 0
    with pytest.raises(DataError, match="frost"):
        evaluate_corruptions(Constant(), load_cifar_c(tmp_path), names=["frost"])


def test_stability_on_any_set() -> None:
    images = labelled(3)
    result = evaluate_perturbations(Constant(), images, names=["brightness", "gaussian_noise"], batch_size=40)
    assert set(STABILITY) <= set(SEQUENCES)
    frames = perturb_sequence(images.images, name="brightness", index=torch.arange(3), seed=0)
    predictions = Constant()(frames.flatten(0, 1)).argmax(1).reshape(3, 31)
    assert result.sequences["brightness"].flip_rate == pytest.approx(_flips(predictions, noise=False) / (3 * 30))
    assert result.sequences["brightness"].flip_rate > 0
    assert result.sequences["brightness"].accuracy == pytest.approx(
        float((predictions == images.labels[:, None]).double().mean())
    )
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["samples"] == 3


def test_flips_by_hand() -> None:
    predictions = torch.tensor([[1, 1, 2, 1], [3, 3, 3, 3]])
    assert _flips(predictions, noise=False) == 2
    assert _flips(predictions, noise=True) == 1


def test_the_model_is_given_back_as_it_was() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10), nn.Dropout()).double()
    evaluate_corruptions(model, labelled(2), names=["fog"], severities=[1])
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": []}, "at least one"),
        ({"names": "fog"}, "list"),
        ({"names": ["fogg"]}, "did you mean 'fog'"),
        ({"severities": [0]}, "1 to 5"),
        ({"severities": []}, "at least one"),
        ({"batch_size": 0}, "batch_size"),
        ({"index": torch.tensor([12])}, "0 to 11"),
        ({"index": torch.tensor([], dtype=torch.long)}, "at least one"),
        ({"index": torch.ones(12, dtype=torch.bool)}, "sample numbers"),
    ],
)
def test_wrong_questions_are_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GeneralistError, match=message):
        evaluate_corruptions(Constant(), labelled(), **changes)


def test_a_model_without_an_answer_is_no_winner() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 10), float("nan"))

    with pytest.raises(GeneralistError, match="NaN"):
        evaluate_corruptions(Broken(), labelled(), names=["fog"], severities=[1])
