"""Weather: snow, frost, fog and brightness.

The official frost overlays photographs of ice, which are not part of this library. Ours is a texture drawn from random
numbers: ridges of a fractal, and needles at sixty degrees. It is frost-like, not the official frost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.data.corruptions import filters
from generalist.data.corruptions.registry import Draws, Strength, corruption

ICE = (0.85, 0.95, 1.0)
"""The frost's colour: a pale blue."""


def snow_layer(draws: Draws, shape: tuple[int, int], *, mean: float, spread: float, scale: float, cut: float) -> Tensor:
    """Flakes [B,1,H,W] with 8 bits: enlarged Gaussian noise, without values darker than `cut`."""
    noise = mean + spread * draws.normal("flakes", (1, *shape))
    layer = filters.zoom(noise, scale)
    return filters.truncated(torch.where(layer < cut, torch.zeros_like(layer), layer))


def snowfall(x: Tensor, flakes: Tensor, *, angle: Tensor, radius: float, sigma: float, keep: float) -> Tensor:
    """The image whitened with weight 1 - `keep`, under falling flakes and the same flakes turned by 180 degrees."""
    layer = filters.rounded(filters.motion_blur(flakes, angle=angle, radius=radius, sigma=sigma))
    x = keep * x + (1 - keep) * torch.maximum(x, filters.luminance(x) * 1.5 + 0.5)
    return x + layer + layer.flip(2, 3)


@corruption(
    "snow",
    small=[
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ],
    large=[
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ],
)
def snow(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Strength: mean, spread, enlargement and cut of the flakes; radius and sigma of their motion; share kept."""
    mean, spread, scale, cut, radius, sigma, keep = strength
    flakes = snow_layer(draws, (x.shape[2], x.shape[3]), mean=mean, spread=spread, scale=scale, cut=cut)
    angle = draws.uniform("angle") * 90 - 135
    return snowfall(x, flakes, angle=angle, radius=radius, sigma=sigma, keep=keep)


def plasma(draws: Draws, what: str, side: int, *, decay: float) -> Tensor:
    """A fractal landscape [B,side,side] from 0 to 1 by the diamond-square algorithm on a torus; side is a power of two.

    Each point is a quarter of the sum of its four neighbours plus noise, whose amplitude is the square of a number
    that starts at 100 and shrinks by `decay` as the step halves.
    """
    field = torch.zeros(len(draws.index), side, side, dtype=torch.float64, device=draws.index.device)
    step, wibble = side, 100.0

    def noisy(total: Tensor, name: str) -> Tensor:
        drawn = draws.uniform(f"{what}/{name}-{step}", total.shape[1:]).double()
        return total / 4 + wibble**2 * (2 * drawn - 1)

    while step >= 2:
        half = step // 2
        corner = field[:, ::step, ::step]
        pairs = corner + corner.roll(-1, 1)
        middle = noisy(pairs + pairs.roll(-1, 2), "square")
        field[:, half::step, half::step] = middle
        right = corner + corner.roll(-1, 2) + middle + middle.roll(1, 1)
        below = corner + corner.roll(-1, 1) + middle + middle.roll(1, 2)
        field[:, ::step, half::step] = noisy(right, "right")
        field[:, half::step, ::step] = noisy(below, "below")
        step, wibble = half, wibble / decay
    low, high = field.amin((1, 2), keepdim=True), field.amax((1, 2), keepdim=True)
    return (field - low) / (high - low)


def _plasma_for(x: Tensor, draws: Draws, what: str, *, decay: float) -> Tensor:
    """The corner of a fractal that covers the images: [B,1,H,W]."""
    height, width = x.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    return plasma(draws, what, side, decay=decay)[:, None, :height, :width].float()


def frost_texture(x: Tensor, draws: Draws) -> Tensor:
    """A texture like ice on a window, [B,C,H,W] in [0,1]: drawn, not photographed."""
    height, width = x.shape[-2:]
    veins = 1 - (2 * _plasma_for(x, draws, "veins", decay=1.7) - 1).abs()
    glaze = _plasma_for(x, draws, "glaze", decay=2.5)
    length = max(3, min(height, width) // 12)
    seeds = (draws.uniform("seeds", (1, height, width)) < 0.12 / length).float()
    turn = draws.uniform("turn") * 60
    needles = torch.zeros_like(seeds)
    for direction in range(0, 360, 60):
        # Ice grows along the axes of its hexagons.
        ray = filters.motion_blur(seeds, angle=turn + direction, radius=length, sigma=length)
        needles = torch.maximum(needles, ray * length)
    texture = (0.3 * glaze + 0.5 * veins**3 + 0.5 * needles).clamp(0, 1)
    return filters.truncated(filters.tinted(texture, ICE, x.shape[1]))


@corruption(
    "frost",
    small=[(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)],
    large=[(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)],
)
def frost(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """a x + b frost. Strength: a, b. The frost is a drawn texture instead of the official photographs."""
    image, ice = strength
    return image * x + ice * frost_texture(x, draws)


@corruption(
    "fog",
    small=[(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)],
    large=[(1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)],
)
def fog(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """x plus a fractal, scaled back to the image's own maximum. Strength: thickness, the fractal's decay."""
    thickness, decay = strength
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + thickness * _plasma_for(x, draws, "fog", decay=decay)) * brightest / (brightest + thickness)


def brighter(x: Tensor, amount: float) -> Tensor:
    """The value of HSV plus `amount`, clipped to [0,1]; hue and saturation are unchanged.

    For fixed hue and saturation, the channels are proportional to the value. Black has neither and becomes grey.
    """
    value = x.amax(1, keepdim=True)
    brightened = (value + amount).clamp(0, 1)
    return torch.where(value > 0, x * (brightened / value.clamp(min=1e-6)), brightened.expand_as(x))


@corruption(
    "brightness",
    small=[(0.05,), (0.1,), (0.15,), (0.2,), (0.3,)],
    large=[(0.1,), (0.2,), (0.3,), (0.4,), (0.5,)],
)
def brightness(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Strength: the amount added to the value of HSV."""
    return brighter(x, strength[0])
