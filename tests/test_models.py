"""Networks: their sizes, their weights by seed, and the mistakes that are refused."""

import sys
import types

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.models import MODELS, ModelOptions, Normalized, NormalizeOptions, build_model, check_model, zoo

PARAMETERS = {
    # name: (classes, parameters)
    "resnet18": (10, 11_173_962),
    "resnet34": (10, 21_282_122),
    "resnet50": (10, 23_520_842),
    "resnet50-imagenet": (1000, 25_557_032),
    "wrn-50-2": (1000, 68_883_240),
    "preact-resnet18": (10, 11_172_170),
    "wrn-10-1": (10, 77_850),
    "wrn-28-10": (10, 36_479_194),
    "wrn-32-10": (10, 46_160_474),
    "wrn-34-10": (10, 46_160_474),
    "small": (10, 131_754),
}


def build(name: str = "small", *, classes: int = 10, shape=(1, 8, 8), seed: int = 0, trust: bool = False, **options):
    return build_model(
        ModelOptions(name=name, **options), num_classes=classes, shape=shape, seed=seed, trust_code=trust
    )


def own_factory(*, num_classes: int, in_channels: int, depth: int = 1) -> nn.Module:
    layers = [nn.Linear(in_channels * 64, in_channels * 64) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(in_channels * 64, num_classes))


def not_a_model(*, num_classes: int, in_channels: int) -> int:
    return 3


# Architecture


def test_every_network_is_counted():
    shipped = {name for name in MODELS.names() if MODELS.get(name).__module__.startswith("generalist.")}
    assert set(PARAMETERS) == shipped  # other tests register networks of their own


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name):
    classes, count = PARAMETERS[name]
    with torch.device("meta"):
        model = MODELS.get(name)(num_classes=classes, in_channels=3)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model(torch.zeros(2, 3, 64, 64, device="meta")).shape == (2, classes)


@pytest.mark.parametrize("name", ["small", "resnet18", "preact-resnet18"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 28, 28)])
def test_networks_take_small_images_in_either_memory_format(name, shape):
    model = build(name, classes=4, shape=shape).double().eval()
    x = random.uniform(0, "x", shape=(2, *shape)).double()
    logits = model(x)
    assert logits.shape == (2, 4)
    channels_last = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert torch.allclose(logits, channels_last, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "resolution"),
    [("resnet18", 4), ("resnet50", 4), ("preact-resnet18", 4), ("wrn-28-10", 8), ("resnet50-imagenet", 1)],
)
def test_resolution_before_the_average(name, resolution):
    with torch.device("meta"):
        model = MODELS.get(name)(num_classes=10, in_channels=3)
        out = model.stages(model.stem(torch.zeros(2, 3, 32, 32)))
    assert out.shape[2:] == (resolution, resolution)


def test_activations_neither_vanish_nor_explode():
    model = build("preact-resnet18", shape=(3, 32, 32)).train()
    logits = model(random.uniform(0, "x", shape=(4, 3, 32, 32)))
    assert 1e-3 < float(logits.detach().std()) < 1e2


def test_width_of_small():
    assert build(width=8).classifier.in_features == 32
    assert build().classifier.in_features == 128


