"""Images for the page: small PNGs embedded in it, differences made visible, and maps laid over images."""

from __future__ import annotations

import base64
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from generalist.core.errors import RunError
from generalist.report.drawing import HEAT
from generalist.report.html import Html, tag

Floats = npt.NDArray[np.float32]

MAX_SIDE = 64
"""The longer side in pixels of a picture embedded in the page; larger images are scaled down."""
SHOWN = 80
"""The side in pixels of a picture on the screen."""
MOST_BYTES = 1 << 28
"""More than any examples take: a file that unpacks to more is damaged or malicious."""


@dataclass(frozen=True)
class Examples:
    """Pairs of an image and its adversarial version, as an evaluation stores them."""

    index: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]
    clean: Floats
    adversarial: Floats
    clean_prediction: npt.NDArray[np.int64]
    adversarial_prediction: npt.NDArray[np.int64]
    threat: list[str]
    attack: list[str]


def read_examples(path: Path) -> Examples | None:
    """The pairs in examples.npz; None if there is no such file."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
                raise ValueError("it unpacks to too many bytes")
        with np.load(path, allow_pickle=False) as arrays:
            return _checked({name: arrays[name] for name in Examples.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise RunError(f"{path} is damaged: {error!s:.200}; remove it, and evaluate again") from None


def _checked(arrays: dict[str, npt.NDArray[Any]]) -> Examples:
    clean, count = arrays["clean"], len(arrays["index"])
    if clean.ndim != 4 or min(clean.shape[1:], default=0) < 1 or arrays["adversarial"].shape != clean.shape:
        raise ValueError("its images are not [N, C, H, W]")
    for name, array in arrays.items():
        kinds = "f" if name in {"clean", "adversarial"} else "U" if name in {"threat", "attack"} else "iu"
        if len(array) != count or array.dtype.kind not in kinds or (kinds != "f" and array.ndim != 1):
            raise ValueError(f"{name} has the wrong type or shape")
    values: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            values[name] = np.nan_to_num(array.astype(np.float32)).clip(0, 1)
        else:
            values[name] = [str(word) for word in array] if array.dtype.kind == "U" else array.astype(np.int64)
    return Examples(**values)


def picture(image: Floats, alt: str) -> Html:
    """An image [C, H, W] in [0, 1] as an element; `alt` describes it."""
    pixels = np.round(255 * colours(image)).astype(np.uint8)
    made = Image.fromarray(pixels)
    height, width = pixels.shape[:2]
    if max(height, width) > MAX_SIDE:
        ratio = MAX_SIDE / max(height, width)
        made = made.resize((max(1, round(width * ratio)), max(1, round(height * ratio))), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    made.save(data, "PNG", optimize=True)
    source = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    shown_width = SHOWN if width >= height else max(1, round(SHOWN * width / height))
    shown_height = SHOWN if height >= width else max(1, round(SHOWN * height / width))
    return tag("img", src=source, alt=alt, width=shown_width, height=shown_height)


def colours(image: Floats) -> Floats:
    """The image as [H, W, 3]; unless it has 3 channels, as grey."""
    grey = image if image.shape[0] == 3 else image.mean(0, keepdims=True).repeat(3, 0)
    return np.asarray(grey.transpose(1, 2, 0).clip(0, 1), np.float32)


def difference(clean: Floats, adversarial: Floats) -> Floats:
    """The change: grey is none, black and white are its largest absolute value."""
    change = adversarial - clean
    largest = float(np.abs(change).max())
    return np.asarray(0.5 + (change / (2 * largest) if largest > 0 else 0 * change), np.float32)


def overlay(image: Floats, evidence: Floats) -> Floats:
    """The image with a map [H, W] >= 0 laid over it: blue for little evidence, yellow for the most."""
    top = float(evidence.max())
    share = evidence / top if top > 0 else evidence
    palette = np.asarray([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in HEAT], np.float32)
    heat = palette[(share * (len(HEAT) - 1)).round().astype(int)]
    grey = colours(image).mean(2, keepdims=True)
    return np.asarray((0.45 * grey + 0.55 * heat).transpose(2, 0, 1), np.float32)
