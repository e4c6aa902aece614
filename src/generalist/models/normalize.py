"""Normalization as the first layer of a model, so that attacks and threats are in [0, 1] pixels."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from generalist.core.options import Number, Options


class NormalizeOptions(Options):
    """Shift and scale of each channel before the network."""

    mean: list[Number] = Field(min_length=1)
    """Subtracted from the pixels in [0, 1], one number per channel."""

    std: list[Number] = Field(min_length=1)
    """Divides the result, one number above 0 per channel."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError(f"{len(self.mean)} means and {len(self.std)} stds: give one of each per channel")
        if min(self.std) <= 0:
            raise ValueError(f"every std must be above 0, not {min(self.std)}")
        return self


class Normalized(nn.Module):
    """A model of [0, 1] images around a network of normalized ones. The constants are saved with the weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, options: NormalizeOptions) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(options.mean).reshape(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(options.std).reshape(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model((x - self.mean) / self.std)
        return logits
