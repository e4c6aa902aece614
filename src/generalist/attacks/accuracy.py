"""Which images a model classifies rightly, as they are and under PGD."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from generalist.attacks.pgd import AttackOptions, pgd
from generalist.attacks.threats import Threat, widen
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch
from generalist.tensors.modes import frozen


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """Logits in evaluation mode and at least single precision; the model is given back as it was."""
    with frozen(model):
        return widen(model(x))


def correct_natural(model: nn.Module, batch: Batch) -> Tensor:
    """Per sample, whether it is classified rightly as it is."""
    return _correct(model, batch.x, batch)


def correct_under_pgd(model: nn.Module, batch: Batch, *, threat: Threat, options: AttackOptions, seed: int) -> Tensor:
    """Per sample, whether it is classified rightly as it is and after PGD."""
    natural = correct_natural(model, batch)
    adversarial = pgd(
        model, batch.x, batch.y, threat=threat, options=options, seed=seed, purpose=f"pgd/{threat}", index=batch.index
    )
    return natural & _correct(model, adversarial, batch, under=f" under pgd-{options.steps}/{threat}")


def _correct(model: nn.Module, x: Tensor, batch: Batch, *, under: str = "") -> Tensor:
    logits = logits_of(model, x)
    nan = logits.isnan().any(1)
    if count := int(nan.sum().item()):
        # argmax takes nan for the largest, so a model without an answer could pass for right.
        raise GeneralistError(
            f"the model outputs NaN on {count} of {len(x)} images in a batch (the first is image "
            f"{int(batch.index[nan][0])}){under}: mend the model, or evaluate it in float32 as after model.float()"
        )
    return logits.argmax(1) == batch.y
