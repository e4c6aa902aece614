"""Digital: contrast, elastic deformation, pixelation, JPEG and saturation."""

from __future__ import annotations

import functools
import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from generalist.core.errors import DataError
from generalist.data.corruptions import filters
from generalist.data.corruptions.registry import SMALL_SIDE, Draws, Strength, corruption


@corruption(
    "contrast",
    small=[(0.75,), (0.5,), (0.4,), (0.3,), (0.15,)],
    large=[(0.4,), (0.3,), (0.2,), (0.1,), (0.05,)],
)
def contrast(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """(x - mean) c + mean, with the mean of each channel. Strength: c."""
    mean = x.double().mean((2, 3), keepdim=True)
    return ((x - mean) * strength[0] + mean).float()


def _affine(x: Tensor, moved: Tensor) -> Tensor:
    """The affine map that moves three corners of a central square by `moved` [B,3,2] pixels (right, down)."""
    height, width = x.shape[-2:]
    right, down, side = width // 2, height // 2, min(height, width) // 3
    corners = [(right + side, down + side), (right + side, down - side), (right - side, down - side)]
    start = torch.tensor(corners, dtype=torch.float64, device=x.device)
    end = start + moved.double()
    # The corners differ along one axis at a time, so the columns of the matrix are differences of their images.
    along_x, along_y = (end[:, 1] - end[:, 2]) / (2 * side), (end[:, 0] - end[:, 1]) / (2 * side)
    shift = end[:, 1] - along_x * start[1, 0] - along_y * start[1, 1]
    determinant = along_x[:, 0] * along_y[:, 1] - along_x[:, 1] * along_y[:, 0]
    inverse = torch.where(determinant == 0, 0.0, 1 / determinant)[:, None, None]
    row = torch.arange(height, device=x.device)[:, None] - shift[:, 1, None, None]
    column = torch.arange(width, device=x.device) - shift[:, 0, None, None]
    xx, xy, yx, yy = torch.cat([along_x, along_y], 1)[..., None, None].unbind(1)
    return filters.sample(x, (row * xx - column * xy) * inverse, (column * yy - row * yx) * inverse, border="mirror")


@corruption(
    "elastic_transform",
    small=[(0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)],
    large=[(488, 170.8, 24.4), (488, 19.52, 48.8), (12.2, 2.44, 4.88), (17.08, 2.44, 4.88), (29.28, 2.44, 4.88)],
)
def elastic_transform(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """A random affine map, then a smooth random displacement. Strength: amplitude, smoothness, the map's reach.

    Strengths are in pixels of images with 32 or 224 pixels, and grow with the image's shorter side.
    """
    height, width = x.shape[-2:]
    side = min(height, width)
    scale = side / (32 if side <= SMALL_SIDE else 224)
    amplitude, smoothness, reach = (scale * value for value in strength)
    x = _affine(x, (2 * draws.uniform("corners", (3, 2)) - 1) * reach)
    if amplitude == 0:
        return x
    field = 2 * draws.uniform("displacement", (2, height, width)) - 1
    field = amplitude * filters.gaussian_blur(field, smoothness, truncate=3.0, border="reflect")
    row = torch.arange(height, device=x.device)[:, None] + field[:, 0]
    column = torch.arange(width, device=x.device) + field[:, 1]
    return filters.sample(x, row, column, border="reflect")


_TIE = 1e-9
"""By float64's rounding, sums of a few levels times 1/n may fall just short of a half."""


@functools.lru_cache(maxsize=64)
def _box_matrix(size: int, target: int) -> Tensor:
    """The matrix [target, size] of pillow's box filter: the mean of the pixels whose centres a new pixel covers."""
    scale = size / target
    reach = max(scale, 1.0)
    centre = (torch.arange(target, dtype=torch.float64)[:, None] + 0.5) * scale
    pixel = torch.arange(size, dtype=torch.float64)[None, :]
    first = (centre - reach / 2 + 0.5).floor().clamp(min=0)
    last = (centre + reach / 2 + 0.5).floor().clamp(max=size)
    offset = (pixel - centre + 0.5) * (1 / reach)
    covered = ((offset > -0.5) & (offset <= 0.5) & (pixel >= first) & (pixel < last)).double()
    return covered / covered.sum(1, keepdim=True)


def _resize(levels: Tensor, height: int, width: int) -> Tensor:
    """Box filter of integer levels 0..255 in float64, rounded after each axis, halves upwards, as in pillow."""
    across = levels @ _box_matrix(levels.shape[3], width).to(levels.device).T
    down = _box_matrix(levels.shape[2], height).to(levels.device) @ (across + 0.5 + _TIE).floor()
    return (down + 0.5 + _TIE).floor()


@corruption(
    "pixelate",
    small=[(0.95,), (0.9,), (0.85,), (0.75,), (0.65,)],
    large=[(0.6,), (0.5,), (0.4,), (0.3,), (0.25,)],
)
def pixelate(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """The image scaled down and up again. Strength: the share of the side in between."""
    height, width = x.shape[-2:]
    small = _resize((x * 255).round().double(), int(height * strength[0]), int(width * strength[0]))
    return _resize(small, height, width).float() / torch.full((), 255.0, device=x.device)


def _through_jpeg(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], quality: int) -> Tensor:
    """One image [H,W,C] of bytes, encoded and decoded: [C,H,W] of bytes."""
    stream = io.BytesIO()
    grey = pixels.shape[2] == 1
    Image.fromarray(pixels[:, :, 0] if grey else pixels).save(stream, "JPEG", quality=quality)
    with Image.open(stream) as image:
        decoded = torch.from_numpy(np.array(image, dtype=np.uint8))
    return decoded[None] if grey else decoded.permute(2, 0, 1)


@corruption(
    "jpeg_compression",
    small=[(80,), (65,), (58,), (50,), (40,)],
    large=[(25,), (18,), (15,), (10,), (7,)],
)
def jpeg_compression(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """Strength: pillow's quality. Images are encoded on the host, one after the other."""
    pixels = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    decoded = torch.stack([_through_jpeg(image, int(strength[0])) for image in pixels])
    return decoded.to(x.device).float() / torch.full((), 255.0, device=x.device)


@corruption(
    "saturate",
    small=[(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)],
    large=[(0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)],
    colour=True,
)
def saturate(x: Tensor, strength: Strength, draws: Draws) -> Tensor:
    """The saturation of HSV times a plus b, clipped to [0,1]. Strength: a, b. The first two severities desaturate.

    For fixed hue and value, what a channel lacks of the value is proportional to the saturation. Grey counts as red.
    """
    if x.shape[1] != 3:
        raise DataError("saturate needs images of three channels: leave it out for grey ones")
    factor, more = strength
    value = x.amax(1, keepdim=True)
    lack = value - x
    saturation = lack.amax(1, keepdim=True) / value.clamp(min=1e-6)
    wanted = (saturation * factor + more).clamp(0, 1)
    red = torch.tensor([0.0, 1.0, 1.0], device=x.device).reshape(1, 3, 1, 1) * value
    unit = torch.where(saturation > 0, lack / saturation.clamp(min=1e-6), red)
    return value - unit * wanted
