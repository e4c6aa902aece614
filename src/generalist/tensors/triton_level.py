"""Where a weighted sum of capped amounts reaches its goal: the core of FAB's projections, as one Triton kernel."""

# ruff: noqa: N803 - constants at a kernel's compilation are written in capitals
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

TINY = tl.constexpr(torch.finfo(torch.float64).tiny)


@triton.jit  # type: ignore[untyped-decorator]
def level_kernel(weights, caps, gap, out, rows, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each program handles one row. The sum is concave in t, so from t = 0 each of Newton's steps increases t without
    overshooting, and once no further cap has been passed, it is the solution: a handful of steps."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    weight = tl.load(weights + (row % rows) * columns + i, mask=i < columns, other=0.0)
    cap = tl.load(caps + row * columns + i, mask=i < columns, other=0.0)
    wanted = tl.load(gap + row)
    largest = tl.max(cap, 0).to(tl.float64)
    full = (weight * cap).to(tl.float64)
    wide = weight.to(tl.float64)
    t = largest * 0.0
    free = tl.sum(wide, 0)
    after = tl.minimum(wanted / tl.maximum(free, TINY), largest)
    while after > t:
        t = after
        passed = cap.to(tl.float64) <= t
        before = tl.sum(tl.where(passed, full, 0.0), 0)
        free = tl.sum(tl.where(passed, 0.0, wide), 0)
        after = tl.minimum((wanted - before) / tl.maximum(free, TINY), largest)
    tl.store(out + row, t)


def level(weights: Tensor, caps: Tensor, gap: Tensor) -> Tensor:
    """The t [..., B, 1], float64, with sum_i weights_i min(caps_i, t) = gap, or the largest cap if no t is enough.

    `weights` [B, d] and `caps` [..., B, d] are float32 and not negative, `gap` [..., B, 1] is float64."""
    rows, columns = weights.shape
    caps = caps.contiguous()
    out = torch.empty(*caps.shape[:-1], 1, device=caps.device, dtype=torch.float64)
    block = triton.next_power_of_2(columns)
    level_kernel[(math.prod(caps.shape[:-1]),)](
        weights.contiguous(),
        caps,
        gap.contiguous(),
        out,
        rows,
        columns,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
