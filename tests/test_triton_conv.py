"""The Triton kernels against torch: in half precision on a GPU, in float32 through Triton's interpreter on any machine.

On a GPU: `pytest -m gpu tests/test_triton_conv.py`. Without one: `TRITON_INTERPRET=1 pytest tests/test_triton_conv.py`,
where triton is installed.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_fused import (
    Net,
    assert_same,
    bare_shortcut,
    disturbed,
    images,
    late_stride,
    logits_and_gradient,
    registered,
    shortcut,
    side_and_residual,
    start,
    unrectified_end,
)
from torch import Tensor, nn
from torch.nn import functional as F

from generalist.tensors.fused import FusedNetwork, fuse, like_tensor_float

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
WHY_NOT = "needs triton and TRITON_INTERPRET=1"
LAST = torch.channels_last


@dataclass(frozen=True)
class Place:
    """Where the kernels run, and in which type."""

    device: str
    dtype: torch.dtype

    def random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        tensor = (scale * torch.randn(shape)).to(self.device, dtype or self.dtype)
        return tensor.contiguous(memory_format=LAST) if len(shape) == 4 else tensor


@pytest.fixture(
    params=[
        pytest.param(Place("cuda", torch.bfloat16), marks=pytest.mark.gpu, id="gpu"),
        pytest.param(Place("cuda", torch.float16), marks=pytest.mark.gpu, id="gpu-float16"),
        pytest.param(
            Place("cpu", torch.float32), marks=pytest.mark.skipif(not INTERPRETED, reason=WHY_NOT), id="interpreter"
        ),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    torch.manual_seed(0)
    return request.param  # type: ignore[no-any-return]


def kernels() -> Any:
    from generalist.tensors import triton_conv

    return triton_conv


def assert_within_rounding(found: Tensor, compute: Callable[[Callable[[Tensor], Tensor]], Tensor], terms: int) -> None:
    """`compute(f)` is the result of the inputs after `f`: exact in float64, and for `abs` the sum of all magnitudes.

    Products of half precision are exact in float32, each of `terms` additions rounds by at most 2^-24 of the sum of
    magnitudes (float32 products round once more; tensor cores cut off bits instead of rounding, hence 2^-22), and
    storing the result rounds it by half a unit in the last place.
    """
    exact, magnitude = compute(lambda t: t.double()), compute(lambda t: t.double().abs())
    unit = torch.finfo(found.dtype).eps / 2
    addition = 2.0**-22 if found.is_cuda else 2.0**-24
    least = torch.finfo(found.dtype).tiny * unit  # of float16, numbers near 0 have fewer bits
    bound = unit * exact.abs() + (terms + 2) * addition * magnitude + least + 1e-30
    assert ((found.double() - exact).abs() <= bound * (1 + unit)).all()
    assert exact.abs().max() > 0.1


def forward_matrix(weight: Tensor) -> Tensor:
    """[out, in, h, w] as [taps * in, out]."""
    return weight.permute(2, 3, 1, 0).reshape(-1, len(weight)).contiguous()


def backward_matrix(weight: Tensor, *, reverse: bool) -> Tensor:
    """[out, in, h, w] as [taps * out, in]."""
    weight = weight.flip(2, 3) if reverse else weight
    return weight.permute(2, 3, 0, 1).reshape(-1, weight.shape[1]).contiguous()


SIZES = [(3, 6, 10), (1, 2, 2), (2, 8, 16), (3, 7, 5), (2, 5, 8), (16, 4, 7)]
"""Batch, height and width: rows in tiles and a rest, a rest alone, whole tiles; odd numbers of rows and of columns."""


def halved(size: tuple[int, int, int]) -> tuple[int, int]:
    """Height and width after a stride of 2."""
    return (size[1] + 1) // 2, (size[2] + 1) // 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("extras", [(), ("bias", "relu"), ("residual",), ("mask",), ("bias", "residual", "relu")])
def test_convolution(place: Place, size: tuple[int, int, int], stride: int, extras: tuple[str, ...]) -> None:
    batch, height, width = size
    x, weight = place.random(batch, 64, height, width), place.random(128, 64, 3, 3, scale=0.1)
    bias = place.random(128, dtype=torch.float32)
    after = (height, width) if stride == 1 else halved(size)
    added, mask = (place.random(batch, 128, *after) for _ in range(2))
    mask[:, :7] = 0
    found = kernels().conv3x3(
        x,
        forward_matrix(weight),
        stride=stride,
        bias=bias if "bias" in extras else None,
        residual=added if "residual" in extras else None,
        mask=mask if "mask" in extras else None,
        relu="relu" in extras,
    )

    def compute(f: Callable[[Tensor], Tensor]) -> Tensor:
        out = F.conv2d(f(x), f(weight), f(bias) if "bias" in extras else None, stride, 1)
        out = out + f(added) if "residual" in extras else out
        out = F.relu(out) if "relu" in extras else out
        return torch.where(mask > 0, out, 0) if "mask" in extras else out

    assert found.is_contiguous(memory_format=LAST)
    if "relu" in extras or "mask" in extras:
        assert (found == 0).any()
    assert_within_rounding(found, compute, terms=9 * 64 + 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side_channels", [64, 128])
def test_convolution_with_a_side(place: Place, size: tuple[int, int, int], side_channels: int) -> None:
    batch, height, width = size
    x, weight = place.random(batch, 64, *halved(size)), place.random(64, 64, 3, 3, scale=0.1)
    side, side_weight = place.random(batch, side_channels, height, width), place.random(64, side_channels, 1, 1)
    bias = place.random(64, dtype=torch.float32)
    found = kernels().conv3x3(x, forward_matrix(weight), bias=bias, side=(side, forward_matrix(side_weight)), relu=True)

    def compute(f: Callable[[Tensor], Tensor]) -> Tensor:
        return F.relu(F.conv2d(f(x), f(weight), f(bias), 1, 1) + F.conv2d(f(side), f(side_weight), None, 2))

    assert_within_rounding(found, compute, terms=9 * 64 + side_channels + 1)


@pytest.mark.parametrize("size", SIZES)
def test_reversed_convolution_is_the_input_gradient(place: Place, size: tuple[int, int, int]) -> None:
    batch, height, width = size
    g, weight = place.random(batch, 128, height, width), place.random(128, 64, 3, 3, scale=0.1)
    mask = place.random(batch, 64, height, width)
    found = kernels().conv3x3(g, backward_matrix(weight, reverse=True), residual=mask, mask=mask)

    def compute(f: Callable[[Tensor], Tensor]) -> Tensor:
        out = torch.nn.grad.conv2d_input([batch, 64, height, width], f(weight), f(g), 1, 1)
        return torch.where(mask > 0, out + f(mask), 0)

    assert_within_rounding(found, compute, terms=9 * 128 + 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("extras", [(), ("side",), ("residual", "mask"), ("side", "residual", "mask")])
def test_strided_input_gradient(place: Place, size: tuple[int, int, int], extras: tuple[str, ...]) -> None:
    batch, height, width = size
    g, g_side = (place.random(batch, 128, *halved(size)) for _ in range(2))
    weight, side_weight = place.random(128, 64, 3, 3, scale=0.1), place.random(128, 64, 1, 1)
    added, mask = (place.random(batch, 64, height, width) for _ in range(2))
    found = kernels().strided_input_gradient(
        g,
        backward_matrix(weight, reverse=False),
        size=(height, width),
        side=(g_side, backward_matrix(side_weight, reverse=False)) if "side" in extras else None,
        residual=added if "residual" in extras else None,
        mask=mask if "mask" in extras else None,
    )

    def compute(f: Callable[[Tensor], Tensor]) -> Tensor:
        shape = [batch, 64, height, width]
        out = torch.nn.grad.conv2d_input(shape, f(weight), f(g), 2, 1)
        if "side" in extras:
            out = out + torch.nn.grad.conv2d_input(shape, f(side_weight), f(g_side), 2)
        out = out + f(added) if "residual" in extras else out
        return torch.where(mask > 0, out, 0) if "mask" in extras else out

    assert_within_rounding(found, compute, terms=5 * 128 + 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 3, 7])
@pytest.mark.parametrize("relu", [False, True])
def test_image_convolution(place: Place, size: tuple[int, int, int], channels: int, relu: bool) -> None:
    """Images may be of another type than the weights; the kernel rounds them first."""
    batch, height, width = size
    x = place.random(batch, channels, height, width, dtype=torch.float32)
    weight, bias = place.random(64, channels, 3, 3), place.random(64, dtype=torch.float32)
    found = kernels().image_conv(x, forward_matrix(weight), bias, relu=relu)
    rounded = x.to(place.dtype)

    def compute(f: Callable[[Tensor], Tensor]) -> Tensor:
        out = F.conv2d(f(rounded), f(weight), f(bias), 1, 1)
        return F.relu(out) if relu else out

    assert found.dtype == place.dtype and bool((found == 0).any()) == relu
    assert_within_rounding(found, compute, terms=9 * channels + 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 3, 7])
def test_image_gradient(place: Place, size: tuple[int, int, int], channels: int) -> None:
    batch, height, width = size
    g, weight = place.random(batch, 64, height, width), place.random(64, channels, 3, 3)
    padded = F.pad(backward_matrix(weight, reverse=True), (0, kernels().IMAGE_CHANNELS - channels))
    found = kernels().image_gradient(g, padded.contiguous(), channels, torch.float32)

    def compute(f: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.nn.grad.conv2d_input([batch, channels, height, width], f(weight), f(g), 1, 1)

    assert found.dtype == torch.float32 and found.shape == (batch, channels, height, width)
    assert_within_rounding(found, compute, terms=9 * 64)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("channels", "kernel"), [(3, 3), (64, 3), (128, 3), (128, 1)])
@pytest.mark.parametrize("order", [torch.contiguous_format, LAST])
def test_folding_kernel(place: Place, channels: int, kernel: int, reverse: bool, order: torch.memory_format) -> None:
    weight = place.random(128, channels, kernel, kernel, dtype=torch.float32).contiguous(memory_format=order)
    gain, shift, mean = (place.random(128, dtype=torch.float32) for _ in range(3))
    variance = place.random(128, dtype=torch.float32).abs() + 0.1
    columns = kernels().IMAGE_CHANNELS if channels < kernels().IMAGE_CHANNELS else channels
    forward = torch.full((kernel * kernel * channels, 128), torch.nan, device=place.device, dtype=place.dtype)
    backward = torch.full((kernel * kernel * 128, columns), torch.nan, device=place.device, dtype=place.dtype)
    bias = torch.full((128,), torch.nan, device=place.device)
    statistics = (gain, shift, mean, variance, 1e-5)
    kernels().fold(weight, statistics, forward=forward, backward=backward, bias=bias, reverse=reverse)
    scale = gain.double() / (variance.double() + 1e-5).sqrt()
    folded = weight.double() * scale.reshape(-1, 1, 1, 1)
    share = torch.finfo(place.dtype).eps / 2 + 8 * 2.0**-24  # of the result: a few float32 operations, and storing
    for found, exact in (
        (forward, forward_matrix(folded)),
        (backward[:, :channels], backward_matrix(folded, reverse=reverse)),
    ):
        least = torch.finfo(place.dtype).tiny * torch.finfo(place.dtype).eps
        assert ((found.double() - exact).abs() <= share * exact.abs() + least).all()
    assert (backward[:, channels:] == 0).all()
    exact_bias = shift.double() - mean.double() * scale
    assert ((bias.double() - exact_bias).abs() <= 2.0**-20 * (shift.double().abs() + (mean * scale).abs())).all()


@pytest.mark.parametrize("classes", [10, 16, 37])
@pytest.mark.parametrize(("channels", "side"), [(64, 3), (256, 4), (512, 1)])
def test_head(place: Place, classes: int, channels: int, side: int) -> None:
    features, weight = place.random(3, channels, side, side), place.random(classes, channels)
    bias, g = place.random(classes), place.random(3, classes, dtype=torch.float32)
    logits = kernels().head(features, weight, bias)
    found = kernels().head_gradient(g, weight, features)
    pixels = side * side

    def compute_logits(f: Callable[[Tensor], Tensor]) -> Tensor:
        return F.linear(f(features).mean(dim=(2, 3)), f(weight), f(bias))

    def compute_gradient(f: Callable[[Tensor], Tensor]) -> Tensor:
        flat = f(g) @ f(weight) / pixels
        return torch.where(features > 0, flat[:, :, None, None], 0)

    assert logits.dtype == torch.float32
    assert_within_rounding(logits, compute_logits, terms=channels + pixels + 2)
    assert_within_rounding(found, compute_gradient, terms=classes + 2)


# -- whole networks ---------------------------------------------------------------------------------------------------


def mixed_with_images(net: Any, x: Tensor) -> Tensor:
    """The images are read by a kernel and by plain torch."""
    return net.relu(net.narrow(start(net, x)) + x)  # type: ignore[no-any-return]


def network_and_model(place: Place, body: Any, side: int = 4) -> tuple[FusedNetwork, nn.Module]:
    model = Net(body, width=64)
    if body is mixed_with_images:
        model.narrow[0], model.narrow[1] = nn.Conv2d(64, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        model.tail = nn.Linear(3, 5)
    ready = disturbed(model, torch.float32).to(place.device)
    return fuse(ready, place.dtype, shape=(3, side, side), triton=True), ready


WHOLE: dict[str, tuple[Any, int]] = {
    "shortcut": (shortcut, 4),  # the stem, two convolutions and the side
    "side-and-residuals": (side_and_residual, 3),  # the side's value is first read with a stride of 1
    "unrectified-end": (unrectified_end, 2),  # the head's kernel wants rectified features: autograd's instead
    "stride-on-the-second": (late_stride, 1),  # no kernel takes the side beside a stride of 1: plain torch instead
    "shortcut-without-norm": (bare_shortcut, 1),
    "mixed-with-images": (mixed_with_images, 1),
}
"""Networks, and for how many of their layers there are kernels."""


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("case", WHOLE)
def test_fused_network_is_the_model(place: Place, case: str, layout: torch.memory_format) -> None:
    body, count = WHOLE[case]
    network, model = network_and_model(place, body)
    assert len(network.kernels) == count
    x = images(3, 4, torch.float32).to(place.device).contiguous(memory_format=layout)
    if place.dtype == torch.float32:
        assert_same(network, model, x, tolerance=1e-5)
        return
    found, expected = logits_and_gradient(network, x), logits_and_gradient(model, x)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.cosine_similarity(mine.double().flatten(), theirs.double().flatten(), dim=0) > 0.99


def test_odd_images_have_kernels_too(place: Place) -> None:
    network, model = network_and_model(place, shortcut, side=5)
    assert len(network.kernels) == WHOLE["shortcut"][1]
    x = images(2, 5, torch.float32).to(place.device)
    if place.dtype == torch.float32:
        assert_same(network, model, x, tolerance=1e-5)
    else:
        assert torch.allclose(network(x).float(), model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("side", [28, 32, 33])
def test_a_resnet18_is_wholly_fused_for_images_of_any_size(place: Place, side: int) -> None:
    model = registered("resnet18", torch.float32).to(place.device)
    assert fuse(model, place.dtype, shape=(3, side, side), triton=True).whole


def test_refresh_follows_in_place(place: Place) -> None:
    network, model = network_and_model(place, shortcut)
    kernel = next(iter(network.kernels.values()))
    address = kernel.forward_matrix.data_ptr()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    network.refresh()
    assert kernel.forward_matrix.data_ptr() == address
    x = images(2, 4, torch.float32).to(place.device)
    tolerance = 1e-5 if place.dtype == torch.float32 else 0.05
    assert torch.allclose(network(x).float(), model(x), rtol=tolerance, atol=tolerance)


def cosine(first: Tensor, second: Tensor) -> float:
    return float(torch.cosine_similarity(first.double().flatten(), second.double().flatten(), dim=0))


@pytest.mark.gpu
@pytest.mark.parametrize("order", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e9])
def test_float16_is_as_good_as_cudnn_in_float32(order: torch.memory_format, size: float) -> None:
    """By default cuDNN multiplies in TensorFloat-32. The size of the loss does not matter."""
    model = registered("resnet18", torch.float32).cuda().to(memory_format=order)
    network = like_tensor_float(model, shape=(3, 32, 32))
    assert network is not None
    x = images(64, 32, torch.float32).cuda()

    def error(classifier: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        image = x.to(dtype).requires_grad_()
        logits = classifier(image)
        assert logits.dtype == dtype
        gradient = torch.autograd.grad((size * logits[:, 0]).sum(), image)[0]
        return logits.detach().double(), gradient.double() / size

    exact = error(copy.deepcopy(model).double(), torch.float64)
    for mine, theirs, true in zip(error(network), error(model), exact, strict=True):
        assert (mine - true).norm() <= 1.5 * (theirs - true).norm()


@pytest.mark.gpu
def test_values_beyond_the_range_of_float16_saturate() -> None:
    place = Place("cuda", torch.float16)
    x, weight = place.random(1, 64, 4, 4).abs() * 1e4, place.random(64, 64, 3, 3).abs()
    found = kernels().conv3x3(x, forward_matrix(weight))
    assert found.isfinite().all() and found.max() == torch.finfo(torch.float16).max


@pytest.mark.gpu
def test_where_the_flags_ask_for_all_of_float32_it_is_left_to_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")
    assert like_tensor_float(registered("resnet18", torch.float32).cuda(), shape=(3, 32, 32)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_do_not_depend_on_how_many_there_are(dtype: torch.dtype) -> None:
    """Bit by bit, though tiles have other sizes where there are few rows."""
    network = fuse(registered("resnet18", torch.float32).cuda(), dtype, shape=(3, 32, 32), triton=True)
    assert network.row_by_row
    x = images(512, 32, torch.float32).cuda()

    def answer(rows: int) -> tuple[Tensor, Tensor]:
        image = x[:rows].clone().requires_grad_()
        logits = network(image)
        return logits.detach(), torch.autograd.grad(logits[:, 0].sum(), image)[0]

    logits, gradient = answer(512)
    for rows in (1, 7, 32, 96, 256, 416):
        some, own = answer(rows)
        assert torch.equal(some, logits[:rows]) and torch.equal(own, gradient[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [128, 37])
def test_gradient_is_as_good_as_that_of_autocast(count: int) -> None:
    model = registered("resnet18", torch.float32).cuda()
    network = fuse(model, torch.bfloat16, shape=(3, 32, 32), triton=True)
    assert all(step.layer in network.kernels for step in network.plan.steps) and network.head is not None
    x = images(count, 32, torch.float32).cuda().contiguous(memory_format=LAST)

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).float()  # type: ignore[no-any-return]

    exact = logits_and_gradient(copy.deepcopy(model).double(), x.double())[1]
    mine, theirs = logits_and_gradient(network, x)[1], logits_and_gradient(autocast, x)[1]
    assert cosine(mine, exact) >= cosine(theirs, exact) - 1e-3
    assert cosine(mine, exact) > 0.98


@pytest.mark.gpu
def test_captured_passes_replay_equally() -> None:
    model = registered("resnet18", torch.float32).cuda()
    network = fuse(model, torch.bfloat16, shape=(3, 32, 32), triton=True)
    x = images(32, 32, torch.float32).cuda().contiguous(memory_format=LAST).requires_grad_()

    def passes() -> tuple[Tensor, Tensor]:
        network.refresh()
        logits = network(x)
        return logits, torch.autograd.grad(logits.square().sum(), x)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        passes()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes()
    for factor in (1.0, 0.9):
        with torch.no_grad():
            x.mul_(factor)
            next(model.parameters()).mul_(factor)
        graph.replay()
        for replayed, expected in zip(captured, passes(), strict=True):
            assert torch.equal(replayed, expected)
