"""Anybody's model as evaluation takes it: checked against the images, and fed in its own precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from generalist.core.errors import DataError, GeneralistError
from generalist.data.sets import Images, ImageSet
from generalist.models import check_model


def device_of(model: nn.Module) -> torch.device:
    """Where its parameters are; the CPU for one that has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def check_classifier(model: nn.Module, images: Images, device: torch.device | str) -> None:
    """Refuse a model that does not give these images finite logits, one for each class.

    Where the classes were inferred from the labels, the model may know further ones, which these images do not show.
    """
    if isinstance(images, ImageSet) and not images.named:
        classes = max(2, len(images.classes))
        first = _FirstOutputs(model, classes)
        try:
            check_model(first, images.shape, classes, device)
        except GeneralistError:
            if 2 <= first.outputs < classes:  # the classes are the labels' own: rather these are wrong than the model
                raise DataError(
                    f"{images.name}: labels up to {classes - 1} mean {classes} classes, but the model has "
                    f"{first.outputs}: renumber the labels from 0, or evaluate the model that belongs to them"
                ) from None
            raise
    else:
        check_model(model, images.shape, len(images.classes), device)


class _FirstOutputs(nn.Module):
    """The logits of the first `count` classes; any other output is passed on for the check to refuse."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model, self.count, self.outputs = model, count, 0

    def forward(self, x: Tensor) -> Any:
        logits = self.model(x)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            return logits
        self.outputs = logits.shape[1]
        return logits[:, : self.count]


class AnyPrecision(nn.Module):
    """A model of float64 or half precision that takes float32 images.

    Attacks keep to their ball in the images' own precision and the model alone rounds: in bfloat16, an image and its
    perturbation can add up to a point outside the ball.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x.to(self.dtype))
        return logits


class InBfloat16(nn.Module):
    """The same model under bfloat16 autocast, for searching only: verdicts are the full-precision model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            logits: Tensor = self.model(x)
        return logits
