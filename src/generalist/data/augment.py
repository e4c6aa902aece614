"""Augmentation on the device: random crops, flips, colours and blank areas as pure functions of (seed, sample, epoch).

A sample's draw depends on nothing but its address, so every batch size, batch order and device gives the same image.
There is no host synchronisation and no shape that depends on data: the functions can be recorded in a CUDA graph,
where `epoch` is a 0-d int64 tensor that is refilled between replays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from generalist.core.errors import DataError
from generalist.core.options import Fraction, Number, Options
from generalist.core.random import Key, integers

COLORS = ("brightness", "contrast", "saturation")
UNIT = 1024
"""The integer that stands for a factor of 1."""


class AugmentOptions(Options):
    """Random changes of training images. Streamed folders use flip, scale and ratio, resident sets all but the last
    two."""

    crop: int = Field(default=4, ge=0)
    """Pixels of zero padding on each side before a random crop back to the image's size; 0 turns it off."""

    flip: bool = True
    """Mirror left and right with probability 1/2. Turn it off where left and right matter, as in digits."""

    cutout: int = Field(default=0, ge=0)
    """Side in pixels of a square of zeros at a random centre, cut off at the border; 0 turns it off. Not for streamed
    folders."""

    shift: int = Field(default=0, ge=0)
    """Largest number of rows and columns together that are cut off at random sides; the rest is placed at random on
    black (after CropShift: Li and Spratling, 2023). Replaces `crop`, which must then be 0."""

    erase: Fraction = 0.0
    """Probability of a rectangle of zeros within the image, with random sides from an eighth to five eighths of the
    image's (after Zhong et al., 2020)."""

    color: Fraction = 0.0
    """Brightness, contrast and saturation change by factors between 1 - color and 1 + color, drawn independently."""

    scale: list[Number] = Field(default=[0.08, 1.0], min_length=2, max_length=2)
    """Smallest and largest share of the image's area that a random resized crop keeps (streamed folders only)."""

    ratio: list[Number] = Field(default=[0.75, 4 / 3], min_length=2, max_length=2)
    """Smallest and largest width-to-height ratio of a random resized crop (streamed folders only)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"scale must be [low, high] with 0 < low <= high <= 1, not {self.scale}")
        low, high = self.ratio
        if not 0 < low <= high:
            raise ValueError(f"ratio must be [low, high] with 0 < low <= high, not {self.ratio}")
        if self.shift and self.crop:
            raise ValueError(f"shift takes the place of crop: set crop to 0, not {self.crop}")
        return self

    def needs_memory(self) -> str | None:
        """The first field in use that only images in memory have."""
        return next((name for name in ("cutout", "shift", "erase", "color") if getattr(self, name)), None)

    def check_fits(self, height: int, width: int, *, field: str = "data.augmentation") -> None:
        """Refuse a crop or cutout that could remove a whole image of this size; `field` is where it was asked for."""
        side = min(height, width)
        if self.crop >= side:
            raise DataError(
                f"a crop with {self.crop} pixels of padding can lose a whole {height}x{width} image: "
                f"set {field}.crop below {side}"
            )
        for name in ("cutout", "shift"):
            if getattr(self, name) >= side:
                raise DataError(
                    f"a {name} of {getattr(self, name)} pixels can cover a whole {height}x{width} image: "
                    f"set {field}.{name} below {side}"
                )


def draw(
    index: Tensor,
    *,
    height: int,
    width: int,
    epoch: Key,
    seed: int,
    options: AugmentOptions,
    purpose: str = "augment",
) -> dict[str, Tensor]:
    """What happens to each sample: `top`, `left` (crop corner in the padded image), `flip`, and what else is asked."""

    def number(high: int | Tensor, what: str) -> Tensor:
        """Uniform in [0, high), where `high` may be each sample's own."""
        if isinstance(high, int):
            return integers(high, seed, f"{purpose}/{what}", index, epoch)
        return integers(1 << 31, seed, f"{purpose}/{what}", index, epoch) * high >> 31

    zeros = torch.zeros_like(index)
    drawn = {"top": zeros, "left": zeros, "flip": zeros.bool()}
    if options.crop:
        corners = 2 * options.crop + 1
        drawn |= {"top": number(corners, "top"), "left": number(corners, "left")}
    if options.flip:
        drawn["flip"] = number(2, "flip").bool()
    if options.shift:
        lost = number(options.shift + 1, "shift")
        columns = number(lost + 1, "shift-columns")
        for side, lines in (("top", lost - columns), ("left", columns)):
            to = number(lines + 1, f"shift-to-{side}")
            drawn |= {side: number(lines + 1, f"shift-{side}") - to, f"to_{side}": to, f"lost_{side}": lines}
    if options.cutout:
        half = options.cutout // 2
        drawn["cutout_top"] = number(height, "cutout-top") - half
        drawn["cutout_left"] = number(width, "cutout-left") - half
    if options.erase:
        drawn |= _draw_rectangle(number, height=height, width=width, share=options.erase)
    if options.color:
        reach = round(options.color * UNIT)
        drawn |= {name: UNIT - reach + number(2 * reach + 1, name) for name in COLORS}
    return drawn


