"""Convolutions of a box in each image, where the rest of the image is known: the kernels of `windows`, and their
launchers.

A value that has boxes is one piece of memory: whole images, and behind them the boxes, both NHWC. A kernel reads a
pixel from the box where its sample's box has it, else from the whole image. All that a sum depends on is as in
`conv_kernel`, so the answers are the same bit by bit. The boxes' sizes are arguments: another size does not compile a
kernel anew.
"""

# ruff: noqa: N803 - constants at a kernel's compilation are written in capitals
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from generalist.tensors.triton_conv import _early, _tiles
from generalist.tensors.triton_kernels import narrowed
from generalist.tensors.windows import COPIED_PIXELS, GROUP, View


@triton.jit
def box_corner(corners, at, batch, image, inside):  # type: ignore[no-untyped-def]
    """Top row and left column of the boxes of a value whose corners begin at `at`."""
    top = tl.load(corners + at + image, mask=inside, other=0)
    left = tl.load(corners + at + batch + image, mask=inside, other=0)
    return top, left


@triton.jit  # type: ignore[untyped-decorator]
def pixel_of(  # type: ignore[no-untyped-def]
    corners,
    at,
    box_height,
    box_width,
    batch,
    image,
    h,
    w,
    inside,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BOXED: tl.constexpr,
):
    """Where a pixel is in a value's memory: in the box of its sample, or in the whole image."""
    pixel = (image * HEIGHT + h) * WIDTH + w
    if BOXED:
        top, left = box_corner(corners, at, batch, image, inside)
        r = h - top
        c = w - left
        boxed = (r >= 0) & (r < box_height) & (c >= 0) & (c < box_width)
        pixel = tl.where(boxed, batch * HEIGHT * WIDTH + (image * box_height + r) * box_width + c, pixel)
    return pixel


SIZES = ["rows", "batch", "out_at", "out_height", "out_width"]
INPUT_SIZES = [f"{value}_{what}" for value in ("x", "residual", "side") for what in ("at", "height", "width")]


