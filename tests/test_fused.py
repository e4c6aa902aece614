"""Fused networks: the plan that is found in a network, and its forward and backward pass against autograd's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from generalist.models import ModelOptions, build_model
from generalist.tensors.folding import CannotFoldError, FoldedNetwork, trace
from generalist.tensors.fused import FusedNetwork, Plan, _in_range, fastest, fuse, plan

TOLERANCE = 1e-12


def normed(channels: int, out: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


class Net(nn.Module):
    """Layers that a test connects by its `body`, and behind them an average and a linear layer or two."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], *, width: int = 4, tail: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.stem, self.other_stem, self.image = normed(3, width), normed(3, width), normed(3, 3)
        self.a, self.b, self.c = (normed(width, width) for _ in range(3))
        self.down, self.down_2 = (normed(width, width, stride=2) for _ in range(2))
        self.side, self.side_2 = (normed(width, width, kernel=1, stride=2) for _ in range(2))
        self.bare_side = nn.Conv2d(width, width, 1, stride=2)
        self.narrow, self.wide = normed(width, 1), normed(1, width)
        self.relu, self.inplace, self.identity = nn.ReLU(), nn.ReLU(inplace=True), nn.Identity()
        self.tail = nn.Linear(width, 5) if tail is None else tail

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.tail(self.body(self, x).mean(dim=(2, 3)))
        return logits


