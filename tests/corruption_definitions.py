"""The common corruptions written out once more for one image, pixel by pixel, in numpy, scipy and pillow.

Each function takes an image [H,W,3] in [0,1], the strength and the sample's draws, and answers an image before it is
stored with 8 bits. Nothing of that is shared with the library but the draws. At the end, images to compare on.
"""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy import ndimage, stats
from torch import Tensor, nn

from generalist.core import random
from generalist.data.corruptions import corrupt
from generalist.data.corruptions.registry import Draws

Array = np.ndarray[Any, Any]
DEFINITIONS: dict[str, Callable[[Array, Any, Draws], Array]] = {}


def definition(function: Callable[[Array, Any, Draws], Array]) -> Callable[[Array, Any, Draws], Array]:
    DEFINITIONS[function.__name__] = function
    return function


def drawn(tensor: Any) -> Array:
    """The draws of the one sample, channels last where they are an image."""
    array: Array = tensor[0].double().numpy()
    return np.moveaxis(array, 0, -1) if array.ndim == 3 else array


def channels_first(x: Array) -> tuple[int, int, int]:
    return x.shape[2], x.shape[0], x.shape[1]


def down(x: Array) -> Array:
    """8 bits by truncation, as whole numbers."""
    levels: Array = np.floor(np.clip(x, 0, 1) * 255 + 1e-3)
    return levels


def blurred(x: Array, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Array:
    sigmas = (sigma, sigma) + (0,) * (x.ndim - 2)
    result: Array = ndimage.gaussian_filter(x, sigmas, mode=mode, truncate=truncate)
    return result


@definition
def gaussian_noise(x: Array, c: Any, draws: Draws) -> Array:
    return x + c[0] * drawn(draws.normal("noise", channels_first(x)))


@definition
def speckle_noise(x: Array, c: Any, draws: Draws) -> Array:
    return x * (1 + c[0] * drawn(draws.normal("noise", channels_first(x))))


@definition
def shot_noise(x: Array, c: Any, draws: Draws) -> Array:
    counts: Array = stats.poisson.ppf(drawn(draws.uniform("photons", channels_first(x))), x * c[0])
    return np.maximum(counts, 0) / c[0]


@definition
def impulse_noise(x: Array, c: Any, draws: Draws) -> Array:
    chance = drawn(draws.uniform("impulse", channels_first(x)))
    return np.select([chance < c[0] / 2, chance < c[0]], [0.0, 1.0], x)


@definition
def gaussian_blur(x: Array, c: Any, draws: Draws) -> Array:
    return blurred(x, c[0])


@definition
def defocus_blur(x: Array, c: Any, draws: Draws) -> Array:
    radius, softness = c
    grid, reach = (8, 1) if radius <= 8 else (radius, 2)
    kernel = np.array(
        [[float(a * a + b * b <= radius**2) for a in range(-grid, grid + 1)] for b in range(-grid, grid + 1)]
    )
    kernel /= kernel.sum()
    weights = np.array([math.exp(-(i**2) / (2 * softness**2)) for i in range(-reach, reach + 1)])
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, weights / weights.sum(), axis=axis, mode="mirror")
    result: Array = ndimage.correlate(x, kernel[:, :, None], mode="mirror")
    return result


@definition
def glass_blur(x: Array, c: Any, draws: Draws) -> Array:
    sigma, reach, passes = c
    height, width = x.shape[:2]
    x = down(blurred(x, sigma)) / 255
    for number in range(passes):
        offset = draws.integers(2 * reach, f"offset-{number}", (2, height, width))[0].numpy() - reach
        for h in range(height - reach, reach, -1):
            for w in range(width - reach, reach, -1):
                x[h, w] = x[h + offset[0, h, w], w + offset[1, h, w]]
    return blurred(x, sigma)


