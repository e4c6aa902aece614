"""Which images a model classifies rightly, as they are and under PGD."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from generalist.attacks.pgd import AttackOptions, pgd
from generalist.attacks.threats import Threat, widen
from generalist.data.sets import Batch
from generalist.tensors.modes import frozen


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """Logits in evaluation mode and at least single precision; the model is given back as it was."""
    with frozen(model):
        return widen(model(x))


def correct_natural(model: nn.Module, batch: Batch) -> Tensor:
    """Per sample, whether it is classified rightly as it is."""
    return logits_of(model, batch.x).argmax(1) == batch.y


def correct_under_pgd(model: nn.Module, batch: Batch, *, threat: Threat, options: AttackOptions, seed: int) -> Tensor:
    """Per sample, whether it is classified rightly as it is and after PGD."""
    adversarial = pgd(
        model, batch.x, batch.y, threat=threat, options=options, seed=seed, purpose=f"pgd/{threat}", index=batch.index
    )
    return correct_natural(model, batch) & (logits_of(model, adversarial).argmax(1) == batch.y)
