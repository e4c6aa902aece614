"""Convolutions of a folded network as Triton kernels, with everything around them in the epilogue.

cuDNN's convolutions leave bias, residual, ReLU and its mask to passes of their own over memory. On an H200, at the
sizes of a ResNet-18 and batch 128, these kernels are as fast as cuDNN's bare convolutions and do the rest on the way
(docs/performance.md). Images and activations are NHWC in memory, weights are matrices [taps * channels in, channels
out]; products are summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 64
"""Channels of one tap that a step of the sum takes: what a kernel here needs every channel count to be a multiple of,
except for the images' own channels."""

IMAGE_CHANNELS = 16
"""Columns of the matrix product that makes the images' gradient: tensor cores take no fewer."""


@triton.jit  # type: ignore[untyped-decorator]
def _conv_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    residual,
    mask,
    side,
    side_weight,
    out,
    rows,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    SIDE_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """3x3 with padding 1; HEIGHT and WIDTH are those of the output. The side input is a 1x1 convolution of stride 2."""
    pid = tl.program_id(0)
    column_blocks: tl.constexpr = N // BN
    rm = (pid // column_blocks) * BM + tl.arange(0, BM)
    rn = (pid % column_blocks) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    inside = (rm < rows) | EVEN  # a constant where every tile is whole, and then no mask is made of it
    image = rm // (HEIGHT * WIDTH)
    row = (rm % (HEIGHT * WIDTH)) // WIDTH
    column = rm % WIDTH
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    blocks: tl.constexpr = C // BK
    origin = (image * HEIGHT * STRIDE + row * STRIDE) * WIDTH * STRIDE + column * STRIDE
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for k in range(9 * blocks):
        tap = k // blocks
        kc = (k % blocks) * BK + rk
        down = tap // 3 - 1
        right = tap % 3 - 1
        h = row * STRIDE + down
        w = column * STRIDE + right
        there = inside & (h >= 0) & (h < HEIGHT * STRIDE) & (w >= 0) & (w < WIDTH * STRIDE)
        pixel = origin + down * WIDTH * STRIDE + right
        a = tl.load(x + pixel[:, None] * C + kc[None, :], mask=there[:, None], other=0.0)
        b = tl.load(weight + (tap * C + kc)[:, None] * N + rn[None, :])
        acc = tl.dot(a, b, acc)
    if SIDE_C > 0:
        pixel = (image * HEIGHT * 2 + row * 2) * WIDTH * 2 + column * 2
        for k in range(SIDE_C // BK):
            kc = k * BK + rk
            a = tl.load(side + pixel[:, None] * SIDE_C + kc[None, :], mask=inside[:, None], other=0.0)
            b = tl.load(side_weight + kc[:, None] * N + rn[None, :])
            acc = tl.dot(a, b, acc)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    place = rm[:, None] * N + rn[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + rn)[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + place, mask=inside[:, None], other=0.0).to(tl.float32)
    if RELU:
        acc = tl.maximum(acc, 0.0)
    if HAS_MASK:
        acc = tl.where(tl.load(mask + place, mask=inside[:, None], other=0.0) > 0, acc, 0.0)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _strided_input_gradient_kernel(  # type: ignore[no-untyped-def]
    g,
    weight,
    side,
    side_weight,
    residual,
    mask,
    out,
    rows,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    HAS_SIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    EVEN: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Of a 3x3 convolution of stride 2: pixels of the input, by the parity of their row and column, meet 1, 2, 2 or 4
    taps; a program works on one parity. HEIGHT and WIDTH are those of `g`. A 1x1 convolution of stride 2 beside it
    reaches the even pixels alone."""
    pid = tl.program_id(0)
    odd_row = tl.program_id(1) // 2
    odd_column = tl.program_id(1) % 2
    column_blocks: tl.constexpr = N // BN
    rm = (pid // column_blocks) * BM + tl.arange(0, BM)
    rn = (pid % column_blocks) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    inside = (rm < rows) | EVEN  # a constant where every tile is whole, and then no mask is made of it
    image = rm // (HEIGHT * WIDTH)
    row = (rm % (HEIGHT * WIDTH)) // WIDTH
    column = rm % WIDTH
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    blocks: tl.constexpr = C // BK
    taps = (1 + odd_row) * (1 + odd_column)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for k in range(taps * blocks):
        tap = k // blocks
        kc = (k % blocks) * BK + rk
        # An even row is met by the middle tap alone; an odd one by the last tap of the output row above its own
        # centre and by the first tap of the one below.
        below = (tap // (1 + odd_column)) * odd_row
        right = (tap % (1 + odd_column)) * odd_column
        tap_row = 1 + odd_row * (1 - 2 * below)
        tap_column = 1 + odd_column * (1 - 2 * right)
        there = inside & (row + below < HEIGHT) & (column + right < WIDTH)
        pixel = rm + below * WIDTH + right
        a = tl.load(g + pixel[:, None] * C + kc[None, :], mask=there[:, None], other=0.0)
        b = tl.load(weight + ((tap_row * 3 + tap_column) * C + kc)[:, None] * N + rn[None, :])
        acc = tl.dot(a, b, acc)
    if HAS_SIDE:  # noqa: SIM102 - the first is decided when the kernel is compiled
        if odd_row + odd_column == 0:
            for k in range(blocks):
                kc = k * BK + rk
                a = tl.load(side + rm[:, None] * C + kc[None, :], mask=inside[:, None], other=0.0)
                b = tl.load(side_weight + kc[:, None] * N + rn[None, :])
                acc = tl.dot(a, b, acc)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pixel = (image * HEIGHT * 2 + row * 2 + odd_row) * WIDTH * 2 + column * 2 + odd_column
    place = pixel[:, None] * N + rn[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + place, mask=inside[:, None], other=0.0).to(tl.float32)
    if HAS_MASK:
        acc = tl.where(tl.load(mask + place, mask=inside[:, None], other=0.0) > 0, acc, 0.0)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _image_conv_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    rows,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    RELU: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """The first 3x3 convolution: all taps of the few channels of an image are one step of the sum."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, N)
    rk = tl.arange(0, BK)
    tap = rk // C
    down = tap // 3 - 1
    right = tap % 3 - 1
    row = (rm % (HEIGHT * WIDTH)) // WIDTH
    column = rm % WIDTH
    h = row[:, None] + down[None, :]
    w = column[:, None] + right[None, :]
    there = (rm < rows)[:, None] & (rk < 9 * C)[None, :] & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
    pixel = rm[:, None] + (down * WIDTH + right)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
    a = tl.load(x + pixel * C + (rk % C)[None, :], mask=there, other=0.0).to(weight.dtype.element_ty)
    b = tl.load(weight + rk[:, None] * N + rn[None, :], mask=(rk < 9 * C)[:, None], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.dot(a, b) + tl.load(bias + rn)[None, :]
    if RELU:
        acc = tl.maximum(acc, 0.0)
    tl.store(out + rm[:, None] * N + rn[None, :], acc.to(out.dtype.element_ty), mask=(rm < rows)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _image_gradient_kernel(  # type: ignore[no-untyped-def]
    g,
    weight,
    out,
    rows,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """The gradient of the images through the first 3x3 convolution; `weight` has COLUMNS columns, N of them used."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, COLUMNS)
    rk = tl.arange(0, BK)
    inside = rm < rows
    row = (rm % (HEIGHT * WIDTH)) // WIDTH
    column = rm % WIDTH
    acc = tl.zeros((BM, COLUMNS), dtype=tl.float32)
    blocks: tl.constexpr = C // BK
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for k in range(9 * blocks):
        tap = k // blocks
        kc = (k % blocks) * BK + rk
        down = tap // 3 - 1
        right = tap % 3 - 1
        h = row + down
        w = column + right
        there = inside & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
        a = tl.load(g + (rm + down * WIDTH + right)[:, None] * C + kc[None, :], mask=there[:, None], other=0.0)
        b = tl.load(weight + (tap * C + kc)[:, None] * COLUMNS + rn[None, :])
        acc = tl.dot(a, b, acc)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    keep = inside[:, None] & (rn < N)[None, :]
    tl.store(out + rm[:, None] * N + rn[None, :], acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["c", "n", "taps", "columns", "reverse"])  # type: ignore[untyped-decorator]
def _fold_kernel(  # type: ignore[no-untyped-def]
    weight,
    gain,
    shift,
    mean,
    variance,
    eps,
    forward,
    backward,
    bias,
    c,
    n,
    taps,
    columns,
    reverse,
    BC: tl.constexpr,
    BN: tl.constexpr,
):
    """Convolution weights times BatchNorm's scale, as the matrices of the forward pass and of the input gradient.

    `weight` is [n, taps, c] in memory; `forward` is [taps * c, n], `backward` [taps * n, columns] with the images'
    channels padded by zeros, and its taps in reverse where asked for.
    """
    tap = tl.program_id(0)
    rc = tl.program_id(1) * BC + tl.arange(0, BC)
    rn = tl.program_id(2) * BN + tl.arange(0, BN)
    scale = tl.load(gain + rn) / tl.sqrt(tl.load(variance + rn) + eps)
    there = (rc < c)[:, None]
    w = tl.load(weight + (rn[None, :] * taps + tap) * c + rc[:, None], mask=there, other=0.0) * scale[None, :]
    tl.store(forward + (tap * c + rc)[:, None] * n + rn[None, :], w.to(forward.dtype.element_ty), mask=there)
    turned = tap + reverse * (taps - 1 - 2 * tap)
    place = (turned * n + rn)[None, :] * columns + rc[:, None]
    tl.store(backward + place, w.to(backward.dtype.element_ty), mask=(rc < columns)[:, None])
    if (tap == 0) & (tl.program_id(1) == 0):
        tl.store(bias + rn, tl.load(shift + rn) - tl.load(mean + rn) * scale)


@triton.jit  # type: ignore[untyped-decorator]
def _head_kernel(  # type: ignore[no-untyped-def]
    features,
    weight,
    bias,
    out,
    k,
    PIXELS: tl.constexpr,
    C: tl.constexpr,
    EARLY: tl.constexpr,
    BK: tl.constexpr,
):
    """The mean over the pixels of one sample, then the linear layer's next BK outputs."""
    sample = tl.program_id(0)
    rk = tl.program_id(1) * BK + tl.arange(0, BK)
    rc = tl.arange(0, C)
    total = tl.zeros((C,), dtype=tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for pixel in range(PIXELS):
        total += tl.load(features + (sample * PIXELS + pixel) * C + rc).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    w = tl.load(weight + rk[:, None] * C + rc[None, :], mask=(rk < k)[:, None], other=0.0).to(tl.float32)
    logits = tl.sum(w * (total / PIXELS)[None, :], axis=1) + tl.load(bias + rk, mask=rk < k, other=0.0)
    tl.store(out + sample * k + rk, logits, mask=rk < k)


@triton.jit  # type: ignore[untyped-decorator]
def _head_gradient_kernel(  # type: ignore[no-untyped-def]
    g,
    weight,
    features,
    out,
    k,
    PIXELS: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
    BP: tl.constexpr,
):
    """The gradient of the features of one sample, zero where they are not above 0."""
    sample = tl.program_id(0)
    rc = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros((BC,), dtype=tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for start in range(0, k, BK):
        rk = start + tl.arange(0, BK)
        w = tl.load(weight + rk[:, None] * C + rc[None, :], mask=(rk < k)[:, None], other=0.0).to(tl.float32)
        total += tl.sum(w * tl.load(g + sample * k + rk, mask=rk < k, other=0.0)[:, None], axis=0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    rp = tl.arange(0, BP)
    place = (sample * PIXELS + rp)[:, None] * C + rc[None, :]
    inside = (rp < PIXELS)[:, None]
    kept = tl.where(tl.load(features + place, mask=inside, other=0.0) > 0, (total / PIXELS)[None, :], 0.0)
    tl.store(out + place, kept.to(out.dtype.element_ty), mask=inside)


def _tiles(rows: int, n: int) -> dict[str, int]:
    """Tile sizes, measured on an H200: 128 rows where that still gives every multiprocessor some work, else 64."""
    bn = min(n, 128)
    if -(-rows // 128) * (n // bn) >= 256:
        return {"BM": 128, "BN": bn, "BK": BLOCK_K, "num_warps": 4, "num_stages": 3}
    return {"BM": 64, "BN": bn, "BK": BLOCK_K, "num_warps": 4, "num_stages": 4}


def _nhwc(like: Tensor, n: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty((like.shape[0], height, width, n), device=like.device, dtype=dtype)
    return out.permute(0, 3, 1, 2)


def conv3x3(
    x: Tensor,
    weight: Tensor,
    *,
    stride: int = 1,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    side: tuple[Tensor, Tensor] | None = None,
    relu: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """The convolution of `x` plus bias, residual and 1x1 side convolution; rectified; zero where `mask` is not above 0.

    `weight` is [9 * channels in, channels out]. With the taps reversed it is the input gradient of stride 1.
    """
    batch, c, height, width = x.shape
    height, width, n = height // stride, width // stride, weight.shape[1]
    out = _nhwc(x, n, height, width, x.dtype)
    rows = batch * height * width
    tiles = _tiles(rows, n)
    _conv_kernel[(-(-rows // tiles["BM"]) * (n // tiles["BN"]),)](
        x,
        weight,
        _or(bias, x),
        _or(residual, x),
        _or(mask, x),
        side[0] if side else x,
        side[1] if side else weight,
        out,
        rows,
        HEIGHT=height,
        WIDTH=width,
        STRIDE=stride,
        C=c,
        N=n,
        SIDE_C=side[0].shape[1] if side else 0,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        RELU=relu,
        HAS_MASK=mask is not None,
        EVEN=rows % tiles["BM"] == 0,
        **tiles,
        **_early(x),
    )
    return out


def strided_input_gradient(
    g: Tensor,
    weight: Tensor,
    *,
    side: tuple[Tensor, Tensor] | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The input gradient of a 3x3 convolution of stride 2, and of a 1x1 one beside it; `weight` has its own taps."""
    batch, c, height, width = g.shape
    n = weight.shape[1]
    out = _nhwc(g, n, 2 * height, 2 * width, g.dtype)
    rows = batch * height * width
    tiles = _tiles(4 * rows, n)
    _strided_input_gradient_kernel[(-(-rows // tiles["BM"]) * (n // tiles["BN"]), 4)](
        g,
        weight,
        side[0] if side else g,
        side[1] if side else weight,
        _or(residual, g),
        _or(mask, g),
        out,
        rows,
        HEIGHT=height,
        WIDTH=width,
        C=c,
        N=n,
        HAS_SIDE=side is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_MASK=mask is not None,
        EVEN=rows % tiles["BM"] == 0,
        **tiles,
        **_early(g),
    )
    return out


def image_conv(x: Tensor, weight: Tensor, bias: Tensor, *, relu: bool) -> Tensor:
    """The first convolution: 3x3 of images of any float type; the answer has the weights' type."""
    batch, c, height, width = x.shape
    n = weight.shape[1]
    out = _nhwc(x, n, height, width, weight.dtype)
    rows, bm = batch * height * width, 128
    bk = max(16, triton.next_power_of_2(9 * c))
    _image_conv_kernel[(-(-rows // bm),)](
        x,
        weight,
        bias,
        out,
        rows,
        HEIGHT=height,
        WIDTH=width,
        C=c,
        N=n,
        RELU=relu,
        BM=bm,
        BK=bk,
        num_warps=4,
        **_early(x),
    )
    return out


def image_gradient(g: Tensor, weight: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """The images' gradient through the first convolution, in their own type."""
    batch, c, height, width = g.shape
    out = _nhwc(g, channels, height, width, dtype)
    rows, bm = batch * height * width, 128
    _image_gradient_kernel[(-(-rows // bm),)](
        g,
        weight,
        out,
        rows,
        HEIGHT=height,
        WIDTH=width,
        C=c,
        N=channels,
        COLUMNS=weight.shape[1],
        BM=bm,
        BK=BLOCK_K,
        num_warps=4,
        num_stages=4,
        **_early(g),
    )
    return out


def fold(
    weight: Tensor,
    batchnorm: tuple[Tensor, Tensor, Tensor, Tensor, float],
    *,
    forward: Tensor,
    backward: Tensor,
    bias: Tensor,
    reverse: bool,
) -> None:
    """Fill the matrices and the bias of a convolution and of the BatchNorm (gain, shift, mean, variance, eps) on it."""
    n, c, taps = weight.shape[0], weight.shape[1], weight.shape[2] * weight.shape[3]
    gain, shift, mean, variance, eps = batchnorm
    columns = backward.shape[1]
    bc, bn = min(64, triton.next_power_of_2(columns)), 64
    _fold_kernel[(taps, -(-columns // bc), n // bn)](
        weight,
        gain,
        shift,
        mean,
        variance,
        eps,
        forward,
        backward,
        bias,
        c,
        n,
        taps,
        columns,
        int(reverse),
        BC=bc,
        BN=bn,
    )


def head(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Logits in float32: the linear layer of the features' mean over the image."""
    batch, c, height, width = features.shape
    k = len(weight)
    out = torch.empty(batch, k, device=features.device, dtype=torch.float32)
    _head_kernel[(batch, -(-k // 16))](
        features, weight, bias, out, k, PIXELS=height * width, C=c, BK=16, **_early(features)
    )
    return out


def head_gradient(g: Tensor, weight: Tensor, features: Tensor) -> Tensor:
    """The features' gradient, zero where they are not above 0."""
    batch, c, height, width = features.shape
    out = _nhwc(features, c, height, width, features.dtype)
    k, bc = len(weight), min(c, 128)
    pixels = height * width
    bp = triton.next_power_of_2(pixels)
    _head_gradient_kernel[(batch, c // bc)](
        g, weight, features, out, k, PIXELS=pixels, C=c, BC=bc, BK=16, BP=bp, **_early(g)
    )
    return out


def _early(x: Tensor) -> dict[str, bool]:
    """From Hopper on a kernel may be launched while the one before it finishes: it waits inside, before it reads."""
    early = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def _or(tensor: Tensor | None, stand_in: Tensor) -> Any:
    """A kernel takes a pointer for everything, also for what it does not read."""
    return stand_in if tensor is None else tensor
