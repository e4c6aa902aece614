"""train, load and evaluate from Python: data in memory, models of one's own, branches."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import generalist
from generalist import evaluate, load, train
from generalist.attacks.threats import ThreatOptions
from generalist.core.errors import GeneralistError, RecipeError, RunError
from generalist.core.run import RunDirectory
from generalist.data.digits import load_digits
from generalist.evaluation import Accuracy
from generalist.models import MODELS
from generalist.recipe import load_recipe
from generalist.training.artefacts import load_weights
from generalist.weights import weights_file

RECIPE: dict[str, Any] = {
    "data": {"name": "digits", "augmentation": {"crop": 1, "flip": False}},
    "model": {"name": "small", "width": 4},
    "learners": [
        {"name": "linf", "objective": "at", "threat": "linf:0.1", "attack": {"steps": 2}, "optimizer": {"lr": 0.1}},
        {"name": "natural", "objective": "nt"},
    ],
    "mixing": {"redistribution": {"every": 1}},
    "train": {"epochs": 4, "batch_size": 64, "snapshots": {"every": 2}},
    "validation": {"images": 100, "steps": 2, "every": 1},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train(RECIPE, out=tmp_path_factory.mktemp("api") / "run", device="cpu")


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """The test images, bytes, and their labels."""
    _, test = load_digits()
    return test.images, test.labels


class Flat(nn.Module):
    """A model of the user's own."""

    def __init__(self, *, num_classes: int, in_channels: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(64 * in_channels, num_classes)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.dropout(self.norm(x)).flatten(1)) * self.scale
        return logits


def same(one: Path, other: Path) -> bool:
    first, second = load_weights(one)[0], load_weights(other)[0]
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# -- train -----------------------------------------------------------------------------------------------------------


def test_arrays_in_memory_train_like_the_data_set_they_are(tmp_path: Path, run: RunDirectory) -> None:
    train_set, test_set = load_digits()
    data = {
        "train": (train_set.images.numpy(), train_set.labels.numpy()),
        "test": (test_set.images, test_set.labels),
    }
    own = train(RECIPE, out=tmp_path / "own", data=data, device="cpu")
    assert same(own.last, run.last)
    assert load_recipe(own.recipe).data.name == "arrays"


