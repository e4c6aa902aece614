"""Blur: out of focus, through glass, by motion, by zooming, and Gaussian."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from generalist.data.corruptions import filters
from generalist.data.corruptions.registry import Draws, Strength, corruption


@functools.lru_cache(maxsize=16)
def disc_kernel(radius: float, softness: float) -> Tensor:
    """A disc [k,k] of sum 1 (before its edge is blurred by `softness`), without surrounding zeros."""
    grid, soft_radius = (8, 1) if radius <= 8 else (int(radius), 2)
    line = torch.arange(-grid, grid + 1, dtype=torch.float64)
    disc = (line[:, None].square() + line.square() <= radius**2).double()
    soften = filters.filter_matrix(filters.gaussian_weights(softness, soft_radius), len(line), "mirror")
    disc = soften @ (disc / disc.sum()) @ soften.T
    reach = int((disc.amax(0) > 1e-12).nonzero().sub(grid).abs().max())
    return disc[grid - reach : grid + reach + 1, grid - reach : grid + reach + 1]


@corruption(
    "defocus_blur",
    small=[(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)],
    large=[(3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)],
)
def defocus_blur(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Convolution with a disc, mirrored at the border. Strength: the disc's radius, the blur of its edge."""
    batch, channels, height, width = x.shape
    kernel = disc_kernel(*strength).to(x.device)
    reach = len(kernel) // 2
    rows, columns = (
        filters.border_index(torch.arange(-reach, size + reach, device=x.device), size, "mirror")
        for size in (height, width)
    )
    padded = x[:, :, rows][..., columns].double().reshape(batch * channels, 1, height + 2 * reach, width + 2 * reach)
    return F.conv2d(padded, kernel[None, None]).reshape(x.shape).float()


def _scattered(x: Tensor, offset: Tensor, reach: int) -> Tensor:
    """One pass of the glass: from the last pixel to the first, each takes the value that its neighbour has by then.

    Going pixel by pixel would take as many steps as there are pixels. A pixel's new value is its neighbour's new value
    if the neighbour was updated earlier, and its old one otherwise; following these references by doubling takes only
    the logarithm of that many steps.
    """
    _, _, height, width = x.shape
    pixels = height * width
    row = torch.arange(height, device=x.device)[:, None]
    column = torch.arange(width, device=x.device)
    moving = (row > reach) & (row <= height - reach) & (column > reach) & (column <= width - reach)
    here = (row * width + column).flatten()
    there = torch.where(moving.flatten(), here + (offset[:, 0] * width + offset[:, 1]).flatten(1), here)
    # References below `pixels` mean a new value, the others an old one.
    reference = torch.where(there > here, there, there + pixels)
    for _ in range(pixels.bit_length()):
        following = reference.gather(1, reference.clamp(max=pixels - 1))
        reference = torch.where(reference < pixels, following, reference)
    return x.flatten(2).gather(2, (reference - pixels)[:, None].expand(-1, x.shape[1], -1)).reshape(x.shape)


@corruption(
    "glass_blur",
    small=[(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)],
    large=[(0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)],
)
def glass_blur(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Gaussian blur, pixels scattered among their neighbours, Gaussian blur. Strength: sigma, reach, passes.

    The paper speaks of exchanging pixels, but the published generator overwrites one pixel and leaves the other
    unchanged, so the official files contain copies. So do these images.
    """
    sigma, reach, passes = strength[0], int(strength[1]), int(strength[2])
    x = filters.truncated(filters.gaussian_blur(x, sigma))
    for number in range(passes):
        offset = draws.integers(2 * reach, f"offset-{number}", (2, *x.shape[2:])) - reach
        x = _scattered(x, offset, reach)
    return filters.gaussian_blur(x, sigma)


@corruption(
    "motion_blur",
    small=[(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)],
    large=[(10, 3), (15, 5), (15, 8), (15, 12), (20, 15)],
)
def motion_blur(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Blur along a random direction within 45 degrees of the rows. Strength: radius, sigma."""
    radius, sigma = strength
    angle = draws.uniform("angle") * 90 - 45
    return filters.rounded(filters.motion_blur(x, angle=angle, radius=radius, sigma=sigma))


@corruption(
    "zoom_blur",
    small=[(1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)],
    large=[(1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)],
)
def zoom_blur(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """The mean of the image and its enlargements. Strength: the end and step of their factors, from 1 as in numpy."""
    stop, step = strength
    factors = np.arange(1, stop, step).tolist()
    total = x
    for factor in factors:
        total = total + filters.zoom(x, factor)
    return total / (len(factors) + 1)


@corruption(
    "gaussian_blur",
    small=[(0.4,), (0.6,), (0.7,), (0.8,), (1,)],
    large=[(1,), (2,), (3,), (4,), (6,)],
)
def gaussian_blur(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Strength: sigma."""
    return filters.gaussian_blur(x, strength[0])
