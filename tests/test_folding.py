"""Folding of BatchNorm: the folded network is the network in evaluation mode, or there is a reason why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm

from generalist.models import ModelOptions, Normalized, NormalizeOptions, build_model
from generalist.tensors.folding import CannotFoldError, fold

TOLERANCE = 1e-12


def disturb(model: nn.Module) -> nn.Module:
    """The model in float64 with BatchNorm statistics and weights as training would leave them, not 0 and 1."""
    torch.manual_seed(1)
    model = model.double()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None and layer.running_var is not None:
                layer.running_mean.normal_(std=0.2)
                layer.running_var.uniform_(0.5, 2)
            if isinstance(layer, nn.BatchNorm2d) and layer.weight is not None:
                layer.weight.uniform_(-1, 1)
                layer.bias.normal_(std=0.2)
    return model


def images(count: int = 2, channels: int = 3, side: int = 8) -> Tensor:
    torch.manual_seed(2)
    return torch.rand(count, channels, side, side, dtype=torch.float64)


def logits_and_gradient(network: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    logits = network(x)
    torch.manual_seed(3)
    (gradient,) = torch.autograd.grad(logits, x, torch.randn_like(logits))
    return logits.detach(), gradient


def in_eval_mode(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval().requires_grad_(False)


def assert_same(folded: Any, model: nn.Module, x: Tensor) -> None:
    logits, gradient = logits_and_gradient(folded, x)
    expected_logits, expected_gradient = logits_and_gradient(in_eval_mode(model), x)
    assert (logits - expected_logits).abs().max() <= TOLERANCE * (1 + expected_logits.abs().max())
    assert (gradient - expected_gradient).abs().max() <= TOLERANCE * (1 + expected_gradient.abs().max())
    assert expected_gradient.abs().max() > 0


def registered(name: str, **more: Any) -> nn.Module:
    return disturb(build_model(ModelOptions(name=name, **more), num_classes=5, shape=(3, 32, 32), seed=0))


@pytest.mark.parametrize("name", ["small", "resnet18", "preact-resnet18", "resnet50", "resnet50-imagenet"])
def test_folded_model_is_the_model_in_eval_mode(name: str) -> None:
    model = registered(name)
    side = 32 if name.endswith("imagenet") else 8
    assert_same(fold(model, torch.float64), model, images(side=side))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet34", "wrn-28-10", "wrn-32-10", "wrn-34-10", "wrn-50-2"])
def test_folded_large_model_is_the_model_in_eval_mode(name: str) -> None:
    model = registered(name)
    assert_same(fold(model, torch.float64), model, images(count=1, side=32 if name == "wrn-50-2" else 8))


def test_normalization_is_folded_along() -> None:
    options = NormalizeOptions(mean=[0.4, 0.5, 0.6], std=[0.2, 0.25, 0.3])
    model = disturb(Normalized(registered("small", width=4), options))
    folded = fold(model, torch.float64)
    assert_same(folded, model, images())
    model.get_buffer("mean").add_(0.1)
    folded.refresh()
    assert_same(folded, model, images())


class Layers(nn.Module):
    """Three convolutions and a linear layer; each test connects them as it wants to."""

    def __init__(self, *, bias: bool = False, affine: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=bias)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(4, affine=affine)
        self.other_norm = nn.BatchNorm2d(4, affine=affine)
        self.dropout = nn.Dropout(0.5)
        self.relu = nn.ReLU()
        self.inplace = nn.ReLU(inplace=True)
        self.linear = nn.Linear(4, 5)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.norm(self.first(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.features(x).mean(dim=(2, 3)))
        return logits


class WithDropout(Layers):
    def features(self, x: Tensor) -> Tensor:
        return F.dropout(self.dropout(super().features(x)), p=0.3, training=self.training)


class NormFirst(Layers):
    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.relu(self.norm(torch.tanh(self.first(x)))))
        return out


class ConvTwice(Layers):
    """One convolution, used twice, with a BatchNorm of its own each time and, the third time, none."""

    def features(self, x: Tensor) -> Tensor:
        x = self.norm(self.second(self.first(x)))
        x = self.other_norm(self.second(self.relu(x)))
        out: Tensor = self.second(self.relu(x))
        return out


class NormTwice(Layers):
    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.relu(self.norm(self.first(x))))) * 2


class OutputTwice(Layers):
    """What the convolution answers is needed beside its BatchNorm, so it cannot be folded into it."""

    def features(self, x: Tensor) -> Tensor:
        convolved = self.first(x)
        return self.norm(convolved) + torch.sigmoid(convolved)


class ChangedBetween(Layers):
    """The convolution's input changes in place before its BatchNorm comes."""

    def features(self, x: Tensor) -> Tensor:
        x = self.first(x) + 0.1
        convolved = self.second(x)
        x.add_(0.5)
        return self.norm(convolved) + x


