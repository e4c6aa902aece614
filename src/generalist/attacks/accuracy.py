"""A model's logits and which images it classifies rightly as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from generalist.attacks.base import answers
from generalist.attacks.threats import widen
from generalist.data.sets import Batch
from generalist.tensors.modes import frozen


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """Logits in evaluation mode and at least single precision; the model is given back as it was."""
    with frozen(model):
        return widen(model(x))


def correct_natural(model: nn.Module, batch: Batch) -> Tensor:
    """Per sample, whether it is classified rightly as it is."""
    return answers(logits_of(model, batch.x), batch.index) == batch.y
