"""The Triton kernels for a folded network's convolutions; `triton_conv` says what each computes and launches them."""

# ruff: noqa: N803 - constants at a kernel's compilation are written in capitals
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrowed(acc, out):  # type: ignore[no-untyped-def]
    """The sums in the type of `out`. Float16 ends at 65504: anything beyond is stored as that instead of infinity,
    which would make the next sum nan."""
    kind: tl.constexpr = out.dtype.element_ty
    if kind == tl.float16:
        acc = tl.minimum(tl.maximum(acc, -65504.0), 65504.0)
    return acc.to(kind)


@triton.jit  # type: ignore[untyped-decorator]
def conv_kernel(  # type: ignore[no-untyped-def]
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
    IN_HEIGHT: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    SIDE_C: tl.constexpr,
    SIDE_HEIGHT: tl.constexpr,
    SIDE_WIDTH: tl.constexpr,
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
    """3x3 with padding 1; HEIGHT and WIDTH are those of the output, IN_ those of `x`. The side input is a 1x1
    convolution of stride 2 of a value with its own size."""
    pid = tl.program_id(0)
    column_blocks: tl.constexpr = N // BN
    rm = (pid // column_blocks) * BM + tl.arange(0, BM)
    rn = (pid % column_blocks) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    inside = (rm < rows) | EVEN  # constant if all tiles are whole, and then there is no mask
    image = rm // (HEIGHT * WIDTH)
    row = (rm % (HEIGHT * WIDTH)) // WIDTH
    column = rm % WIDTH
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    blocks: tl.constexpr = C // BK
    origin = (image * IN_HEIGHT + row * STRIDE) * IN_WIDTH + column * STRIDE
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for k in range(9 * blocks):
        tap = k // blocks
        kc = (k % blocks) * BK + rk
        down = tap // 3 - 1
        right = tap % 3 - 1
        h = row * STRIDE + down
        w = column * STRIDE + right
        there = inside & (h >= 0) & (h < IN_HEIGHT) & (w >= 0) & (w < IN_WIDTH)
        pixel = origin + down * IN_WIDTH + right
        a = tl.load(x + pixel[:, None] * C + kc[None, :], mask=there[:, None], other=0.0)
        b = tl.load(weight + (tap * C + kc)[:, None] * N + rn[None, :])
        acc = tl.dot(a, b, acc)
    if SIDE_C > 0:
        pixel = (image * SIDE_HEIGHT + row * 2) * SIDE_WIDTH + column * 2
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
    tl.store(out + place, narrowed(acc, out), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def strided_input_gradient_kernel(  # type: ignore[no-untyped-def]
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
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
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
    """For a 3x3 convolution of stride 2: depending on the parity of its row and column, a pixel of the input meets 1,
    2, 2 or 4 taps; a program works on one parity. HEIGHT and WIDTH are those of `g`, OUT_ those of the input; an odd
    size means one more even row than odd ones. A 1x1 convolution of stride 2 beside it reaches only the even pixels."""
    pid = tl.program_id(0)
    odd_row = tl.program_id(1) // 2
    odd_column = tl.program_id(1) % 2
    column_blocks: tl.constexpr = N // BN
    rm = (pid // column_blocks) * BM + tl.arange(0, BM)
    rn = (pid % column_blocks) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    inside = (rm < rows) | EVEN  # constant if all tiles are whole, and then there is no mask
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
        # An even row meets only the middle tap; an odd one meets the last tap of the output row centred above it and
        # the first tap of the one below.
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
    h = row * 2 + odd_row
    w = column * 2 + odd_column
    if OUT_HEIGHT % 2 + OUT_WIDTH % 2 > 0:
        inside = inside & (h < OUT_HEIGHT) & (w < OUT_WIDTH)
    pixel = (image * OUT_HEIGHT + h) * OUT_WIDTH + w
    place = pixel[:, None] * N + rn[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + place, mask=inside[:, None], other=0.0).to(tl.float32)
    if HAS_MASK:
        acc = tl.where(tl.load(mask + place, mask=inside[:, None], other=0.0) > 0, acc, 0.0)
    tl.store(out + place, narrowed(acc, out), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def image_conv_kernel(  # type: ignore[no-untyped-def]
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
    """The first 3x3 convolution: all taps of an image's few channels are one step of the sum."""
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
    tl.store(out + rm[:, None] * N + rn[None, :], narrowed(acc, out), mask=(rm < rows)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def image_gradient_kernel(  # type: ignore[no-untyped-def]
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
    tl.store(out + rm[:, None] * N + rn[None, :], narrowed(acc, out), mask=keep)


SIZES = ["c", "n", "taps", "columns", "reverse", "weight_n", "weight_c", "weight_tap"]


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def fold_kernel(  # type: ignore[no-untyped-def]
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
    weight_n,
    weight_c,
    weight_tap,
    BC: tl.constexpr,
    BN: tl.constexpr,
):
    """Convolution weights times BatchNorm's scale, as the matrices of the forward pass and of the input gradient.

    `weight` is [n, c, taps] with strides of its own; `forward` is [taps * c, n], `backward` [taps * n, columns] with
    the images' channels padded with zeros, and its taps reversed if requested.
    """
    tap = tl.program_id(0)
    rc = tl.program_id(1) * BC + tl.arange(0, BC)
    rn = tl.program_id(2) * BN + tl.arange(0, BN)
    scale = tl.load(gain + rn) / tl.sqrt(tl.load(variance + rn) + eps)
    there = (rc < c)[:, None]
    source = weight + rn[None, :] * weight_n + rc[:, None] * weight_c + tap * weight_tap
    w = tl.load(source, mask=there, other=0.0) * scale[None, :]
    tl.store(forward + (tap * c + rc)[:, None] * n + rn[None, :], narrowed(w, forward), mask=there)
    turned = tap + reverse * (taps - 1 - 2 * tap)
    place = (turned * n + rn)[None, :] * columns + rc[:, None]
    tl.store(backward + place, narrowed(w, backward), mask=(rc < columns)[:, None])
    if (tap == 0) & (tl.program_id(1) == 0):
        tl.store(bias + rn, tl.load(shift + rn) - tl.load(mean + rn) * scale)


@triton.jit  # type: ignore[untyped-decorator]
def head_kernel(  # type: ignore[no-untyped-def]
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
def head_gradient_kernel(  # type: ignore[no-untyped-def]
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
    tl.store(out + place, narrowed(kept, out), mask=inside)
