"""Convolutions of a folded network as Triton kernels, with everything around them in the epilogue.

cuDNN's convolutions leave bias, residual, ReLU and its mask to separate passes over memory. On an H200, at the sizes of
a ResNet-18 and batch 128, these kernels are as fast as cuDNN's bare convolutions and do the rest along the way
(docs/performance.md). Images and activations are NHWC in memory, weights are matrices [taps * channels in, channels
out]; products are summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from generalist.tensors.triton_kernels import (
    conv_kernel,
    fold_kernel,
    head_gradient_kernel,
    head_kernel,
    image_conv_kernel,
    image_gradient_kernel,
    strided_input_gradient_kernel,
)

BLOCK_K = 64
"""Channels of one tap in a step of the sum. Every channel count must be a multiple of it for a kernel here, except
for the images' own channels."""

IMAGE_CHANNELS = 16
"""Columns of the matrix product for the images' gradient: tensor cores take no fewer."""


def _tiles(rows: int, n: int) -> dict[str, int]:
    """Tile sizes, measured on an H200: 128 rows if that still gives every multiprocessor some work, else 64."""
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

    `weight` is [9 * channels in, channels out]. With reversed taps, this is the input gradient of stride 1.
    """
    batch, c, in_height, in_width = x.shape
    height, width, n = -(-in_height // stride), -(-in_width // stride), weight.shape[1]
    side_height, side_width = side[0].shape[2:] if side else (0, 0)
    out = _nhwc(x, n, height, width, x.dtype)
    rows = batch * height * width
    tiles = _tiles(rows, n)
    conv_kernel[(-(-rows // tiles["BM"]) * (n // tiles["BN"]),)](
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
        IN_HEIGHT=in_height,
        IN_WIDTH=in_width,
        STRIDE=stride,
        C=c,
        N=n,
        SIDE_C=side[0].shape[1] if side else 0,
        SIDE_HEIGHT=side_height,
        SIDE_WIDTH=side_width,
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
    size: tuple[int, int],
    side: tuple[Tensor, Tensor] | None = None,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The input gradient of a 3x3 convolution of stride 2, and of a 1x1 one beside it; `weight` has the forward order
    of taps, and the input has the given height and width."""
    batch, c, height, width = g.shape
    n = weight.shape[1]
    out = _nhwc(g, n, *size, g.dtype)
    rows = batch * height * width
    tiles = _tiles(4 * rows, n)
    strided_input_gradient_kernel[(-(-rows // tiles["BM"]) * (n // tiles["BN"]), 4)](
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
        OUT_HEIGHT=size[0],
        OUT_WIDTH=size[1],
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
    """The first convolution: 3x3 on images of any float type; the answer has the weights' type."""
    batch, c, height, width = x.shape
    n = weight.shape[1]
    out = _nhwc(x, n, height, width, weight.dtype)
    rows, bm = batch * height * width, 128
    bk = max(16, triton.next_power_of_2(9 * c))
    image_conv_kernel[(-(-rows // bm),)](
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
    image_gradient_kernel[(-(-rows // bm),)](
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
    """Fill the matrices and the bias of a convolution and the BatchNorm (gain, shift, mean, variance, eps) after it.

    `weight` is [out, in, height, width], in NCHW or NHWC order in memory.
    """
    n, c, taps = weight.shape[0], weight.shape[1], weight.shape[2] * weight.shape[3]
    gain, shift, mean, variance, eps = batchnorm
    columns = backward.shape[1]
    bc, bn = min(64, triton.next_power_of_2(columns)), 64
    fold_kernel[(taps, -(-columns // bc), n // bn)](
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
        weight.stride(0),
        weight.stride(1),
        weight.stride(3),
        BC=bc,
        BN=bn,
    )


def head(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Logits in float32: the linear layer applied to the features' mean over the image."""
    batch, c, height, width = features.shape
    k = len(weight)
    out = torch.empty(batch, k, device=features.device, dtype=torch.float32)
    head_kernel[(batch, -(-k // 16))](
        features, weight, bias, out, k, PIXELS=height * width, C=c, BK=16, **_early(features)
    )
    return out


def head_gradient(g: Tensor, weight: Tensor, features: Tensor) -> Tensor:
    """The gradient of the features, zero where they are not above 0."""
    batch, c, height, width = features.shape
    out = _nhwc(features, c, height, width, features.dtype)
    k, bc = len(weight), min(c, 128)
    pixels = height * width
    bp = triton.next_power_of_2(pixels)
    head_gradient_kernel[(batch, c // bc)](
        g, weight, features, out, k, PIXELS=pixels, C=c, BC=bc, BK=16, BP=bp, **_early(g)
    )
    return out


def _early(x: Tensor) -> dict[str, bool]:
    """From Hopper on, a kernel may be launched while the previous one finishes: it waits inside, before it reads."""
    early = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def _or(tensor: Tensor | None, stand_in: Tensor) -> Any:
    """A kernel needs a pointer for every argument, even for those that it does not read."""
    return stand_in if tensor is None else tensor
