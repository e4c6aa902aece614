"""Sequences of small perturbations after CIFAR-10-P (Hendrycks & Dietterich, 2019), generated here.

A sequence shows one image in 16 to 31 frames, each a small step from the last (or, for noise, a fresh draw around the
first frame, which is clean). A stable classifier predicts the same class throughout. Strengths are those for 32 x 32
images, whatever the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from generalist.core.registry import Registry
from generalist.data.corruptions import filters, noise, weather
from generalist.data.corruptions.apply import check_images
from generalist.data.corruptions.filters import rounded, truncated
from generalist.data.corruptions.registry import Draws
from generalist.data.corruptions.spatter import liquid_layer, water

Frames = Callable[[Tensor, Draws], list[Tensor]]
Matrix = np.ndarray[Any, np.dtype[np.float64]]

SEQUENCES: Registry[Frames] = Registry("sequence")
FRAMES = 31


@torch.no_grad()
def perturb_sequence(images: Tensor, *, name: str, index: Tensor, seed: int) -> Tensor:
    """Frames [B,F,C,H,W] of the perturbation `name` for images [B,C,H,W] in [0,1]: float32 on 8-bit levels.

    Generated, not the official files. What is drawn for a sample depends only on (seed, sample, sequence).
    """
    make = SEQUENCES.get(name)
    check_images(images, index)
    draws = Draws(seed=seed, purpose=f"sequence/{name}", index=index.to(images.device))
    return truncated(torch.stack(make(rounded(images.float()), draws), 1))


def is_noise(name: str) -> bool:
    """Whether frames are compared with the first one, as frames of noise have no order."""
    return "noise" in name


@SEQUENCES.register("gaussian_noise")
def gaussian_noise(x: Tensor, draws: Draws) -> list[Tensor]:
    return [x, *(x + 0.02 * draws.normal(str(i), x.shape[1:]) for i in range(1, FRAMES))]


@SEQUENCES.register("shot_noise")
def shot_noise(x: Tensor, draws: Draws) -> list[Tensor]:
    return [x, *(noise.poisson(x, 700, draws.uniform(str(i), x.shape[1:])) for i in range(1, FRAMES))]


@SEQUENCES.register("speckle_noise")
def speckle_noise(x: Tensor, draws: Draws) -> list[Tensor]:
    return [x, *(x + 0.05 * x * draws.normal(str(i), x.shape[1:]) for i in range(1, FRAMES))]


@SEQUENCES.register("motion_blur")
def motion_blur(x: Tensor, draws: Draws) -> list[Tensor]:
    """The direction of the blur turns by 9 degrees per frame."""
    angles = [torch.full((len(x),), (i - 20) * 9.0, device=x.device) for i in range(21)]
    return [rounded(filters.motion_blur(x, angle=angle, radius=6, sigma=1.8)) for angle in angles]


@SEQUENCES.register("zoom_blur")
def zoom_blur(x: Tensor, draws: Draws) -> list[Tensor]:
    """The mean of more and more enlargements, by 0.4% per frame."""
    frames, total = [x], x
    for i in range(1, FRAMES):
        total = total + warp(x, _scaling(1 + 0.004 * i))
        frames.append(total / (i + 1))
    return frames


@SEQUENCES.register("gaussian_blur")
def gaussian_blur(x: Tensor, draws: Draws) -> list[Tensor]:
    return [filters.gaussian_blur(x, 0.3 + 0.015 * i, truncate=7.0) for i in range(FRAMES)]


@SEQUENCES.register("snow")
def snow(x: Tensor, draws: Draws) -> list[Tensor]:
    """The same flakes fall in a direction that turns by 4 degrees per frame."""
    flakes = weather.snow_layer(draws, (x.shape[2], x.shape[3]), mean=0.05, spread=0.3, scale=2, cut=0.5)
    angles = [torch.full((len(x),), i * 4.0 - 150, device=x.device) for i in range(FRAMES)]
    return [weather.snowfall(x, flakes, angle=angle, radius=10, sigma=2, keep=0.85) for angle in angles]


@SEQUENCES.register("spatter")
def spatter(x: Tensor, draws: Draws) -> list[Tensor]:
    """Drops of water that run down: in each frame a layer is 0.8 of the line above and 0.2 of itself."""
    liquid = liquid_layer(draws, (x.shape[2], x.shape[3]), mean=0.6, spread=0.265, sigma=1.75)
    liquid = torch.where(liquid < 0.7, torch.zeros_like(liquid), liquid)
    frames = []
    for _ in range(FRAMES):
        frames.append(water(x, liquid, 0.6))
        above = torch.nn.functional.pad(liquid, (0, 0, 1, 0))[:, :, :-1]
        liquid = 0.2 * liquid + 0.8 * above
    return frames


@SEQUENCES.register("brightness")
def brightness(x: Tensor, draws: Draws) -> list[Tensor]:
    return [weather.brighter(x, (i - 15) * 0.015) for i in range(FRAMES)]


@SEQUENCES.register("translate")
def translate(x: Tensor, draws: Draws) -> list[Tensor]:
    """From 7 pixels to the left to 8 to the right, one per frame, with black behind."""
    return [warp(x, _matrix(1, 0, 7 - i, 0, 1, 0)) for i in range(16)]


@SEQUENCES.register("rotate")
def rotate(x: Tensor, draws: Draws) -> list[Tensor]:
    """From -15 to 15 degrees, one per frame."""
    turns = [math.radians(i - 15) for i in range(FRAMES)]
    return [warp(x, _matrix(math.cos(t), math.sin(t), 0, -math.sin(t), math.cos(t), 0)) for t in turns]


@SEQUENCES.register("scale")
def scale(x: Tensor, draws: Draws) -> list[Tensor]:
    """From 70% to 130%, two percent per frame."""
    return [warp(x, _scaling((i * 2 + 70) / 100)) for i in range(FRAMES)]


@SEQUENCES.register("shear")
def shear(x: Tensor, draws: Draws) -> list[Tensor]:
    """Sheared along the rows by -15 to 15 degrees, one per frame."""
    return [warp(x, _matrix(1, math.tan(math.radians(i - 15)), 0, 0, 1, 0)) for i in range(FRAMES)]


@SEQUENCES.register("tilt")
def tilt(x: Tensor, draws: Draws) -> list[Tensor]:
    """Turned in space around both axes of the image by -11.25 to 11.25 degrees, 0.75 per frame, seen in perspective."""
    turns = [math.radians(0.75 * (i - 15)) for i in range(FRAMES)]
    return [warp(x, _untilted(turn, math.hypot(x.shape[2], x.shape[3]))) for turn in turns]


def _untilted(turn: float, focal: float) -> Matrix:
    """From the picture of the turned plane back to the plane, for a camera at a distance of `focal` pixels."""
    cosine, sine = math.cos(turn), math.sin(turn)
    about_x = np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]])
    about_y = np.array([[cosine, 0, -sine], [0, 1, 0], [sine, 0, cosine]])
    # As published, the plane is one pixel above the origin about which it turns.
    placed = about_x @ about_y + np.diag([0, 0, focal])
    seen = np.diag([focal, focal, 1.0]) @ placed
    return np.linalg.inv(seen).astype(np.float64)


def _matrix(xx: float, xy: float, shift_x: float, yx: float, yy: float, shift_y: float) -> Matrix:
    return np.array([[xx, xy, shift_x], [yx, yy, shift_y], [0, 0, 1]], dtype=np.float64)


def _scaling(factor: float) -> Matrix:
    return _matrix(1 / factor, 0, 0, 0, 1 / factor, 0)


def warp(x: Tensor, matrix: Matrix) -> Tensor:
    """Images whose pixel at p, counted (right, down) from the middle, is the old one at matrix p; black outside."""
    height, width = x.shape[-2:]
    row = torch.arange(height, dtype=torch.float64, device=x.device)[:, None] - (height - 1) / 2
    column = torch.arange(width, dtype=torch.float64, device=x.device) - (width - 1) / 2
    (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
    depth: Tensor = g * column + h * row + i
    right = ((a * column + b * row + c) / depth + (width - 1) / 2)[None]
    down = ((d * column + e * row + f) / depth + (height - 1) / 2)[None]
    # A pixel is a square around its centre, so the image extends half a pixel beyond the outermost centres.
    inside = (right > -0.5) & (right < width - 0.5) & (down > -0.5) & (down < height - 0.5)
    warped: Tensor = filters.sample(x, down, right, border="nearest") * inside[:, None]
    return warped
