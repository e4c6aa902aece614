"""Noise: Gaussian, shot (Poisson), impulse (salt and pepper) and speckle (multiplicative)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from generalist.data.corruptions.registry import Draws, Strength, corruption


@corruption(
    "gaussian_noise",
    small=[(0.04,), (0.06,), (0.08,), (0.09,), (0.10,)],
    large=[(0.08,), (0.12,), (0.18,), (0.26,), (0.38,)],
)
def gaussian_noise(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """x + sigma n. Strength: sigma."""
    (sigma,) = strength
    return x + sigma * draws.normal("noise", x.shape[1:])


@functools.lru_cache(maxsize=16)
def _poisson_table(photons: int) -> Tensor:
    """P(N <= n) for n below `photons` at each of the 256 levels, plus the level itself: one increasing sequence.

    More photons than that are white anyway.
    """
    level = torch.arange(256, dtype=torch.float64)[:, None]
    count = torch.arange(photons, dtype=torch.float64)[None, :]
    below: Tensor = torch.special.gammaincc(count + 1, level / 255 * photons)
    return (level + below).flatten()


def poisson(x: Tensor, photons: int, uniform: Tensor) -> Tensor:
    """Counts of photons with mean x * photons, capped at `photons`, as a share of it; by inversion of `uniform`."""
    level = (x * 255).round().double()
    table = _poisson_table(photons).to(x.device)
    found = torch.searchsorted(table, level + uniform.double(), right=True)
    return (found - level.long() * photons).float() / photons


@corruption(
    "shot_noise",
    small=[(500,), (250,), (100,), (75,), (50,)],
    large=[(60,), (25,), (12,), (5,), (3,)],
)
def shot_noise(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Poisson(c x) / c. Strength: c, the photons of a white pixel."""
    (photons,) = strength
    return poisson(x, int(photons), draws.uniform("photons", x.shape[1:]))


@corruption(
    "impulse_noise",
    small=[(0.01,), (0.02,), (0.03,), (0.05,), (0.07,)],
    large=[(0.03,), (0.06,), (0.09,), (0.17,), (0.27,)],
)
def impulse_noise(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Values of single channels become 0 or 1 with equal probability. Strength: the share of these values."""
    (share,) = strength
    drawn = draws.uniform("impulse", x.shape[1:])
    x = torch.where(drawn < share, torch.ones_like(x), x)
    return torch.where(drawn < share / 2, torch.zeros_like(x), x)


@corruption(
    "speckle_noise",
    small=[(0.06,), (0.1,), (0.12,), (0.16,), (0.2,)],
    large=[(0.15,), (0.2,), (0.35,), (0.45,), (0.6,)],
)
def speckle_noise(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """x + x sigma n. Strength: sigma."""
    (sigma,) = strength
    return x + x * sigma * draws.normal("noise", x.shape[1:])
