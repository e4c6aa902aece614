"""Randomness as a pure function of (seed, purpose, keys, coordinate). There is no generator state.

Every value is a 64-bit hash of its address: the SplitMix64 finaliser over a Weyl sequence whose start is a hash of
the seed, the purpose and the keys (a sample's index, an epoch or step). Integer tensor operations only, so every
device, batch size, batch order and process count gives the same bits; a sample's draw depends on the sample alone.

Keys are ints or integer tensors of one common (broadcastable) shape S; a draw of `shape` has shape S + shape.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from generalist.core.compiling import for_the_compiler

Key = int | Tensor

_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit integer."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: the Weyl increment of SplitMix64
_GOLDEN_INVERSE = _signed(pow(0x9E3779B97F4A7C15, -1, 1 << 64))  # their product is 1, modulo 2**64
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


@for_the_compiler(torch.compiler.assume_constant_result)
def _root(seed: int, purpose: str) -> int:
    """The hash of the seed and the purpose, computed once on the host; a constant for the compiler."""
    return _hashed(seed, purpose)


@functools.lru_cache(maxsize=4096)
def _hashed(seed: int, purpose: str) -> int:
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return _signed(int.from_bytes(digest[:8], "little"))


def host_seed(seed: int, purpose: str, key: int) -> int:
    """A 63-bit seed for torch's own generators, from which dropout and the like draw."""
    return _hashed(seed, f"{purpose}/{key}") & ((1 << 63) - 1)


def bits(
    seed: int, purpose: str, *keys: Key, shape: Sequence[int] = (), device: torch.device | str | None = None
) -> Tensor:
    """64 random bits (int64) for each key and each coordinate of `shape`."""
    if device is None:
        device = next((key.device for key in keys if isinstance(key, Tensor)), torch.device("cpu"))
    state = torch.full((), _root(seed, purpose), dtype=torch.int64, device=device)
    for key in keys:
        # Mixed after each key, so that (1, 2) and (2, 1), or (12,) and (1, 2), are unrelated.
        state = _mix(state * _MIX_1 + (key.to(torch.int64) if isinstance(key, Tensor) else key) + _GOLDEN)
    count = 1
    for size in shape:
        count *= size
    # This is state + position * golden, with the product last: the compiler gives a product of positions alone too
    # narrow a type.
    position = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    lead = state.shape
    return _mix((state.reshape(-1, 1) * _GOLDEN_INVERSE + position) * _GOLDEN).reshape((*lead, *shape))


def uniform(
    seed: int, purpose: str, *keys: Key, shape: Sequence[int] = (), device: torch.device | str | None = None
) -> Tensor:
    """Uniform float32 on the 2**24 multiples of 2**-24 in [0, 1): exact on every device."""
    return _shift(bits(seed, purpose, *keys, shape=shape, device=device), 40).to(torch.float32) * 2.0**-24


def integers(
    high: int,
    seed: int,
    purpose: str,
    *keys: Key,
    shape: Sequence[int] = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniform int64 in [0, high), high <= 2**31; the bias of the multiply-shift is below high / 2**32."""
    if not 0 < high <= 1 << 31:
        raise ValueError(f"high must be in 1..2**31, not {high}")
    return _shift(_shift(bits(seed, purpose, *keys, shape=shape, device=device), 32) * high, 32)


@for_the_compiler(torch.compiler.disable)
def _normal_table(device: torch.device) -> Tensor:
    """The table, hidden from the compiler, which would otherwise trace the code that makes it."""
    return _computed_normal_table(device)


@functools.lru_cache(maxsize=8)
def _computed_normal_table(device: torch.device) -> Tensor:
    """The 2**16 quantile midpoints of N(0, 1), scaled to variance 1.

    A table look-up is exact everywhere; log, sin and cos differ between devices in the last bit.
    """
    levels = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    values: Tensor = torch.special.ndtri(levels)
    return (values / values.square().mean().sqrt()).to(torch.float32).to(device)


def normal(
    seed: int, purpose: str, *keys: Key, shape: Sequence[int] = (), device: torch.device | str | None = None
) -> Tensor:
    """Standard normal float32, on a grid of 2**16 quantiles (tails end at 4.3 standard deviations)."""
    index = _shift(bits(seed, purpose, *keys, shape=shape, device=device), 48)
    table: Tensor = _normal_table(index.device)
    return table[index]


def permutation(count: int, seed: int, purpose: str, *keys: Key, device: torch.device | str | None = None) -> Tensor:
    """A random order of 0..count-1: the order in which their hashes sort."""
    return torch.argsort(bits(seed, purpose, *keys, shape=(count,), device=device), stable=True)
