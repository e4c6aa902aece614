"""Filters that the corruptions share: Gaussian and motion blur, zoom, sampling between pixels, 8-bit rounding.

Every linear and separable filter is one matrix for the rows and one for the columns, with the border folded in, so that
any radius works with any image size. Matrices are multiplied in float64: the rounding, which may depend on the size of
the batch, is then far below a step of 8 bits.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import torch
from torch import Tensor

Border = Literal["nearest", "reflect", "mirror"]
"""Beyond the edge of a b c: nearest gives c c c, reflect gives c b a, mirror gives b a b."""

SLACK = 1e-3
"""The share of an 8-bit step that truncation tolerates: float32 may store 17/255 as slightly less than that."""


def truncated(x: Tensor) -> Tensor:
    """In [0,1] with 8 bits, rounded down, as the official files were stored."""
    return (x.clamp(0, 1) * 255 + SLACK).floor().clamp(max=255) / torch.full((), 255.0, device=x.device)


def rounded(x: Tensor) -> Tensor:
    """In [0,1] with 8 bits, rounded to the nearest level."""
    return (x.clamp(0, 1) * 255).round() / torch.full((), 255.0, device=x.device)


def luminance(x: Tensor) -> Tensor:
    """The grey [B,1,H,W] of RGB images by the weights of BT.601; grey images are unchanged."""
    if x.shape[1] == 1:
        return x
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device).reshape(3, 1, 1)
    return (x * weights).sum(1, keepdim=True)


def tinted(layer: Tensor, color: tuple[float, float, float], channels: int) -> Tensor:
    """A layer [B,1,H,W] in that colour, or in the colour's grey if images have one channel."""
    shade = torch.tensor(color, device=layer.device).reshape(1, 3, 1, 1)
    return layer * (shade if channels == 3 else luminance(shade))


def border_index(position: Tensor, size: int, border: Border) -> Tensor:
    """The pixel in 0..size-1 that stands for any integer position."""
    if border == "nearest":
        return position.clamp(0, size - 1)
    overlap = 1 if border == "reflect" else 0
    period = max(1, 2 * size - 2 + 2 * overlap)
    position = position % period
    return torch.where(position < size, position, period - overlap - position)


def filter_matrix(weights: Tensor, size: int, border: Border) -> Tensor:
    """The matrix [size, size] of a correlation with an odd number of weights, the border folded in."""
    radius = len(weights) // 2
    row = torch.arange(size)[:, None].expand(size, len(weights))
    column = border_index(row + torch.arange(-radius, radius + 1), size, border)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.index_put_((row, column), weights.double().expand(size, -1), accumulate=True)


def gaussian_weights(sigma: float, radius: int) -> Tensor:
    """2 radius + 1 float64 weights with sum 1."""
    position = torch.arange(-radius, radius + 1, dtype=torch.float64)
    weights = (-0.5 * (position / sigma).square()).exp()
    return weights / weights.sum()


@functools.lru_cache(maxsize=64)
def _gaussian_matrix(size: int, sigma: float, truncate: float, border: Border) -> Tensor:
    return filter_matrix(gaussian_weights(sigma, int(truncate * sigma + 0.5)), size, border)


def separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows x columnsᵀ for each channel of each image, in float64 inside and float32 outside."""
    return (rows.to(x.device) @ x.double() @ columns.to(x.device).T).float()


def gaussian_blur(x: Tensor, sigma: float, *, truncate: float = 4.0, border: Border = "nearest") -> Tensor:
    """Gaussian blur with a kernel cut off at `truncate` sigmas; sigma 0 leaves the images unchanged."""
    if sigma == 0:
        return x
    height, width = x.shape[-2:]
    rows, columns = (_gaussian_matrix(size, sigma, truncate, border) for size in (height, width))
    return separable(x, rows, columns)


def box_blur(x: Tensor) -> Tensor:
    """The mean of 3 x 3 pixels, mirrored at the border."""
    height, width = x.shape[-2:]
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    return separable(x, filter_matrix(third, height, "mirror"), filter_matrix(third, width, "mirror"))


@functools.lru_cache(maxsize=256)
def zoom_matrix(size: int, factor: float) -> Tensor:
    """The matrix [size, size] that enlarges the middle of an axis by linear interpolation, corner pixels aligned."""
    crop = math.ceil(size / factor)
    enlarged = round(crop * factor)
    skipped = (enlarged - size) // 2
    position = (torch.arange(size, dtype=torch.float64) + skipped) * (crop - 1) / max(1, enlarged - 1)
    nearness = (1 - (position[:, None] - torch.arange(crop, dtype=torch.float64)).abs()).clamp(min=0)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    top = (size - crop) // 2
    matrix[:, top : top + crop] = nearness
    return matrix


def zoom(x: Tensor, factor: float) -> Tensor:
    """The middle of each image, enlarged by `factor` to the image's size."""
    height, width = x.shape[-2:]
    return separable(x, zoom_matrix(height, factor), zoom_matrix(width, factor))


def pixels_at(x: Tensor, row: Tensor, column: Tensor, border: Border) -> Tensor:
    """The pixels [B,C,H',W'] at integer positions; row and column broadcast to [B,H',W'] or [1,H',W']."""
    batch, channels, height, width = x.shape
    flat = border_index(row, height, border) * width + border_index(column, width, border)
    place = flat.flatten(1)[:, None].expand(batch, channels, -1)
    return x.flatten(2).gather(2, place).reshape(batch, channels, *flat.shape[1:])


def sample(x: Tensor, row: Tensor, column: Tensor, *, border: Border) -> Tensor:
    """Bilinear interpolation [B,C,H',W'] at real positions [B,H',W'] or [1,H',W']."""
    far = 1e6  # beyond any image, and safe to round to an integer
    row, column = row.clamp(-far, far), column.clamp(-far, far)
    top, left = row.floor(), column.floor()
    total = torch.zeros((), device=x.device)
    for y, vertical in ((top, 1 - (row - top)), (top + 1, row - top)):
        for z, horizontal in ((left, 1 - (column - left)), (left + 1, column - left)):
            total = total + pixels_at(x, y.long(), z.long(), border) * (vertical * horizontal)[:, None]
    return total.to(x.dtype)


def motion_blur(x: Tensor, *, angle: Tensor, radius: float, sigma: float) -> Tensor:
    """Blur along a direction per sample: a half Gaussian over 2 radius + 1 pixels, those nearest to the ray.

    `angle` [B] is in degrees, clockwise from the right as rows grow downwards. The pixel itself has the largest weight.
    """
    height, width = x.shape[-2:]
    taps = 2 * math.ceil(radius) + 1
    half = gaussian_weights(sigma, taps - 1)[taps - 1 :]
    weights = (half / half.sum()).tolist()
    turn = torch.deg2rad(angle.double())[:, None, None]
    row = torch.arange(height, device=x.device)[None, :, None]
    column = torch.arange(width, device=x.device)[None, None, :]
    total = torch.zeros_like(x)
    for tap, weight in enumerate(weights):
        down = (tap * turn.sin() - 0.5).ceil().long()
        right = (tap * turn.cos() - 0.5).ceil().long()
        total = total + weight * pixels_at(x, row + down, column + right, "nearest")
    return total