def _draw_rectangle(
    number: Callable[[int | Tensor, str], Tensor], *, height: int, width: int, share: float
) -> dict[str, Tensor]:
    """Where a rectangle of zeros is; it has no rows for the samples that get none."""

    def side(length: int, what: str) -> Tensor:
        least = max(1, length // 8)
        return least + number(max(1, 5 * length // 8 - least + 1), what)

    chosen = number(1 << 24, "erase") < round(share * (1 << 24))
    rows, columns = side(height, "erase-rows"), side(width, "erase-columns")
    top, left = number(height - rows + 1, "erase-top"), number(width - columns + 1, "erase-left")
    return {"erase_top": top, "erase_left": left, "erase_rows": rows * chosen, "erase_columns": columns}


def apply(images: Tensor, drawn: dict[str, Tensor], options: AugmentOptions) -> Tensor:
    """Apply what was drawn to images [B,C,H,W] of any dtype: colours, crop and flip, blank areas. With `color` the
    result is uint8."""
    images = recolor(images, drawn) if options.color else images
    images = crop_and_flip(images, drawn, padding=options.crop)
    images = cut_out(images, drawn, side=options.cutout) if options.cutout else images
    return erase(images, drawn) if options.erase else images


def crop_and_flip(images: Tensor, drawn: dict[str, Tensor], *, padding: int) -> Tensor:
    """Only the geometry, which masks of the same [.., H, W] have to follow as well."""
    height, width = images.shape[-2:]
    row = torch.arange(height, device=images.device)[None]
    column = torch.arange(width, device=images.device)
    column = torch.where(drawn["flip"][:, None], width - 1 - column, column)
    rows, columns = drawn["top"][:, None] - padding + row, drawn["left"][:, None] - padding + column
    shown_rows, shown_columns = _within(rows, 0, height), _within(columns, 0, width)
    if "lost_top" in drawn:
        to_top, to_left = drawn["to_top"][:, None], drawn["to_left"][:, None]
        shown_rows = _within(row, to_top, to_top + height - drawn["lost_top"][:, None])
        shown_columns = _within(column, to_left, to_left + width - drawn["lost_left"][:, None])
    inside = shown_rows[:, None, :, None] & shown_columns[:, None, None, :]
    sample = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    # Gathering is one kernel and needs no padded copy; what lies outside is then set to the padding's zero.
    return images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]] * inside


def cut_out(images: Tensor, drawn: dict[str, Tensor], *, side: int) -> Tensor:
    """The images, each with its square of zeros."""
    return _blank(images, drawn["cutout_top"], drawn["cutout_left"], rows=side, columns=side)


def own_cutout(
    images: Tensor, index: Tensor, *, side: int, epoch: Key, seed: int, name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The images with the learner's own square of zeros, and where that is."""
    height, width = images.shape[-2:]
    options = AugmentOptions(crop=0, flip=False, cutout=side)
    purpose = f"augment/{name}"
    drawn = draw(index, height=height, width=width, epoch=epoch, seed=seed, options=options, purpose=purpose)
    places = {f"own_{name}": value for name, value in drawn.items() if name.startswith("cutout")}
    return cut_out(images, drawn, side=side), places


def erase(images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
    """The images, each with its rectangle of zeros, if it has one."""
    rows, columns = drawn["erase_rows"][:, None], drawn["erase_columns"][:, None]
    return _blank(images, drawn["erase_top"], drawn["erase_left"], rows=rows, columns=columns)


def _blank(images: Tensor, top: Tensor, left: Tensor, *, rows: Tensor | int, columns: Tensor | int) -> Tensor:
    height, width = images.shape[-2:]
    top, left = top[:, None], left[:, None]
    blank_rows = _within(torch.arange(height, device=images.device), top, top + rows)
    blank_columns = _within(torch.arange(width, device=images.device), left, left + columns)
    return images * ~(blank_rows[:, None, :, None] & blank_columns[:, None, None, :])


def recolor(images: Tensor, drawn: dict[str, Tensor]) -> Tensor:
    """Change each image's brightness, then contrast, then saturation; in integers, so that all devices agree."""
    if images.dtype != torch.uint8:
        images = (images * 255 + 0.5).to(torch.uint8)
    brightness, contrast, saturation = (drawn[name][:, None, None, None] for name in COLORS)
    pixels = _stretch(images.to(torch.int64), 0, brightness)
    mean = _grey(pixels).sum((-2, -1), keepdim=True) // (images.shape[-2] * images.shape[-1])
    pixels = _stretch(pixels, mean, contrast)
    return _stretch(pixels, _grey(pixels), saturation).to(torch.uint8)


def _stretch(pixels: Tensor, around: Tensor | int, factor: Tensor) -> Tensor:
    """The distance of bytes from `around` times factor / UNIT, rounded, within 0..255."""
    return (around + ((pixels - around) * factor + UNIT // 2) // UNIT).clamp(0, 255)


def _grey(pixels: Tensor) -> Tensor:
    """The perceived brightness of colours (ITU-R BT.601); the mean for any other number of channels than three."""
    if pixels.shape[1] != 3:
        return pixels.sum(1, keepdim=True) // pixels.shape[1]
    red, green, blue = (pixels[:, channel, None] for channel in range(3))
    return (77 * red + 150 * green + 29 * blue + 128) // 256


def _within(values: Tensor, low: Tensor | int, high: Tensor | int) -> Tensor:
    return (values >= low) & (values < high)
