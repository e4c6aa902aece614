"""Clocks: how long an iteration takes, and how fast the device multiplies matrices at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

BLOCKS = 5
_CUDA_SIZES = (4096, 8192, 16384)
_CPU_SIZES = (256, 512, 1024)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Timing:
    """Milliseconds per iteration, one figure for each block of iterations."""

    blocks: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.blocks)

    @property
    def spread(self) -> float:
        """From the fastest to the slowest block, as a share of the median."""
        return (max(self.blocks) - min(self.blocks)) / self.median


def block_sizes(iterations: int, blocks: int = BLOCKS) -> list[int]:
    """Divide `iterations` into at most `blocks` nearly equal parts, none of them empty."""
    blocks = min(blocks, iterations)
    each, more = divmod(iterations, blocks)
    return [each + (i < more) for i in range(blocks)]


def time_blocks(step: Callable[[], None], *, device: torch.device, iterations: int, warm_up: int) -> Timing:
    """Run `step` `warm_up` times, then `iterations` times under the clock, waiting for the device after each block.

    Waiting after each iteration would hide how far the host runs ahead, which fast loops depend on.
    """
    for _ in range(warm_up):
        step()
    found = []
    for size in block_sizes(iterations):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(size):
            step()
        synchronize(device)
        found.append(1000 * (time.perf_counter() - started) / size)
    return Timing(tuple(found))


@dataclass(frozen=True)
class Ceiling:
    """What the device reaches in square matrix products: the limit that training is compared with."""

    precision: str
    by_size: dict[int, float]
    """TFLOP/s by the side of the matrices."""

    @property
    def tflops(self) -> float:
        return max(self.by_size.values())


def matmul_ceiling(precision: str, device: torch.device, sizes: Sequence[int] = ()) -> Ceiling:
    """The best of a few sizes, in the arithmetic that the run's convolutions use."""
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    rounded = precision == "fp32" and device.type == "cuda" and torch.backends.cudnn.allow_tf32
    with _tf32_products(rounded):
        sizes = sizes or (_CUDA_SIZES if device.type == "cuda" else _CPU_SIZES)
        by_size = {size: _matmul_tflops(size, dtype, device) for size in sizes}
    return Ceiling("tf32" if rounded else precision, by_size)


@contextmanager
def _tf32_products(wanted: bool) -> Iterator[None]:
    """PyTorch lets fp32 convolutions round to TF32 but not matrix products; a fair limit must round in the same way."""
    if not wanted:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _matmul_tflops(size: int, dtype: torch.dtype, device: torch.device) -> float:
    # Not zeros: some devices draw less power on them and run at a higher clock.
    ramp = torch.arange(size * size, device=device, dtype=torch.float32).reshape(size, size).sin()
    first, second = ramp.to(dtype), ramp.t().contiguous().to(dtype)
    out = torch.empty_like(first)

    def multiply() -> None:
        torch.mm(first, second, out=out)

    timing = time_blocks(multiply, device=device, iterations=4 * BLOCKS, warm_up=3)
    return 2 * size**3 / (min(timing.blocks) / 1000) / 1e12
