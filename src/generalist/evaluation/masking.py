"""Signs that a model hides its gradients instead of being robust, as warnings in plain words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from generalist.attacks.signals import (
    answers_at_random,
    answers_by_company,
    answers_in_steps,
    gives_probabilities,
    not_rising,
    takes_gradients,
    zero_gradient,
)
from generalist.data.sets import Batch
from generalist.evaluation.plan import HALF, Column, Plan
from generalist.evaluation.verdicts import Verdicts

BLACK_BOX = "square"
PROBE = 100
"""The number of images that are checked before the attacks."""
COMMON = 0.1
"""The share of these from which a sign is worth a warning: on our own networks, robust or not, none show it."""
NOTEWORTHY = 0.01
"""The share of samples, broken by the black-box attack alone, from which this is no accident."""
FEWEST = 3
"""The number of such samples from which this is no accident; both have to be reached."""

_PROBED = "the first images"
_HIDDEN = "attacks that follow gradients may find little; trust Square more than them"
_SURE = "attacks on it (pgd, apgd-ce) may find little; trust apgd-t and Square more than them"
_RANDOM = "the model gives different answers to the same image: use aa-rand, which averages over its randomness"
_COMPANY = "the model's answer to an image changes with the others in its batch, so no verdict is about a single image"
_DYNAMIC = "the model computes gradients in its forward pass: only an attack made for that can measure its robustness"
_PROBABILITIES = (
    "the model returns probabilities instead of logits: where they round to 0 or 1, attacks find no gradient and the "
    "model seems more robust than it is; remove its final softmax"
)


def model_warnings(model: nn.Module, batch: Batch, plan: Plan, *, seed: int) -> list[str]:
    """Warnings that a few images give before the attacks."""
    if _share(answers_at_random(model, batch.x)) > 0:
        # Two answers that differ also make gradients and losses differ: nothing else can be told.
        return [_RANDOM]
    found = [_COMPANY] if bool(answers_by_company(model, batch.x).any()) else []
    found += [_DYNAMIC] if takes_gradients(model, batch.x) else []
    if all(_is_black_box(step.key) for step in plan.steps):
        return found
    found += [_PROBABILITIES] if bool(gives_probabilities(model, batch.x).all()) else []
    if (share := _share(answers_in_steps(model, batch, seed=seed))) >= COMMON:
        found.append(f"the model's outputs change in steps on {share:.0%} of {_PROBED}: {_HIDDEN}")
    elif (share := _share(zero_gradient(model, batch))) >= COMMON:
        found.append(f"the cross-entropy has no gradient on {share:.0%} of {_PROBED}: {_SURE}")
    for threat in dict.fromkeys(step.threat for step in plan.steps):
        if (share := _share(not_rising(model, batch, threat=threat.build(), seed=seed))) >= COMMON:
            found.append(
                f"{threat}: the loss does not rise with the steps of PGD on {share:.0%} of {_PROBED}: {_HIDDEN}"
            )
    return found


def _share(flags: Tensor) -> float:
    return flags.float().mean().item()


def black_box_warnings(columns: Sequence[Column], verdicts: Verdicts) -> list[str]:
    """Warnings where an attack without gradients breaks samples that all attacks with gradients left unbroken."""
    warnings = []
    for threat in dict.fromkeys(column.threat for column in columns):
        keys = dict.fromkeys(key for column in columns if column.threat == threat for key in column.steps)
        blind = [key for key in keys if _is_black_box(key)]
        seeing = [key for key in keys if not _is_black_box(key)]
        if not blind or not seeing:
            continue
        only = np.logical_or.reduce([verdicts.broken[key].any(0) for key in blind]) & verdicts.surviving(seeing)
        # In a cascade, no other attack sees what Square broke before them: that says nothing about gradients.
        only &= np.logical_or.reduce([verdicts.done[key].any(0) for key in seeing])
        if only.sum() >= max(FEWEST, NOTEWORTHY * len(only)):
            warnings.append(
                f"{threat}: square, which uses no gradients, broke {int(only.sum())} of {len(only)} samples that no "
                "attack with gradients broke: the model may mask its gradients, and be less robust than it seems"
            )
    return warnings


def _is_black_box(key: str) -> bool:
    label = key.rpartition(" ")[2].removesuffix(HALF)
    return label.rpartition(".")[2] == BLACK_BOX