def test_arrays_without_a_test_split(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((60, 8, 8, 1)).astype(np.float32)
    changes = ["train.epochs=1", "train.batch_size=20", "validation.images=12"]
    made = train(RECIPE, out=tmp_path / "run", data=(images, np.arange(60) % 3), overrides=changes, device="cpu")
    assert len(load_weights(made.last)[1]["classes"]) == 3


def test_the_same_recipe_gives_the_same_run(tmp_path: Path, run: RunDirectory) -> None:
    assert same(train(RECIPE, out=tmp_path / "again", device="cpu").last, run.last)
    other = train(RECIPE, overrides=["train.seed=1"], out=tmp_path / "other", device="cpu")
    assert not same(other.last, run.last)


# -- load ------------------------------------------------------------------------------------------------------------


def test_load_best_last_learner_and_file(run: RunDirectory) -> None:
    x = torch.rand(3, 1, 8, 8)
    for which, path in (
        ("best", run.model),
        ("last", run.last),
        ("linf", run.snapshots / "4" / "linf.safetensors"),
        ("natural", run.snapshots / "4" / "natural.safetensors"),
    ):
        model = load(run, which=which)
        assert not model.training
        state, expected = model.state_dict(), load_weights(path)[0]
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert torch.equal(model(x), load(path)(x))
        assert torch.equal(model(x), load(str(run.path), which=which)(x))


def test_load_of_what_is_not_there(tmp_path: Path, run: RunDirectory) -> None:
    with pytest.raises(RunError, match="keeps no learner 'l2'"):
        load(run, which="l2")
    with pytest.raises(RunError, match="is not a run directory"):
        load(tmp_path)
    with pytest.raises(RunError, match="there is no weights file"):
        load(tmp_path / "no.safetensors")


# -- evaluate --------------------------------------------------------------------------------------------------------


def test_arrays_dataset_and_name_agree(run: RunDirectory, digits: tuple[Tensor, Tensor]) -> None:
    images, labels = digits
    whole = evaluate(run, "digits", threats=["linf:0.1"], attacks=["natural", "pgd-3"])
    assert set(whole) == {"natural", "pgd-3/linf:0.1"}
    assert whole["natural"].total == len(labels) == 500
    pair = evaluate(load(run), (images.numpy(), labels.numpy()), threats=["linf:0.1"], attacks=["natural", "pgd-3"])
    dataset: Dataset[Any] = TensorDataset(images, labels)
    set_of_pairs = evaluate(run.path, dataset, threats=["linf:0.1"], attacks=["natural", "pgd-3"], batch_size=77)
    assert whole == pair == set_of_pairs


def test_natural_accuracy_is_what_counting_gives(run: RunDirectory, digits: tuple[Tensor, Tensor]) -> None:
    images, labels = digits
    right = (load(run)(images.float() / 255).argmax(1) == labels).sum().item()
    assert evaluate(run, digits, attacks=["natural"])["natural"] == Accuracy(int(right), 500)


def test_robust_accuracy_is_never_above_natural(run: RunDirectory) -> None:
    threats = ["linf:0.02", "linf:0.2", "l2:0.1", ThreatOptions(norm="l2", eps=2.0)]
    found = evaluate(run, "digits", threats=threats, attacks=["natural", "pgd-1", "pgd-5"])
    natural = found.pop("natural").value
    assert len(found) == 8
    assert all(accuracy.value <= natural for accuracy in found.values())
    assert found["pgd-5/linf:0.2"].value < found["pgd-5/linf:0.02"].value


def test_samples_take_a_seeded_subset(run: RunDirectory) -> None:
    first = evaluate(run, "digits", attacks=["natural"], samples=50, seed=3)["natural"]
    assert first.total == 50
    assert evaluate(run, "digits", attacks=["natural"], samples=50, seed=3)["natural"] == first
    with pytest.raises(GeneralistError, match="ask for 1 to 500"):
        evaluate(run, "digits", samples=501)


def test_a_model_is_given_back_as_it_was(digits: tuple[Tensor, Tensor]) -> None:
    model = Flat(num_classes=10, in_channels=1).train()
    model.norm.eval()
    model.linear.weight.requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluate(model, digits, attacks=["natural", "pgd-2"], samples=40)
    assert model.training and not model.norm.training and model.dropout.training
    assert not model.linear.weight.requires_grad and model.linear.bias.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (5, "data must be"),
        ("cifar11", "unknown data set"),
        ((np.zeros((2, 1, 8, 8)),), "data must be"),
        (np.zeros((2, 1, 8, 8)), "data must be .* not ndarray"),
    ],
)
def test_data_that_is_none(run: RunDirectory, data: Any, says: str) -> None:
    with pytest.raises(GeneralistError, match=says):
        evaluate(run, data)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attacks": ["fgsn"]}, "unknown attack 'fgsn'; did you mean 'fgsm'"),
        ({"attacks": ["pgd-0"]}, "'pgd-0' has no steps; write 1 or more, as in pgd-20"),
        ({"attacks": []}, "attacks: none is given"),
        ({"threats": ["linf:8"]}, "8/255"),
        ({"threats": ["l3:1"]}, "threat 'l3:1'"),
    ],
)
def test_arguments_that_are_wrong(run: RunDirectory, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(GeneralistError, match=says):
        evaluate(run, "digits", **changes)


@pytest.mark.parametrize(("device", "says"), [("gpu7", "unknown device"), ("cuda", "'cuda'"), ("meta", "'meta'")])
def test_a_device_that_the_model_is_not_on_is_not_passed_over(
    device: str, says: str, digits: tuple[Tensor, Tensor]
) -> None:
    """It would be evaluated where it lies, and take hours instead of minutes."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(GeneralistError, match=says):
        evaluate(model, digits, attacks="natural", samples=10, device=device)
    assert evaluate(model, digits, attacks="natural", samples=10, device="cpu")["natural"].total == 10


def test_wilson_s_interval_by_hand() -> None:
    """45 of 50 with z = 1.96: centre (0.9 + 1.9208/50) / 1.076832, half width 0.0833: [0.786, 0.957]."""
    low, high = Accuracy(45, 50).interval
    assert (low, high) == (pytest.approx(0.78640, abs=2e-5), pytest.approx(0.95652, abs=2e-5))
    for total in range(1, 50):  # at its ends exact: bars of a plot must not have a negative length
        assert Accuracy(0, total).interval[0] == 0 and Accuracy(total, total).interval[1] == 1
    z2 = 1.959964**2
    assert Accuracy(0, 10).interval[1] == pytest.approx(z2 / (10 + z2))
    assert math.isclose(Accuracy(10, 10).interval[0], 10 / (10 + z2))
    assert str(Accuracy(45, 50)) == "90.00%"


# -- models of one's own ---------------------------------------------------------------------------------------------


def test_a_registered_model(tmp_path: Path) -> None:
    if "test-api-flat" not in MODELS.names():
        MODELS.register("test-api-flat")(Flat)
    made = train(
        RECIPE, overrides=["model={name: test-api-flat}", "train.epochs=1"], out=tmp_path / "run", device="cpu"
    )
    assert isinstance(load(made), Flat)


def test_a_model_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "api_own_model.py").write_text(
        "from torch import nn\n"
        "def make(*, num_classes, in_channels, hidden=8):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, hidden), nn.ReLU(),"
        " nn.Linear(hidden, num_classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = ["model={name: 'api_own_model:make', options: {hidden: 5}}", "train.epochs=1"]
    with pytest.raises(GeneralistError, match="--trust-code"):
        train(RECIPE, overrides=changes, out=tmp_path / "run", device="cpu")
    made = train(RECIPE, overrides=changes, out=tmp_path / "run", device="cpu", trust_code=True)
    with pytest.raises(GeneralistError, match="trust_code=True"):
        load(made)
    model = load(made, trust_code=True)
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    assert [p.shape[0] for p in model.parameters()] == [5, 5, 10, 10]


# -- branches --------------------------------------------------------------------------------------------------------


def test_fine_tuning_starts_from_a_run(tmp_path: Path, run: RunDirectory) -> None:
    still = ["learners.linf.optimizer={lr: 1e-12, weight_decay: 0}", "learners.natural.optimizer={weight_decay: 0}"]
    for start, epoch in ((str(run.path), 4), (f"{run.path}@2", 2)):
        changes = [*still, "train.epochs=1"]
        made = train(RECIPE, overrides=changes, start=start, out=tmp_path / str(epoch), device="cpu")
        for name in ("linf", "natural"):
            before = load_weights(run.snapshots / str(epoch) / f"{name}.safetensors")[0]
            after = load_weights(made.snapshots / "1" / f"{name}.safetensors")[0]
            weights = [key for key in before if "running" not in key and "num_batches" not in key]
            assert all(torch.allclose(before[key], after[key], rtol=0, atol=1e-7) for key in weights)


def test_overrides_may_be_a_mapping(tmp_path: Path) -> None:
    overrides = {
        "train.epochs": 1,
        "learners.linf.threat": "linf:0.2",
        "mixing.gamma": {"epochs": [0], "values": [0.7]},
    }
    run = train(RECIPE, overrides=overrides, out=tmp_path / "run", device="cpu")
    recipe = load_recipe(run.recipe)
    assert recipe.train.epochs == 1 and str(recipe.learners[0].threat) == "linf:0.2"
    assert recipe.mixing.gamma.values == [0.7]


@pytest.mark.parametrize("threats", [8 / 255, [8 / 255], {"linf": 0.1}])
def test_what_names_no_threat_is_refused(run: RunDirectory, threats: Any) -> None:
    with pytest.raises(generalist.GeneralistError, match=r"threats: .* names none; write norm:eps, as in 'linf:8/255'"):
        evaluate(run, threats=threats, samples=20)


def test_exported_weights_on_a_folder_of_ones_own(run: RunDirectory, tmp_path: Path) -> None:
    """Read at the size that the weights were trained at."""
    images, labels = load_digits()[1].images[:40], load_digits()[1].labels[:40]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        for split in ("train", "val"):
            file = tmp_path / "photos" / split / str(int(label)) / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).convert("RGB").save(file)
    colour = {**RECIPE, "data": {"name": "folder", "root": str(tmp_path / "photos"), "resolution": 8, "resident": True}}
    overrides = ["train.epochs=1", "train.batch_size=20", "validation.images=10", "data.augmentation={crop: 1}"]
    trained = train(colour, overrides=overrides, out=tmp_path / "run", device="cpu")
    alone = shutil.copy(trained.model, tmp_path / "alone.safetensors")
    own = evaluate(trained, attacks="natural")
    assert evaluate(alone, "folder", root=tmp_path / "photos", attacks="natural") == own
    with pytest.raises(GeneralistError, match="a folder needs `root`"):
        evaluate(alone, "folder", attacks="natural")
    for data in (None, (images, labels)):
        with pytest.raises(GeneralistError, match="root is the directory of a data set"):
            evaluate(run, data, root=tmp_path, attacks="natural")


def test_start_epoch_goes_on_with_the_schedules(tmp_path: Path, run: RunDirectory) -> None:
    made = train(
        RECIPE, overrides=["train.start_epoch=2"], start=f"{run.path}@2", out=tmp_path / "branch", device="cpu"
    )
    before, after = run.read_metrics()[2:], made.read_metrics()
    assert [record["epoch"] for record in after] == [3, 4]
    for one, other in zip(before, after, strict=True):
        assert (one["lr"], one["gamma"], one["step"]) == (other["lr"], other["gamma"], other["step"])


def test_a_run_is_not_overwritten(run: RunDirectory) -> None:
    before = run.last.read_bytes()
    with pytest.raises(RunError, match="exists already"):
        train(RECIPE, out=run.path, device="cpu")
    assert run.last.read_bytes() == before


def test_one_override_needs_no_list(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.epochs: Input should be greater"):
        train("digits-d", overrides="train.epochs=0", out=tmp_path / "run")


def test_an_epoch_of_a_run_is_not_looked_for_in_a_run_that_is_called_so(run: RunDirectory, tmp_path: Path) -> None:
    """A branch is easily named after what it starts from: `runs/d@2` beside `runs/d`."""
    here = shutil.copytree(run.path, tmp_path / "d")
    other = shutil.copytree(run.path, tmp_path / "d@2")
    assert weights_file(here, "linf@2") == here / "snapshots/2/linf.safetensors"
    assert weights_file(other, "linf@2") == other / "snapshots/2/linf.safetensors"


@pytest.mark.parametrize("line", ["1", "[]", "{}", '{"epoch": "x"}'])
def test_a_crafted_record_of_training_is_refused(run: RunDirectory, tmp_path: Path, line: str) -> None:
    crafted = RunDirectory(shutil.copytree(run.path, tmp_path / "run"))
    crafted.metrics.write_text(line + "\n")
    with pytest.raises(RunError, match=r"metrics.jsonl is damaged: line 1: epoch"):
        train("digits-d", start=str(crafted.path), out=tmp_path / "branch", device="cpu")
    assert not (tmp_path / "branch").exists()
