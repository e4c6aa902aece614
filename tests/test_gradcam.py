"""Grad-CAM: maps by hand, the layer that is found or named, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import generalist
from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.models import MODELS


class TwoLayers(nn.Module):
    """A 1x1 convolution to two channels, its mean over positions, and a linear layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1, bias=False)
        self.linear = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.conv.weight.copy_(torch.tensor([2.0, -1.0]).reshape(2, 1, 1, 1))
            self.linear.weight.copy_(torch.tensor([[4.0, 0.0], [1.0, 8.0]]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.conv(x).mean((2, 3)))
        return out


IMAGE = torch.tensor([[[[0.0, 0.5], [1.0, 0.25]]]])


def test_the_map_is_the_one_computed_by_hand() -> None:
    """Features are 2x and -x; d logit_k / d A_c = W_kc / 4 everywhere, which is its own mean w_c.

    Class 0: w = (1, 0), the map relu(2x). Class 1: w = (1/4, 2), relu(x/2 - 2x) = 0 everywhere.
    """
    model = TwoLayers()
    torch.testing.assert_close(generalist.gradcam(model, IMAGE, target=0), 2 * IMAGE[:, 0])
    torch.testing.assert_close(generalist.gradcam(model, IMAGE, target=1), torch.zeros(1, 2, 2))


def test_left_out_the_class_is_the_one_that_the_model_names() -> None:
    model = TwoLayers()
    assert int(model(IMAGE).argmax()) == 0
    torch.testing.assert_close(generalist.gradcam(model, IMAGE), 2 * IMAGE[:, 0])
    two = torch.cat([IMAGE, IMAGE])
    found = generalist.gradcam(model, two, torch.tensor([1, 0]))
    assert float(found[0].max()) == 0 and float(found[1].max()) == 2


def test_the_model_is_given_back_as_it_was() -> None:
    model = TwoLayers().train()
    model.conv.weight.requires_grad_(False)
    generalist.gradcam(model, IMAGE, target=0)
    assert model.training and not model.conv.weight.requires_grad and model.linear.weight.requires_grad
    assert model.linear.weight.grad is None
    assert not any(module._forward_hooks for module in model.modules())


def test_the_layer_is_the_last_before_pooling_or_the_one_named() -> None:
    conv, second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), second, nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 2))
    with torch.no_grad():  # positive throughout, so that no map is empty
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(random.uniform(0, f"weights-{number}", shape=tuple(parameter.shape)))
    x = random.uniform(0, "images", torch.arange(2), shape=(1, 8, 8))
    found = generalist.gradcam(model, x, target=1)
    torch.testing.assert_close(found, generalist.gradcam(model, x, target=1, layer="3"))
    assert not torch.equal(found, generalist.gradcam(model, x, target=1, layer="4")), "the pooled map is another one"
    assert not torch.equal(found, generalist.gradcam(model, x, target=1, layer="0"))


@pytest.mark.parametrize("name", ["small", "resnet18", "preact-resnet18"])
def test_every_network_of_the_library_has_maps(name: str) -> None:
    model = MODELS.get(name)(num_classes=4, in_channels=3)
    maps = generalist.gradcam(model, random.uniform(0, "images", torch.arange(2), shape=(3, 16, 16)))
    assert maps.shape == (2, 16, 16) and bool((maps >= 0).all())


def test_other_precisions_are_those_of_the_model() -> None:
    found = generalist.gradcam(TwoLayers().double(), IMAGE, target=0)
    torch.testing.assert_close(found, 2 * IMAGE[:, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": torch.zeros(1, 4, 4)}, r"float tensor \[B, C, H, W\]"),
        ({"images": torch.zeros(1, 1, 4, 4, dtype=torch.uint8)}, "float tensor"),
        ({"images": 2 * IMAGE}, r"must lie in \[0, 1\]"),
        ({"images": IMAGE * float("nan")}, "must lie in"),
        ({"target": 2}, "has 2 classes, 0 to 1"),
        ({"target": -1}, "has 2 classes, 0 to 1"),
        ({"target": torch.tensor([0, 1])}, "one for each of the 1 images"),
        ({"target": torch.tensor([0.0])}, "one for each of the 1 images"),
        ({"layer": "nowhere"}, "no layer 'nowhere'; its convolutions are conv"),
        ({"layer": "linear"}, "returns no feature map"),
    ],
)
def test_mistakes_are_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(GeneralistError, match=message):
        generalist.gradcam(TwoLayers(), **{"images": IMAGE, **arguments})