class SharedInPlace(Layers):
    """Two names for one tensor, which then changes under both."""

    def features(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        same = x
        x += 0.5
        x -= same / 4
        x *= 2
        x /= 3
        return torch.tanh(same)


class UnreadInPlace(Layers):
    """A rectifier in place whose answer nobody takes."""

    def features(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        self.inplace(x)
        return x * 2


class OwnConstant(Layers):
    """A tensor that the forward pass makes itself."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * torch.tensor([1.0, -2.0, 3.0, -4.0]).reshape(1, 4, 1, 1)


class OwnNorm(Layers):
    """BatchNorm without weights by hand: computed from buffers that training changes."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.full((4,), 2.0))

    def features(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(self.variance + 1e-5).reshape(1, 4, 1, 1)
        return torch.tanh((self.first(x) - self.mean.reshape(1, 4, 1, 1)) * scale)


class Remembers(Layers):
    """Keeps what it was fed and what it made, as models whose features are looked at later do."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: Any = None

    def features(self, x: Tensor) -> Tensor:
        self.fed = x
        self.relu.made = out = super().features(x)  # type: ignore[assignment]
        return out


VARIETIES = {
    "bias": lambda: Layers(bias=True),
    "without-affine": lambda: Layers(affine=False),
    "without-affine-with-bias": lambda: Layers(affine=False, bias=True),
    "dropout": WithDropout,
    "norm-not-behind-conv": NormFirst,
    "conv-used-twice": ConvTwice,
    "norm-used-twice": NormTwice,
    "output-used-twice": OutputTwice,
    "in-place-unread": UnreadInPlace,
    "in-place-shared": SharedInPlace,
    "constant-of-its-own": OwnConstant,
    "norm-by-hand": OwnNorm,
    "remembers": Remembers,
}


@pytest.mark.parametrize("variety", VARIETIES)
def test_varieties_are_folded_and_follow_changes(variety: str) -> None:
    """Also where the source stays in training mode all the time."""
    model = disturb(VARIETIES[variety]()).train()
    folded = fold(model, torch.float64)
    assert_same(folded, model, images())
    before = folded(images())
    disturb_all(model)
    assert torch.equal(folded(images()), before)
    folded.refresh()
    assert_same(folded, model, images())
    assert (folded(images()) - before).abs().max() > 1e-3


def disturb_all(model: nn.Module) -> None:
    """Change every weight and statistic in place, as a step of training does."""
    torch.manual_seed(4)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.mul_(1.3).add_(torch.rand_like(tensor), alpha=0.1)


def test_input_changed_between_convolution_and_norm() -> None:
    """Autograd refuses such a network, but its logits are what they are."""
    model = disturb(ChangedBetween())
    with torch.no_grad():
        difference = fold(model, torch.float64)(images()) - in_eval_mode(model)(images())
    assert difference.abs().max() <= TOLERANCE


def test_conv_and_norm_become_one_layer() -> None:
    folded = fold(disturb(Layers()), torch.float64)
    assert [type(layer).__name__ for layer in folded.layers] == ["FoldedConv", "FoldedLinear"]


def test_refresh_keeps_the_tensors_in_place() -> None:
    """A captured graph reads these addresses."""
    model = registered("small", width=4)
    folded = fold(model, torch.float64)
    places = [buffer.data_ptr() for buffer in folded.graph.buffers()]
    assert places
    disturb_all(model)
    folded.refresh()
    assert [buffer.data_ptr() for buffer in folded.graph.buffers()] == places


@pytest.mark.parametrize("variety", ["dropout", "constant-of-its-own", "norm-by-hand", "remembers"])
def test_source_is_left_as_it_was(variety: str) -> None:
    model = disturb(VARIETIES[variety]()).train()
    model.get_submodule("norm").eval()
    model.get_parameter("linear.bias").requires_grad_(False)
    model(images())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = [dict(vars(module)) for module in model.modules()]
    fold(model, torch.float64)(images())
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert [module.training for module in model.modules() if isinstance(module, nn.BatchNorm2d)] == [False, True]
    assert not model.get_parameter("linear.bias").requires_grad
    assert model.get_parameter("linear.weight").requires_grad
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_no_gradient_reaches_the_weights() -> None:
    model = registered("small", width=4)
    folded = fold(model, torch.float64)
    assert not list(folded.graph.parameters())
    assert not folded(images()).requires_grad
    folded(images().requires_grad_()).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_folded_network_computes_in_its_own_type() -> None:
    model = registered("small", width=4).float()
    folded = fold(model, torch.bfloat16)
    x = images().float().requires_grad_()
    logits = folded(x)
    assert logits.dtype == torch.bfloat16
    assert torch.autograd.grad(logits.sum(), x)[0].dtype == torch.float32
    with torch.no_grad():
        assert torch.allclose(logits.float(), in_eval_mode(model)(x), atol=0.05, rtol=0.05)


class Branching(Layers):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) if x.sum() > 0 else x


class BareParameter(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * self.scale


class Padded(Layers):
    def __init__(self, **padding: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, bias=False, **padding)


class Keyword(Layers):
    def features(self, x: Tensor) -> Tensor:
        return self.norm(input=self.first(x))  # type: ignore[no-any-return]


class Wordy(Layers):
    def features(self, x: Tensor) -> Tensor:
        raise RuntimeError("the first line\nand the second")


def with_layer(name: str, layer: nn.Module, model: nn.Module | None = None) -> nn.Module:
    model = Layers() if model is None else model
    setattr(model, name, layer)
    return model


def hooked(name: str) -> nn.Module:
    model = Layers()
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


def weight_normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return with_layer("first", weight_norm(nn.Conv2d(3, 4, 3, padding=1)))


REFUSED = {
    "control-flow": (Branching, "cannot be traced .*control flow"),
    "bare-parameter": (BareParameter, "parameter 'scale' outside of a layer"),
    "layer-norm": (lambda: with_layer("relu", nn.LayerNorm([4, 8, 8])), "'relu' is a LayerNorm"),
    "group-norm": (lambda: with_layer("norm", nn.GroupNorm(2, 4)), "'norm' is a GroupNorm"),
    "batch-norm-1d": (lambda: with_layer("linear", nn.BatchNorm1d(4)), "'linear' is a BatchNorm1d"),
    "no-statistics": (
        lambda: with_layer("norm", nn.BatchNorm2d(4, track_running_stats=False)),
        "BatchNorm keeps no running statistics",
    ),
    "no-statistics-not-behind-conv": (
        lambda: with_layer("norm", nn.BatchNorm2d(4, track_running_stats=False), NormFirst()),
        "BatchNorm keeps no running statistics",
    ),
    "string-padding": (lambda: Padded(padding="same"), "pads by 'zeros' and 'same'"),
    "reflecting-padding": (lambda: Padded(padding=1, padding_mode="reflect"), "pads by 'reflect'"),
    "parametrized": (
        lambda: with_layer("first", parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1))),
        "'first' is a ParametrizedConv2d",
    ),
    "weight-norm": (weight_normed, "'first' has hooks"),
    "hook-on-conv": (lambda: hooked("first"), "'first' has hooks"),
    "hook-on-norm": (lambda: hooked("norm"), "'norm' has hooks"),
    "hook-on-relu": (lambda: hooked("relu"), "'relu' has hooks"),
    "hook-on-model": (lambda: hooked(""), "it has hooks"),
    "keyword": (Keyword, "'norm' is called with more than one tensor"),
    "wordy": (Wordy, r"cannot be traced \(RuntimeError: the first line\)$"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_reason_against_folding_is_said_in_one_line(reason: str) -> None:
    make, words = REFUSED[reason]
    model = make()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CannotFoldError, match=words) as error:
        fold(model, torch.float64)
    assert "\n" not in str(error.value)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