def test_small_learns_where_a_bar_is():
    x = 0.3 * random.uniform(0, "bars", torch.arange(128), shape=(1, 8, 8))
    y = torch.arange(128) % 4
    for i, label in enumerate(y.tolist()):
        if label < 2:
            x[i, 0, 2 + 3 * label] += 0.6
        else:
            x[i, 0, :, 2 + 3 * (label - 2) :] += 0.6
    model = build(classes=4, width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    assert float((model(x).argmax(1) == y).float().mean()) > 0.95


# Weights


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = build(seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again, other = build(seed=5).state_dict(), build(seed=6).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["features.0.weight"], other["features.0.weight"])


def permuted(*, num_classes: int, in_channels: int) -> nn.Module:
    """Behind a shuffle of the pixels that the factory draws."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, num_classes))
    model.register_buffer("order", torch.randperm(64))
    model.register_buffer("mask", torch.rand(64) < 0.5)
    return model


def test_tables_that_a_factory_draws_are_the_same_for_every_seed(monkeypatch):
    """Weights of one would make no sense behind those of another."""
    mine = types.ModuleType("permuting")
    mine.net = permuted
    monkeypatch.setitem(sys.modules, "permuting", mine)
    options = ModelOptions(name="permuting:net")
    first, other = (
        build_model(options, num_classes=3, shape=(1, 8, 8), seed=seed, trust_code=True).state_dict() for seed in (0, 7)
    )
    assert torch.equal(first["order"], other["order"]) and torch.equal(first["mask"], other["mask"])
    assert not torch.equal(first["1.weight"], other["1.weight"])


def test_weights_are_made_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        assert next(build().parameters()).device.type == "cpu"


# Normalization


def test_normalization_lives_inside_the_model():
    normalize = NormalizeOptions(mean=[0.5, 0.25, 0.0], std=["1/2", 0.25, 2.0])
    model = build(shape=(3, 8, 8), normalize=normalize).eval()
    assert isinstance(model, Normalized)
    x = random.uniform(0, "x", shape=(2, 3, 8, 8))
    by_hand = torch.stack([(x[:, 0] - 0.5) / 0.5, (x[:, 1] - 0.25) / 0.25, x[:, 2] / 2], dim=1)
    assert torch.allclose(model(x), model.model(by_hand), atol=1e-6)
    assert {"mean", "std"} <= model.state_dict().keys()
    bare = build(shape=(3, 8, 8)).state_dict()
    assert all(torch.equal(model.state_dict()[f"model.{name}"], value) for name, value in bare.items())


@pytest.mark.parametrize(
    "wrong", [{"mean": [0.5], "std": [1.0, 1.0]}, {"mean": [0.5], "std": [0.0]}, {"mean": [], "std": []}]
)
def test_wrong_normalization_is_refused(wrong):
    with pytest.raises(ValidationError):
        NormalizeOptions(**wrong)


def test_normalization_of_the_wrong_number_of_channels_is_refused():
    with pytest.raises(GeneralistError, match="3 channels: give one per channel"):
        build(shape=(3, 8, 8), normalize=NormalizeOptions(mean=[0.5], std=[1.0]))


# Names and options


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(GeneralistError, match="did you mean 'resnet18'"):
        build("resnet-18")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name": "resnet18", "width": 16}, "remove it for 'resnet18'"),
        ({"name": "small", "width": 0}, "greater than or equal to 1"),
        ({"name": ""}, "at least 1 character"),
        ({"name": "timm/vit", "options": {"num_classes": 3}}, "must not hold"),
        ({"name": "timm/vit", "options": {"depth": [1]}}, "valid"),
    ],
)
def test_wrong_options_are_refused(wrong, says):
    with pytest.raises(ValidationError, match=says):
        ModelOptions(**wrong)


def test_an_import_path_needs_trust_and_takes_options():
    name = f"{__name__}:own_factory"
    with pytest.raises(GeneralistError, match="--trust-code"):
        build(name)
    assert len(build(name, trust=True, options={"depth": 3})) == 5
    with pytest.raises(GeneralistError, match=r"unexpected keyword argument 'dept'; see model\.options"):
        build(name, trust=True, options={"dept": 3})
    with pytest.raises(GeneralistError, match=r"cannot be built: TypeError: 'str' .*; see model\.options"):
        build(name, trust=True, options={"depth": "three"})
    with pytest.raises(GeneralistError, match="gave a int"):
        build(f"{__name__}:not_a_model", trust=True)
    with pytest.raises(GeneralistError, match="not a factory"):
        build(f"{__name__}:PARAMETERS", trust=True)


def test_options_that_a_network_does_not_take():
    with pytest.raises(GeneralistError, match="'depth'"):
        build("resnet18", options={"depth": 3})


@pytest.mark.parametrize(("classes", "shape"), [(1, (1, 8, 8)), (10, (8, 8)), (10, (0, 8, 8))])
def test_impossible_problems_are_refused(classes, shape):
    with pytest.raises(GeneralistError):
        build(classes=classes, shape=shape)


# timm


def test_without_timm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(GeneralistError, match=r"generalist-at\[zoo\]"):
        build("timm/resnet18")


def test_with_a_broken_torchvision_the_error_says_so(monkeypatch):
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(zoo, "importlib", types.SimpleNamespace(import_module=broken))
    with pytest.raises(GeneralistError, match="torchvision made for another torch"):
        build("timm/resnet18")


def test_timm_networks(monkeypatch):
    calls = []

    def create_model(name: str, **arguments) -> nn.Module:
        calls.append((name, arguments))
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    fake = types.SimpleNamespace(list_models=lambda: ["vit_tiny", "resnet18"], create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", fake)
    build("timm/vit_tiny", options={"img_size": 8, "drop_rate": 0.5})
    assert calls == [("vit_tiny", {"num_classes": 10, "in_chans": 1, "img_size": 8, "drop_rate": 0.5})]
    with pytest.raises(GeneralistError, match="did you mean 'timm/vit_tiny'"):
        build("timm/vit_tinny")
    with pytest.raises(GeneralistError, match="timm has no model"):
        build("timm/hf-hub:someone/something")
    with pytest.raises(GeneralistError, match="--trust-code"):
        build("timm/vit_tiny", options={"checkpoint_path": "weights.pth"})


# The check of a finished model


class Gives(nn.Module):
    """Answers the same thing to every batch."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> object:
        return self.answer


def test_a_good_model_passes_and_is_left_alone():
    model = build(normalize=NormalizeOptions(mean=[0.5], std=[0.5])).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_model(model, (1, 8, 8), 10, "cpu")
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    check_model(build().double(), (1, 8, 8), 10, "cpu")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Gives(torch.zeros(2, 9)), r"\[2, 9\] for 2 images"),
        (Gives(torch.zeros(10)), r"\[10\] for 2 images"),
        (Gives(torch.full((2, 10), torch.nan)), "nan or inf"),
        (Gives(torch.zeros(2, 10, dtype=torch.int64)), "must be floats"),
        (Gives({"logits": torch.zeros(2, 10)}), "gives a dict"),
        (nn.Linear(5, 10), "fails on images"),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double()), r"several types \(torch.float32, torch.float64\)"),
    ],
)
def test_wrong_models_are_refused(model, says):
    with pytest.raises(GeneralistError, match=says):
        check_model(model, (1, 8, 8), 10, "cpu")


def test_integer_parameters_are_refused():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(GeneralistError, match="a float type is needed"):
        check_model(model, (1, 8, 8), 10, "cpu")