@triton.jit(do_not_specialize=SIZES + INPUT_SIZES)  # type: ignore[untyped-decorator]
def conv_around_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    residual,
    side,
    side_weight,
    out,
    corners,
    rows,
    batch,
    out_at,
    out_height,
    out_width,
    x_at,
    x_height,
    x_width,
    residual_at,
    residual_height,
    residual_width,
    side_at,
    side_height,
    side_width,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    IN_HEIGHT: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    SIDE_C: tl.constexpr,
    SIDE_HEIGHT: tl.constexpr,
    SIDE_WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    RELU: tl.constexpr,
    BOXED_OUT: tl.constexpr,
    BOXED_X: tl.constexpr,
    BOXED_RESIDUAL: tl.constexpr,
    BOXED_SIDE: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """`conv_kernel` with a bias; all sizes are those of whole images."""
    pid = tl.program_id(0)
    column_blocks: tl.constexpr = N // BN
    rm = (pid // column_blocks) * BM + tl.arange(0, BM)
    rn = (pid % column_blocks) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    inside = rm < rows
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if BOXED_OUT:
        image = rm // (out_height * out_width)
        rest = rm - image * (out_height * out_width)
        row, column = box_corner(corners, out_at, batch, image, inside)
        row += rest // out_width
        column += rest % out_width
        place = (batch * HEIGHT * WIDTH + rm)[:, None] * N + rn[None, :]
    else:
        image = rm // (HEIGHT * WIDTH)
        row = (rm % (HEIGHT * WIDTH)) // WIDTH
        column = rm % WIDTH
        place = rm[:, None] * N + rn[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    blocks: tl.constexpr = C // BK
    origin = (image * IN_HEIGHT + row * STRIDE) * IN_WIDTH + column * STRIDE
    if BOXED_X:
        top, left = box_corner(corners, x_at, batch, image, inside)
        boxes = batch * IN_HEIGHT * IN_WIDTH
        box_origin = boxes + (image * x_height + row * STRIDE - top) * x_width + column * STRIDE - left
    for k in range(9 * blocks):
        tap = k // blocks
        kc = (k % blocks) * BK + rk
        down = tap // 3 - 1
        right = tap % 3 - 1
        h = row * STRIDE + down
        w = column * STRIDE + right
        there = inside & (h >= 0) & (h < IN_HEIGHT) & (w >= 0) & (w < IN_WIDTH)
        pixel = origin + down * IN_WIDTH + right
        if BOXED_X:
            boxed = (h >= top) & (h < top + x_height) & (w >= left) & (w < left + x_width)
            pixel = tl.where(boxed, box_origin + down * x_width + right, pixel)
        a = tl.load(x + pixel[:, None] * C + kc[None, :], mask=there[:, None], other=0.0)
        b = tl.load(weight + (tap * C + kc)[:, None] * N + rn[None, :])
        acc = tl.dot(a, b, acc)
    if SIDE_C > 0:
        pixel = pixel_of(
            corners,
            side_at,
            side_height,
            side_width,
            batch,
            image,
            row * 2,
            column * 2,
            inside,
            SIDE_HEIGHT,
            SIDE_WIDTH,
            BOXED_SIDE,
        )
        for k in range(SIDE_C // BK):
            kc = k * BK + rk
            a = tl.load(side + pixel[:, None] * SIDE_C + kc[None, :], mask=inside[:, None], other=0.0)
            b = tl.load(side_weight + kc[:, None] * N + rn[None, :])
            acc = tl.dot(a, b, acc)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    acc += tl.load(bias + rn)[None, :]
    if HAS_RESIDUAL:
        pixel = pixel_of(
            corners,
            residual_at,
            residual_height,
            residual_width,
            batch,
            image,
            row,
            column,
            inside,
            HEIGHT,
            WIDTH,
            BOXED_RESIDUAL,
        )
        acc += tl.load(residual + pixel[:, None] * N + rn[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    if RELU:
        acc = tl.maximum(acc, 0.0)
    tl.store(out + place, narrowed(acc, out), mask=inside[:, None])


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def image_conv_around_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    corners,
    rows,
    batch,
    out_at,
    out_height,
    out_width,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    RELU: tl.constexpr,
    EARLY: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """`image_conv_kernel` for boxes of its output."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, N)
    rk = tl.arange(0, BK)
    tap = rk // C
    down = tap // 3 - 1
    right = tap % 3 - 1
    inside = rm < rows
    image = rm // (out_height * out_width)
    rest = rm - image * (out_height * out_width)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row, column = box_corner(corners, out_at, batch, image, inside)
    h = (row + rest // out_width)[:, None] + down[None, :]
    w = (column + rest % out_width)[:, None] + right[None, :]
    there = inside[:, None] & (rk < 9 * C)[None, :] & (h >= 0) & (h < HEIGHT) & (w >= 0) & (w < WIDTH)
    pixel = ((image * HEIGHT)[:, None] + h) * WIDTH + w
    a = tl.load(x + pixel * C + (rk % C)[None, :], mask=there, other=0.0).to(weight.dtype.element_ty)
    b = tl.load(weight + rk[:, None] * N + rn[None, :], mask=(rk < 9 * C)[:, None], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.dot(a, b) + tl.load(bias + rn)[None, :]
    if RELU:
        acc = tl.maximum(acc, 0.0)
    target = (batch * HEIGHT * WIDTH + rm)[:, None] * N + rn[None, :]
    tl.store(out + target, narrowed(acc, out), mask=inside[:, None])


@triton.jit(do_not_specialize=["batch"])  # type: ignore[untyped-decorator]
def keep_kernel(memory, accepted, corners, parts, batch, BP: tl.constexpr, BC: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part of a sample's boxes into its whole images, where its proposal was accepted. Places count groups of BC
    channels, lest they outgrow 32 bits."""
    sample = tl.program_id(0)
    if tl.load(accepted + sample) != 0:
        part = parts + tl.program_id(1) * 9
        start = tl.load(part)
        at = tl.load(part + 1)
        height = tl.load(part + 2)
        width = tl.load(part + 3)
        box_height = tl.load(part + 4)
        box_width = tl.load(part + 5)
        groups = tl.load(part + 6)
        group = tl.load(part + 7)
        rp = tl.load(part + 8) + tl.arange(0, BP)
        rc = tl.arange(0, BC)
        inside = rp < box_height * box_width
        row = tl.load(corners + at + sample) + rp // box_width
        column = tl.load(corners + at + batch + sample) + rp % box_width
        pixel = batch * height * width + sample * box_height * box_width + rp
        source = (start + pixel * groups + group).to(tl.int64) * BC
        target = (start + ((sample * height + row) * width + column) * groups + group).to(tl.int64) * BC
        values = tl.load(memory + source[:, None] + rc[None, :], mask=inside[:, None], other=0.0)
        tl.store(memory + target[:, None] + rc[None, :], values, mask=inside[:, None])


def conv3x3_around(
    x: View,
    weight: Tensor,
    bias: Tensor,
    corners: Tensor,
    *,
    stride: int,
    residual: View | None,
    side: tuple[View, Tensor] | None,
    relu: bool,
    out: View | None,
) -> Tensor:
    """`triton_conv.conv3x3` of values of which some have boxes: into the boxes of `out`, or where there is none into
    whole images, which are returned."""
    batch, n = corners.shape[2], weight.shape[1]
    height, width = -(-x.height // stride), -(-x.width // stride)
    if out is None:
        made = torch.empty((batch, height, width, n), device=weight.device, dtype=weight.dtype).permute(0, 3, 1, 2)
        rows = batch * height * width
    else:
        made, rows = out.memory, batch * out.box_height * out.box_width
    tiles = _tiles(rows, n)
    conv_around_kernel[(-(-rows // tiles["BM"]) * (n // tiles["BN"]),)](
        x.memory,
        weight,
        bias,
        (residual or x).memory,
        side[0].memory if side else x.memory,
        side[1] if side else weight,
        made,
        corners,
        rows,
        batch,
        *_box(out, batch),
        *_box(x, batch),
        *_box(residual, batch),
        *_box(side[0] if side else None, batch),
        HEIGHT=height,
        WIDTH=width,
        IN_HEIGHT=x.height,
        IN_WIDTH=x.width,
        STRIDE=stride,
        C=x.channels,
        N=n,
        SIDE_C=side[0].channels if side else 0,
        SIDE_HEIGHT=side[0].height if side else 0,
        SIDE_WIDTH=side[0].width if side else 0,
        HAS_RESIDUAL=residual is not None,
        RELU=relu,
        BOXED_OUT=out is not None,
        BOXED_X=x.boxed,
        BOXED_RESIDUAL=residual is not None and residual.boxed,
        BOXED_SIDE=side is not None and side[0].boxed,
        **tiles,
        **_early(weight),
    )
    return made


def image_conv_around(x: Tensor, weight: Tensor, bias: Tensor, corners: Tensor, *, relu: bool, out: View) -> None:
    """`triton_conv.image_conv` into boxes."""
    batch, c, height, width = x.shape
    rows, bm = batch * out.box_height * out.box_width, 128
    image_conv_around_kernel[(-(-rows // bm),)](
        x,
        weight,
        bias,
        out.memory,
        corners,
        rows,
        batch,
        *_box(out, batch),
        HEIGHT=height,
        WIDTH=width,
        C=c,
        N=weight.shape[1],
        RELU=relu,
        BM=bm,
        BK=max(16, triton.next_power_of_2(9 * c)),
        num_warps=4,
        **_early(weight),
    )


def keep(memory: Tensor, accepted: Tensor, corners: Tensor, parts: Tensor) -> None:
    """The accepted samples' boxes, of all values, into their whole images."""
    batch = len(accepted)
    keep_kernel[(batch, len(parts))](
        memory, accepted.view(torch.uint8), corners, parts, batch, BP=COPIED_PIXELS, BC=GROUP, num_warps=4
    )


def _box(value: View | None, batch: int) -> tuple[Any, ...]:
    """Where a value's corners begin, and its boxes' size."""
    return (0, 0, 0) if value is None else (2 * batch * value.number, value.box_height, value.box_width)