def disturbed(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """In evaluation mode, with statistics and weights of BatchNorm that are not 0 and 1."""
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                assert layer.running_mean is not None and layer.running_var is not None
                layer.running_mean.normal_(std=0.2)
                layer.running_var.uniform_(0.5, 2)
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(std=0.2)
    model = model.to(dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.eval().requires_grad_(False)


def registered(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Module:
    return disturbed(build_model(ModelOptions(name=name, **more), num_classes=5, shape=(3, 32, 32), seed=0), dtype)


def images(count: int = 2, side: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(2)
    return torch.rand(count, 3, side, side, dtype=torch.float64).to(dtype)


def logits_and_gradient(network: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    logits = network(x)
    torch.manual_seed(3)
    direction = torch.randn(logits.shape, dtype=torch.float64).to(logits)
    (gradient,) = torch.autograd.grad(logits, x, direction)
    return logits.detach(), gradient


def assert_same(network: Any, model: nn.Module, x: Tensor, tolerance: float = TOLERANCE) -> None:
    found, expected = logits_and_gradient(network, x), logits_and_gradient(model, x)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()
    assert expected[1].abs().max() > 0


Description = list[tuple[int, int | None, int | None, bool]]


def described(found: Plan) -> Description:
    """Every step as (x, residual, value of the side, relu)."""
    return [(s.x, s.residual, s.side[0] if s.side else None, s.relu) for s in found.steps]


# -- plans ------------------------------------------------------------------------------------------------------------


def residual_steps(blocks: list[int]) -> Description:
    """Of a network of basic blocks: the stem, then two convolutions a block; the first of a stage has a shortcut."""
    steps: Description = [(0, None, None, True)]
    for stage, count in enumerate(blocks):
        for block in range(count):
            x = len(steps)
            shortcut = stage > 0 and block == 0
            steps.append((x, None, None, True))
            steps.append((x + 1, None if shortcut else x, x if shortcut else None, True))
    return steps


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", [2, 2, 2, 2]), ("resnet34", [3, 4, 6, 3])])
def test_plan_of_residual_networks(name: str, blocks: list[int]) -> None:
    found = plan(trace(registered(name), torch.float64))
    assert described(found) == residual_steps(blocks)
    assert [node.op for node in found.tail.graph.nodes] == ["placeholder", "call_method", "call_module", "output"]


def test_plan_of_the_small_network() -> None:
    found = plan(trace(registered("small"), torch.float64))
    assert described(found) == [(i, None, None, True) for i in range(4)]
    assert [step.layer.stride for step in found.steps] == [(1, 1), (2, 2), (1, 1), (2, 2)]


@pytest.mark.parametrize("name", ["small", "resnet18", "resnet34"])
def test_fused_model_is_the_model(name: str) -> None:
    model = registered(name)
    network = fuse(model, torch.float64, shape=(3, 8, 8), triton=False)
    assert_same(network, model, images())
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.mul_(1.01)
    network.refresh()
    assert_same(network, model, images())


def start(net: Any, x: Tensor) -> Tensor:
    out: Tensor = net.relu(net.stem(x))
    return out


def read_elsewhere(net: Any, x: Tensor) -> Tensor:
    h = net.a(start(net, x))
    return net.b(net.relu(h)) + h  # type: ignore[no-any-return]


def unrectified_residual(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    return net.b(net.a(h) + h)  # type: ignore[no-any-return]


def residual_blocks(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    h = net.relu(net.a(h) + h)
    return net.relu(h + net.b(h))  # type: ignore[no-any-return]


def shortcut(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    return net.relu(net.a(net.relu(net.down(h))) + net.side(h))  # type: ignore[no-any-return]


def shortcut_first(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    s = net.side(h)
    return net.relu(s + net.a(net.relu(net.down(h))))  # type: ignore[no-any-return]


def late_stride(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    return net.relu(net.down(net.relu(net.a(h))) + net.side(h))  # type: ignore[no-any-return]


def bare_shortcut(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    return net.relu(net.a(net.relu(net.down(h))) + net.bare_side(h))  # type: ignore[no-any-return]


def two_shortcuts(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    y = net.relu(net.a(net.relu(net.down(h))) + net.side(h))
    return net.relu(net.b(y) + net.side_2(h))  # type: ignore[no-any-return]


def side_and_residual(net: Any, x: Tensor) -> Tensor:
    """Every way on which a gradient can reach one value."""
    h = start(net, x)
    y = net.relu(net.a(h) + h)
    y = net.relu(net.b(y) + h)
    y = net.down(y)
    return net.relu(net.c(net.relu(y)) + net.side(h))  # type: ignore[no-any-return]


def image_residual(net: Any, x: Tensor) -> Tensor:
    return net.relu(net.stem(net.relu(net.image(x) + x)))  # type: ignore[no-any-return]


def images_read_twice(net: Any, x: Tensor) -> Tensor:
    return net.relu(net.a(start(net, x)) + net.other_stem(x))  # type: ignore[no-any-return]


def in_place(net: Any, x: Tensor) -> Tensor:
    h = net.inplace(net.stem(x))
    out = net.a(h)
    out += h
    return torch.relu(out)


def in_place_tail(net: Any, x: Tensor) -> Tensor:
    return net.inplace(net.identity(net.a(start(net, x))))  # type: ignore[no-any-return]


def unrectified_end(net: Any, x: Tensor) -> Tensor:
    return net.a(start(net, x))  # type: ignore[no-any-return]


PLANNED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Description]] = {
    "relu-of-a-value-read-elsewhere": (read_elsewhere, [(0, None, None, True), (1, None, None, False)]),
    "residual-without-relu": (
        unrectified_residual,
        [(0, None, None, True), (1, 1, None, False), (2, None, None, False)],
    ),
    "residuals-in-a-row": (residual_blocks, [(0, None, None, True), (1, 1, None, True), (2, 2, None, True)]),
    "shortcut": (shortcut, [(0, None, None, True), (1, None, None, True), (2, None, 1, True)]),
    "shortcut-first": (shortcut_first, [(0, None, None, True), (1, None, None, True), (2, None, 1, True)]),
    "stride-on-the-second": (late_stride, [(0, None, None, True), (1, None, None, True), (2, None, 1, True)]),
    "shortcut-without-norm": (bare_shortcut, [(0, None, None, True), (1, None, None, True), (2, None, 1, True)]),
    "side-and-residuals-of-one-value": (
        side_and_residual,
        [(0, None, None, True), (1, 1, None, True), (2, 1, None, True), (3, None, None, True), (4, None, 1, True)],
    ),
    "images-as-residual": (image_residual, [(0, 0, None, True), (1, None, None, True)]),
    "in-place": (in_place, [(0, None, None, True), (1, 1, None, True)]),
    "in-place-tail": (in_place_tail, [(0, None, None, True), (1, None, None, False)]),
    "unrectified-end": (unrectified_end, [(0, None, None, True), (1, None, None, False)]),
}


@pytest.mark.parametrize("case", PLANNED)
def test_planned_network_is_the_model(case: str) -> None:
    body, steps = PLANNED[case]
    model = disturbed(Net(body))
    network = fuse(model, torch.float64, shape=(3, 8, 8), triton=False)
    assert described(network.plan) == steps
    assert_same(network, model, images())
    assert_same(network, model, images(count=3).contiguous(memory_format=torch.channels_last))


def test_tail_of_several_layers() -> None:
    tail = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5))
    model = disturbed(Net(shortcut, tail=tail))
    network = fuse(model, torch.float64, shape=(3, 8, 8), triton=False)
    assert len(network.plan.steps) == 3
    assert_same(network, model, images())


def test_odd_sides_and_large_batches() -> None:
    """A batch whose values have too many elements to be counted in 32 bits is taken in parts."""
    model = disturbed(Net(shortcut))
    network = fuse(model, torch.float64, shape=(3, 7, 7), triton=False)
    assert network.most_images == (2**31 - 1) // (4 * 7 * 7)
    network.most_images = 2
    assert_same(network, model, images(count=5, side=7))


def test_images_keep_their_type() -> None:
    model = disturbed(Net(image_residual), torch.float32)
    network = fuse(model, torch.bfloat16, shape=(3, 8, 8), triton=False)
    logits, gradient = logits_and_gradient(network, images(dtype=torch.float32))
    expected = logits_and_gradient(model, images(dtype=torch.float32))
    assert (logits.dtype, gradient.dtype) == (torch.bfloat16, torch.float32)
    assert torch.cosine_similarity(gradient.flatten(), expected[1].flatten(), dim=0) > 0.99


def no_convolution(net: Any, x: Tensor) -> Tensor:
    return net.stem(torch.tanh(x))  # type: ignore[no-any-return]


def double_addition(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    return net.relu(net.a(h) + h + h)  # type: ignore[no-any-return]


def weighted_addition(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    return net.relu(torch.add(net.a(h), h, alpha=2))  # type: ignore[no-any-return]


def two_ends(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    return torch.sigmoid(net.a(h)) * net.b(h)  # type: ignore[no-any-return]


def unread(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    net.b(h)
    return net.a(h)  # type: ignore[no-any-return]


def added_before_convolved(net: Any, x: Tensor) -> Tensor:
    h = start(net, x)
    y = net.relu(net.other_stem(x) + h)
    return net.relu(net.b(y) + net.a(h))  # type: ignore[no-any-return]


def broadcast(net: Any, x: Tensor) -> Tensor:
    h = net.relu(net.narrow(start(net, x)))
    return net.relu(net.wide(h) + h)  # type: ignore[no-any-return]


def overwritten(net: Any, x: Tensor) -> Tensor:
    h = net.stem(x)
    old = h
    h += net.a(h)
    return net.relu(net.b(h) + old)  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "no-convolution-first": (no_convolution, "does not begin with a convolution"),
    "double-addition": (double_addition, "more than one value"),
    "weighted-addition": (weighted_addition, "more than one value"),
    "two-ends": (two_ends, "more than one value"),
    "unread-convolution": (unread, "not part of the chain"),
    "added-before-convolved": (added_before_convolved, "added before it is convolved"),
    "two-shortcuts-of-one-value": (two_shortcuts, "added before it is convolved"),
    "images-read-twice": (images_read_twice, "added before it is convolved"),
    "broadcast": (broadcast, "different shapes"),
    "overwritten": (overwritten, "more than one value"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_network_without_a_plan_is_folded_instead(case: str) -> None:
    body, words = REFUSED[case]
    model = disturbed(Net(body))
    with pytest.raises(CannotFoldError, match=words):
        fuse(model, torch.float64, shape=(3, 8, 8), triton=False)
    network = fastest(model, torch.float64, shape=(3, 8, 8))
    assert type(network) is FoldedNetwork
    with torch.no_grad():
        assert (network(images()) - model(images())).abs().max() <= TOLERANCE


class SecondArgument(Net):
    def forward(self, x: Tensor, shift: float = 0.5) -> Tensor:
        logits: Tensor = self.tail((self.stem(x) + shift).mean(dim=(2, 3)))
        return logits


def test_second_argument_is_not_taken_for_the_images() -> None:
    model = disturbed(SecondArgument(shortcut))
    with pytest.raises(CannotFoldError, match="does not begin with a convolution"):
        fuse(model, torch.float64, shape=(3, 8, 8), triton=False)
    assert_same(fastest(model, torch.float64, shape=(3, 8, 8)), model, images())


@pytest.mark.parametrize("name", ["preact-resnet18", "resnet50"])
def test_models_without_a_plan(name: str) -> None:
    with pytest.raises(CannotFoldError):
        fuse(registered(name), torch.float64, shape=(3, 32, 32), triton=False)


def test_fastest_is_folded_where_there_is_no_gpu() -> None:
    assert type(fastest(registered("small", torch.float32), torch.bfloat16, shape=(3, 8, 8))) is FoldedNetwork


@pytest.mark.gpu
def test_fastest_form_on_a_gpu() -> None:
    def form(model: nn.Module, side: int = 32) -> type[FoldedNetwork]:
        return type(fastest(copy.deepcopy(model).cuda(), torch.bfloat16, shape=(3, side, side)))

    assert form(registered("resnet18", torch.float32)) is FusedNetwork
    assert form(registered("resnet18", torch.float32), side=28) is FoldedNetwork  # 28, 14, 7: odd before the last
    assert form(registered("preact-resnet18", torch.float32)) is FoldedNetwork
    assert form(registered("small", torch.float32, width=4)) is FoldedNetwork  # no whole tiles of channels
    assert form(disturbed(Net(late_stride, width=64), torch.float32)) is FoldedNetwork


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 3e4, 1e30])
def test_gradients_are_brought_into_the_range_of_float16_and_back_exactly(size: float) -> None:
    g = torch.linspace(-1, 1, 24).reshape(4, 6) * size
    g[2] = 0
    scaled, exponent = _in_range(g)
    largest = scaled.abs().amax(1)
    assert ((largest[[0, 1, 3]] >= 0.5) & (largest[[0, 1, 3]] < 1)).all() and largest[2] == 0
    assert torch.equal(torch.ldexp(scaled, exponent.unsqueeze(1)), g)
