"""Spatter: drops of water (severities 1 to 3) or mud (4 and 5) on the lens.

The shading of water needs the edges of the drops (Canny's detector), the distance to them and an equalised histogram,
all on images of 8 bits. Distances are exact here; the published generator approximates them within a few percent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.data.corruptions import filters
from generalist.data.corruptions.registry import Draws, Strength, corruption

WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
CANNY_LOW, CANNY_HIGH = 50.0, 150.0
FARTHEST = 20
"""The distance in pixels to an edge beyond which it no longer matters."""
SHADING = ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))
"""Light from the upper left, visible in the distances to the edges."""


def _shifted(x: Tensor, down: int, right: int, fill: float) -> Tensor:
    """x[..., h + down, w + right], with `fill` beyond the border."""
    height, width = x.shape[-2:]
    reach = max(abs(down), abs(right))
    padded = torch.nn.functional.pad(x, (reach, reach, reach, reach), value=fill)
    top, left = reach + down, reach + right
    return padded[..., top : top + height, left : left + width]


def _correlate(x: Tensor, kernel: tuple[tuple[int, ...], ...], border: filters.Border) -> Tensor:
    """Correlation of [B,1,H,W] with a kernel of 3 x 3 integers: exact in float32 for 8-bit values."""
    height, width = x.shape[-2:]
    row = torch.arange(height, device=x.device)[None, :, None]
    column = torch.arange(width, device=x.device)[None, None, :]
    total = torch.zeros_like(x)
    for down, line in enumerate(kernel):
        for right, weight in enumerate(line):
            total = total + weight * filters.pixels_at(x, row + down - 1, column + right - 1, border)
    return total


def canny(levels: Tensor) -> Tensor:
    """Edges (bool) of 8-bit images [B,1,H,W] of 0..255, by Canny's detector with Sobel gradients in the l1 norm.

    A pixel is thin if its gradient is the largest of three across the edge, in the nearest of four directions. Thin
    pixels above the low threshold are edges if a chain of such pixels leads to one above the high threshold.
    """
    right = _correlate(levels, ((-1, 0, 1), (-2, 0, 2), (-1, 0, 1)), "nearest")
    down = _correlate(levels, ((-1, -2, -1), (0, 0, 0), (1, 2, 1)), "nearest")
    size = right.abs() + down.abs()
    flat = down.abs() < right.abs() * 0.41421356  # the tangent of 22.5 degrees
    steep = down.abs() > right.abs() * 2.41421356

    def around(y: int, z: int) -> Tensor:
        return _shifted(size, y, z, 0.0)

    along_row = (size > around(0, -1)) & (size >= around(0, 1))
    along_column = (size > around(-1, 0)) & (size >= around(1, 0))
    falling = (size > around(-1, -1)) & (size > around(1, 1))
    rising = (size > around(-1, 1)) & (size > around(1, -1))
    diagonal = torch.where(right * down < 0, rising, falling)
    thin = torch.where(flat, along_row, torch.where(steep, along_column, diagonal)) & (size > CANNY_LOW)
    edges = thin & (size > CANNY_HIGH)
    while True:
        grown = torch.nn.functional.max_pool2d(edges.float(), 3, stride=1, padding=1).bool() & thin
        if torch.equal(grown, edges):
            return edges
        edges = grown


def distance_to(edges: Tensor) -> Tensor:
    """Euclidean distance in pixels to the nearest edge, at most FARTHEST."""
    squares = torch.where(edges, 0.0, float(FARTHEST**2))
    for vertical in (True, False):
        nearest = squares
        for step in range(-FARTHEST + 1, FARTHEST):
            down, right = (step, 0) if vertical else (0, step)
            nearest = torch.minimum(nearest, _shifted(squares, down, right, float(FARTHEST**2)) + step * step)
        squares = nearest
    return squares.sqrt()


def equalized(levels: Tensor) -> Tensor:
    """8-bit images [B,1,H,W] of 0..255 whose levels are spread to hold numbers of pixels as equal as possible."""
    flat = levels.flatten(1).long()
    counts = torch.zeros(len(flat), 256, dtype=torch.long, device=levels.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    lowest = flat.amin(1, keepdim=True)
    darkest = counts.gather(1, lowest)
    rest = flat.shape[1] - darkest
    below = counts.cumsum(1) - darkest
    spread = (below.double() * 255 / rest.clamp(min=1)).round().clamp(0, 255)
    # An image with a single level has nothing to spread.
    spread = torch.where(rest > 0, spread, lowest.double())
    return spread.gather(1, flat).float().reshape(levels.shape)


def water(x: Tensor, liquid: Tensor, opacity: float) -> Tensor:
    """Images under drops of water, whose layer [B,1,H,W] is 0 where there is no drop."""
    levels = (filters.truncated(liquid) * 255).round()
    distance = filters.box_blur(distance_to(canny(levels)))
    shade = equalized((distance + filters.SLACK).floor())
    shade = _correlate(shade, SHADING, "mirror").clamp(0, 255)
    shade = levels * filters.box_blur(shade).round()
    strongest = shade.amax((1, 2, 3), keepdim=True)
    drops = opacity * shade / strongest.clamp(min=1e-6)
    return x + filters.tinted(drops, WATER, x.shape[1])


def liquid_layer(draws: Draws, shape: tuple[int, int], *, mean: float, spread: float, sigma: float) -> Tensor:
    """Blurred Gaussian noise [B,1,H,W]."""
    return filters.gaussian_blur(mean + spread * draws.normal("liquid", (1, *shape)), sigma)


@corruption(
    "spatter",
    small=[
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ],
    large=[
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ],
)
def spatter(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Strength: mean, spread and blur of the liquid, the cut below which there is none, opacity or blur, mud or not."""
    mean, spread, sigma, cut, last, muddy = strength
    liquid = liquid_layer(draws, (x.shape[2], x.shape[3]), mean=mean, spread=spread, sigma=sigma)
    liquid = torch.where(liquid < cut, torch.zeros_like(liquid), liquid)
    if not muddy:
        return water(x, liquid, last)
    mud = filters.gaussian_blur((liquid > cut).float(), last)
    mud = torch.where(mud < 0.8, torch.zeros_like(mud), mud)
    return x * (1 - mud) + filters.tinted(mud, MUD, x.shape[1])
