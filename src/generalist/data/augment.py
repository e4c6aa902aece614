"""Augmentation on the device: random crop, flip and cutout as pure functions of (seed, sample, epoch).

A sample's draw depends on nothing but its address, so every batch size, batch order and device gives the same image.
There is no host synchronisation and no shape that depends on data: the functions can be recorded in a CUDA graph,
where `epoch` is a 0-d int64 tensor that is refilled between replays.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from generalist.core.errors import DataError
from generalist.core.options import Number, Options
from generalist.core.random import Key, integers


class AugmentOptions(Options):
    """Random changes of training images. Resident sets use crop, flip, cutout; streamed folders scale, ratio, flip."""

    crop: int = Field(default=4, ge=0)
    """Pixels of zero padding on each side before a random crop back to the image's size; 0 turns it off."""

    flip: bool = True
    """Mirror left and right with probability 1/2. Turn it off where the side has a meaning, as in digits."""

    cutout: int = Field(default=0, ge=0)
    """Side in pixels of a square of zeros at a random centre, cut off at the border; 0 turns it off. Not for streamed
    folders."""

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
        return self

    def check_fits(self, height: int, width: int) -> None:
        """Refuse a crop or cutout that could remove a whole image of this size."""
        side = min(height, width)
        if self.crop >= side:
            raise DataError(
                f"a crop with {self.crop} pixels of padding can lose a whole {height}x{width} image: "
                f"set data.augmentation.crop below {side}"
            )
        if self.cutout >= side:
            raise DataError(
                f"a cutout of {self.cutout} pixels can cover a whole {height}x{width} image: "
                f"set data.augmentation.cutout below {side}"
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
    """What happens to each sample: `top`, `left` (crop corner in the padded image), `flip`, and cutout's corner."""
    zeros = torch.zeros_like(index)
    drawn = {"top": zeros, "left": zeros, "flip": zeros.bool()}
    if options.crop:
        corners = 2 * options.crop + 1
        drawn["top"] = integers(corners, seed, f"{purpose}/top", index, epoch)
        drawn["left"] = integers(corners, seed, f"{purpose}/left", index, epoch)
    if options.flip:
        drawn["flip"] = integers(2, seed, f"{purpose}/flip", index, epoch).bool()
    if options.cutout:
        half = options.cutout // 2
        drawn["cutout_top"] = integers(height, seed, f"{purpose}/cutout-top", index, epoch) - half
        drawn["cutout_left"] = integers(width, seed, f"{purpose}/cutout-left", index, epoch) - half
    return drawn


def apply(images: Tensor, drawn: dict[str, Tensor], options: AugmentOptions) -> Tensor:
    """Images [B,C,H,W] of any dtype after the crop, the flip and then the cutout that were drawn for them."""
    images = crop_and_flip(images, drawn, padding=options.crop)
    return cut_out(images, drawn, side=options.cutout) if options.cutout else images


def crop_and_flip(images: Tensor, drawn: dict[str, Tensor], *, padding: int) -> Tensor:
    """The geometry alone: what a mask of the same [.., H, W] has to follow its sample."""
    height, width = images.shape[-2:]
    row = torch.arange(height, device=images.device)
    column = torch.arange(width, device=images.device)
    column = torch.where(drawn["flip"][:, None], width - 1 - column, column)
    row = row + drawn["top"][:, None] - padding
    column = column + drawn["left"][:, None] - padding
    inside = _within(row, 0, height)[:, None, :, None] & _within(column, 0, width)[:, None, None, :]
    sample = torch.arange(len(images), device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
    row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    # Gathering is one kernel and needs no padded copy; what lies outside is then set to the padding's zero.
    return images[sample, channel, row[:, None, :, None], column[:, None, None, :]] * inside


def cut_out(images: Tensor, drawn: dict[str, Tensor], *, side: int) -> Tensor:
    """Images with each one's square of zeros."""
    height, width = images.shape[-2:]
    top, left = drawn["cutout_top"][:, None], drawn["cutout_left"][:, None]
    rows = _within(torch.arange(height, device=images.device), top, top + side)
    columns = _within(torch.arange(width, device=images.device), left, left + side)
    return images * ~(rows[:, None, :, None] & columns[:, None, None, :])


def _within(values: Tensor, low: Tensor | int, high: Tensor | int) -> Tensor:
    return (values >= low) & (values < high)
