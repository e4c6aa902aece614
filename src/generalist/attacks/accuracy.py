"""A model's logits, and which natural images it classifies correctly."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from generalist.attacks.base import answers
from generalist.attacks.threats import widen
from generalist.data.sets import Batch
from generalist.tensors.modes import frozen


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """Logits in evaluation mode and at least single precision; afterwards the model is as it was."""
    with frozen(model):
        return widen(model(x))


def correct_natural(model: nn.Module, batch: Batch) -> Tensor:
    """Per sample, whether the natural image is classified correctly."""
    return answers(logits_of(model, batch.x), batch.index) == batch.y