def moved(x: Array, angle: float, radius: float, sigma: float) -> Array:
    """ImageMagick's motion blur, to whole levels."""
    height, width = x.shape[:2]
    taps = 2 * math.ceil(radius) + 1
    kernel = np.array([math.exp(-(i**2) / (2 * sigma**2)) for i in range(taps)])
    kernel /= kernel.sum()
    result = np.zeros_like(x)
    for i in range(taps):
        right = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        below = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        rows = [min(max(h + below, 0), height - 1) for h in range(height)]
        columns = [min(max(w + right, 0), width - 1) for w in range(width)]
        result += kernel[i] * x[rows][:, columns]
    return np.round(result * 255) / 255


@definition
def motion_blur(x: Array, c: Any, draws: Draws) -> Array:
    return moved(x, float(draws.uniform("angle")[0]) * 90 - 45, *c)


def zoomed(x: Array, factor: float) -> Array:
    for axis in (0, 1):
        size = x.shape[axis]
        crop = math.ceil(size / factor)
        top = (size - crop) // 2
        x = np.take(x, range(top, top + crop), axis)
        x = ndimage.zoom(x, [factor if i == axis else 1 for i in range(x.ndim)], order=1)
        trim = (x.shape[axis] - size) // 2
        x = np.take(x, range(trim, trim + size), axis)
    return x


@definition
def zoom_blur(x: Array, c: Any, draws: Draws) -> Array:
    factors = np.arange(1, c[0], c[1])
    result: Array = (x + sum(zoomed(x, factor) for factor in factors)) / (len(factors) + 1)
    return result


@definition
def snow(x: Array, c: Any, draws: Draws) -> Array:
    layer = c[0] + c[1] * drawn(draws.normal("flakes", (1, *x.shape[:2])))
    layer = zoomed(layer, c[2])
    layer[layer < c[3]] = 0
    layer = moved(down(layer) / 255, float(draws.uniform("angle")[0]) * 90 - 135, c[4], c[5])
    grey = (x @ [0.299, 0.587, 0.114])[..., None]
    whitened: Array = c[6] * x + (1 - c[6]) * np.maximum(x, 1.5 * grey + 0.5)
    return whitened + layer + np.rot90(layer, 2)


def fractal(draws: Draws, side: int, decay: float) -> Array:
    field, step, wibble = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half, count = step // 2, side // step

        def noise(name: str, step: int = step, count: int = count, wibble: float = wibble) -> Array:
            wave: Array = draws.uniform(f"fog/{name}-{step}", (count, count))[0].double().numpy()
            return wibble * wibble * (2 * wave - 1)

        square, right, below = noise("square"), noise("right"), noise("below")
        for i in range(count):
            for j in range(count):
                h, w = i * step, j * step
                corners = [field[(h + a) % side, (w + b) % side] for a in (0, step) for b in (0, step)]
                field[h + half, w + half] = sum(corners) / 4 + square[i, j]
        for i in range(count):
            for j in range(count):
                for h, w, drawn_noise in ((i * step, j * step + half, right), (i * step + half, j * step, below)):
                    around = [(h - half, w), (h + half, w), (h, w - half), (h, w + half)]
                    field[h, w] = sum(field[a % side, b % side] for a, b in around) / 4 + drawn_noise[i, j]
        step, wibble = half, wibble / decay
    result: Array = (field - field.min()) / (field.max() - field.min())
    return result


@definition
def fog(x: Array, c: Any, draws: Draws) -> Array:
    side = 2 ** math.ceil(math.log2(max(x.shape[:2])))
    layer = fractal(draws, side, c[1])[: x.shape[0], : x.shape[1], None]
    result: Array = (x + c[0] * layer) * x.max() / (x.max() + c[0])
    return result


def in_hsv(x: Array, change: Callable[[float, float, float], tuple[float, float, float]]) -> Array:
    rows = [[colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*pixel))) for pixel in row] for row in x.tolist()]
    return np.array(rows)


@definition
def brightness(x: Array, c: Any, draws: Draws) -> Array:
    return in_hsv(x, lambda h, s, v: (h, s, min(v + c[0], 1.0)))


