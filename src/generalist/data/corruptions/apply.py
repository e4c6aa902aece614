"""One function for every corruption: checks its input, draws for each sample, rounds to 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.core.errors import DataError
from generalist.data.corruptions.filters import rounded, truncated
from generalist.data.corruptions.registry import CORRUPTIONS, Draws

SMALLEST = 8
"""The shortest side in pixels for which every corruption is defined."""


@torch.no_grad()
def corrupt(images: Tensor, *, name: str, severity: int, index: Tensor, seed: int) -> Tensor:
    """Images [B,C,H,W] in [0,1] after the corruption `name` at severity 1 to 5: float32 in [0,1] on 8-bit levels.

    Generated here, not the official files. `index` [B] is each sample's number in its set; what is drawn for a sample
    depends only on (seed, sample, corruption, severity), whatever else is in the batch. Images are first rounded to 8
    bits, like the files that the benchmark was made from.
    """
    chosen = CORRUPTIONS.get(name)
    check_images(images, index)
    strength = chosen.strength(severity, images.shape[2], images.shape[3])
    draws = Draws(seed=seed, purpose=f"corruption/{name}/{severity}", index=index.to(images.device))
    return truncated(chosen.apply(rounded(images.float()), strength, draws))


def check_images(images: Tensor, index: Tensor) -> None:
    """Refuse anything but a batch of grey or RGB images in [0,1] with one number each."""
    if images.ndim != 4 or not images.is_floating_point() or len(images) == 0:
        raise DataError(
            f"images must be floats in [0,1] of shape [B,C,H,W], not {images.dtype} of shape {list(images.shape)}"
        )
    if images.shape[1] not in (1, 3) or min(images.shape[2:]) < SMALLEST:
        raise DataError(
            f"corruptions are defined for 1 or 3 channels of at least {SMALLEST} x {SMALLEST} pixels, "
            f"not for images of shape {list(images.shape[1:])}"
        )
    if not bool(((images >= 0) & (images <= 1)).all()):  # false for nan as well
        raise DataError("images must lie in [0,1] and hold no nan: undo the normalisation, or divide by 255")
    if index.shape != (len(images),) or index.is_floating_point() or index.dtype == torch.bool:
        raise DataError(f"index must hold one whole number for each of the {len(images)} images")
