"""Pillow's images with 8 bits per channel, whatever their files store."""

from __future__ import annotations

import numpy as np
from PIL import Image

from generalist.core.errors import DataError


def to_eight_bits(image: Image.Image, name: str) -> Image.Image:
    """The image itself, or the upper 8 bits of one with 16 bits of grey, which pillow's own conversion would clip."""
    sixteen = image.format in ("PNG", "PPM")  # pillow has held their 16 bits in 32
    if image.mode == "F" or (image.mode == "I" and not sixteen):
        kind = "float pixels" if image.mode == "F" else "pixels of 32 bits or with a sign"
        raise DataError(f"{name} has {kind}, whose range is not known: save it with 8 or 16 bits")
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    pixels = np.asarray(image)
    # Pillow holds some files of 16 bits in 32, so a larger value shows that the file has more.
    if pixels.min() < 0 or pixels.max() > 0xFFFF:
        raise DataError(f"{name} has pixels of more than 16 bits: save it with 8 or 16 bits")
    return Image.fromarray((pixels >> 8).astype(np.uint8))