@definition
def saturate(x: Array, c: Any, draws: Draws) -> Array:
    return in_hsv(x, lambda h, s, v: (h, min(s * c[0] + c[1], 1.0), v))


@definition
def contrast(x: Array, c: Any, draws: Draws) -> Array:
    mean: Array = x.mean(axis=(0, 1))
    return (x - mean) * c[0] + mean


@definition
def elastic_transform(x: Array, c: Any, draws: Draws) -> Array:
    height, width = x.shape[:2]
    side = min(height, width)
    amplitude, smoothness, reach = np.array(c) * side / (32 if side <= 64 else 224)
    middle, third = np.array([width // 2, height // 2]), side // 3
    before = middle + third * np.array([[1.0, 1], [1, -1], [-1, -1]])
    after = before + reach * (2 * draws.uniform("corners", (3, 2))[0].double().numpy() - 1)
    matrix = np.linalg.solve(np.column_stack([before, np.ones(3)]), after).T
    rows, columns = np.mgrid[:height, :width].astype(float)
    flat = np.linalg.solve(matrix[:, :2], np.stack([columns.ravel(), rows.ravel()]) - matrix[:, 2:])
    x = np.stack([ndimage.map_coordinates(x[..., k], flat[::-1], order=1, mode="mirror") for k in range(3)], -1)
    x = x.reshape(height, width, 3)
    waves = 2 * draws.uniform("displacement", (2, height, width))[0].double().numpy() - 1
    shift = [amplitude * (blurred(wave, smoothness, "reflect", 3.0) if smoothness else wave) for wave in waves]
    at = [rows + shift[0], columns + shift[1]]
    return np.stack([ndimage.map_coordinates(x[..., k], at, order=1, mode="reflect") for k in range(3)], -1)


def picture(x: Array) -> Image.Image:
    return Image.fromarray(np.round(x * 255).astype(np.uint8))


@definition
def pixelate(x: Array, c: Any, draws: Draws) -> Array:
    height, width = x.shape[:2]
    small = picture(x).resize((int(width * c[0]), int(height * c[0])), Image.Resampling.BOX)
    return np.asarray(small.resize((width, height), Image.Resampling.BOX)) / 255


@definition
def jpeg_compression(x: Array, c: Any, draws: Draws) -> Array:
    stream = io.BytesIO()
    picture(x).save(stream, "JPEG", quality=c[0])
    return np.asarray(Image.open(stream)) / 255


def canny(levels: Array) -> Array:
    """Canny's edges at thresholds 50 and 150, with l1 gradients."""
    height, width = levels.shape
    right, below = (ndimage.sobel(levels, axis, mode="nearest") for axis in (1, 0))
    size = np.pad(np.abs(right) + np.abs(below), 1)
    thin = np.zeros(levels.shape, bool)
    for h in range(height):
        for w in range(width):
            a, b, here = abs(right[h, w]), abs(below[h, w]), size[h + 1, w + 1]
            if b < a * math.tan(math.pi / 8):
                peak = here > size[h + 1, w] and here >= size[h + 1, w + 2]
            elif b > a * math.tan(3 * math.pi / 8):
                peak = here > size[h, w + 1] and here >= size[h + 2, w + 1]
            else:
                s = -1 if right[h, w] * below[h, w] < 0 else 1
                peak = here > size[h, w + 1 - s] and here > size[h + 2, w + 1 + s]
            thin[h, w] = peak and here > 50
    chains, _ = ndimage.label(thin, np.ones((3, 3)))
    strong = np.unique(chains[thin & (size[1:-1, 1:-1] > 150)])
    return np.isin(chains, strong) & thin


def equalized(levels: Array) -> Array:
    """The cumulative histogram without the darkest level, stretched to 0..255."""
    counts = np.bincount(levels.astype(int).ravel(), minlength=256)
    darkest = int(levels.min())
    if counts[darkest] == levels.size:
        return levels
    table: Array = np.round((np.cumsum(counts) - counts[darkest]) * 255 / (levels.size - counts[darkest]))
    return table[levels.astype(int)]


def wet(x: Array, liquid: Array, opacity: float) -> Array:
    """An image under drops of water."""
    levels = down(liquid)
    edges = canny(levels)
    distance = ndimage.distance_transform_edt(~edges) if edges.any() else np.full(levels.shape, 99.0)
    distance = ndimage.uniform_filter(np.minimum(distance, 20), 3, mode="mirror")
    light = ndimage.correlate(equalized(np.floor(distance + 1e-3)), [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], mode="mirror")
    drops = levels * np.round(ndimage.uniform_filter(np.clip(light, 0, 255), 3, mode="mirror"))
    drops = opacity * drops / max(drops.max(), 1e-6)
    return x + drops[..., None] * np.array([175, 238, 238]) / 255


@definition
def spatter(x: Array, c: Any, draws: Draws) -> Array:
    liquid = blurred(c[0] + c[1] * drawn(draws.normal("liquid", (1, *x.shape[:2])))[..., 0], c[2])
    liquid[liquid < c[3]] = 0
    if not c[5]:
        return wet(x, liquid, c[4])
    mud = blurred((liquid > c[3]).astype(float), c[4])[..., None]
    mud[mud < 0.8] = 0
    result: Array = x * (1 - mud) + mud * np.array([63, 42, 20]) / 255
    return result


def running_drops(x: Array, draws: Draws, frame: int) -> Array:
    """A frame of CIFAR-10-P's spatter."""
    liquid = blurred(0.6 + 0.265 * drawn(draws.normal("liquid", (1, *x.shape[:2])))[..., 0], 1.75)
    liquid[liquid < 0.7] = 0
    for _ in range(frame):
        liquid = np.apply_along_axis(lambda column: np.convolve(column, [0.2, 0.8], mode="same"), 0, liquid)
    return wet(x, liquid, 0.6)


def turned_in_space(x: Array, frame: int) -> Array:
    """A frame of CIFAR-10-P's tilt: each pixel's ray from the camera, followed back to the turned plane."""
    height, width = x.shape[:2]
    turn, focal = math.radians(0.75 * (frame - 15)), math.hypot(height, width)
    cosine, sine = math.cos(turn), math.sin(turn)
    rotation = np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])
    rotation = rotation @ np.array([[cosine, 0, -sine], [0, 1, 0], [sine, 0, cosine]])
    result = np.zeros_like(x)
    for h in range(height):
        for w in range(width):
            ray = np.array([(w - (width - 1) / 2) / focal, (h - (height - 1) / 2) / focal, 1.0])
            # a + right u + down v on the plane equals depth times the ray: three unknowns, three equations.
            start = rotation[:, 2] + [0, 0, focal]
            right, below, _ = np.linalg.solve(np.column_stack([rotation[:, 0], rotation[:, 1], -ray]), -start)
            row, column = below + (height - 1) / 2, right + (width - 1) / 2
            if -0.5 < row < height - 0.5 and -0.5 < column < width - 0.5:
                at = [[row], [column]]
                result[h, w] = [ndimage.map_coordinates(x[..., k], at, order=1, mode="nearest")[0] for k in range(3)]
    return result


def pictures(count: int, height: int = 32, width: int = 32, channels: int = 3) -> Tensor:
    """Smooth 8-bit images with a little texture."""
    coarse = random.uniform(0, "coarse", torch.arange(count), shape=(channels, 5, 5))
    smooth = nn.functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=True)
    fine = random.uniform(0, "fine", torch.arange(count), shape=(channels, height, width))
    return ((0.85 * smooth + 0.15 * fine).clamp(0, 1) * 255).round() / 255


def corrupted(x: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    return corrupt(x, name=name, severity=severity, index=torch.arange(len(x)), seed=seed)
