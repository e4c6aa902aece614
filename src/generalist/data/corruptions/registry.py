"""The definition of a corruption: a function of images with published strengths, and random numbers per sample.

The strengths are those of Hendrycks & Dietterich (2019): one table made for CIFAR-10-C (32 x 32 pixels), one for
ImageNet-C (224 x 224). Lengths are in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.core.registry import Registry

SEVERITIES = (1, 2, 3, 4, 5)
SMALL_SIDE = 64
"""Images whose shorter side has at most this many pixels use CIFAR-10-C's strengths, larger ones ImageNet-C's."""

Strength = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Draws:
    """Random numbers for each sample of a batch: functions of (seed, purpose, sample index) and nothing else."""

    seed: int
    purpose: str
    index: Tensor

    def uniform(self, what: str, shape: Sequence[int] = ()) -> Tensor:
        """float32 in [0, 1) of shape [B, *shape]."""
        return random.uniform(self.seed, f"{self.purpose}/{what}", self.index, shape=shape)

    def normal(self, what: str, shape: Sequence[int] = ()) -> Tensor:
        """Standard normal float32 of shape [B, *shape]."""
        return random.normal(self.seed, f"{self.purpose}/{what}", self.index, shape=shape)

    def integers(self, high: int, what: str, shape: Sequence[int] = ()) -> Tensor:
        """int64 in 0..high-1 of shape [B, *shape]."""
        return random.integers(high, self.seed, f"{self.purpose}/{what}", self.index, shape=shape)


Function = Callable[[Tensor, Strength, Draws], Tensor]
"""Maps images [B,C,H,W] with 8 bits per value as floats in [0,1], a strength and draws to floats of that shape."""


@dataclass(frozen=True, eq=False)
class Corruption:
    """One corruption with its five strengths for small and for large images."""

    name: str
    apply: Function
    small: tuple[Strength, ...]
    """CIFAR-10-C's strengths at severities 1 to 5."""
    large: tuple[Strength, ...]
    """ImageNet-C's strengths at severities 1 to 5."""
    extra: bool
    """Whether it is one of the four that the benchmark reserves for validation, outside its mean over fifteen."""
    colour: bool
    """Whether it requires images with three channels."""

    def strength(self, severity: int, height: int, width: int) -> Strength:
        if type(severity) is not int or severity not in SEVERITIES:
            raise GeneralistError(f"severity must be a whole number from 1 to 5, not {severity!r}")
        table = self.small if min(height, width) <= SMALL_SIDE else self.large
        return table[severity - 1]


CORRUPTIONS: Registry[Corruption] = Registry("corruption")

COMMON = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
"""The fifteen corruptions of the benchmark, in its order."""

EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The four further corruptions that the benchmark reserves for validation."""


def corruption(
    name: str, *, small: Sequence[Strength], large: Sequence[Strength], colour: bool = False
) -> Callable[[Function], Function]:
    """Decorator: register a function as the corruption `name` with these strengths."""

    def add(function: Function) -> Function:
        made = Corruption(name, function, tuple(small), tuple(large), extra=name in EXTRA, colour=colour)
        CORRUPTIONS.register(name)(made)
        return function

    return add
