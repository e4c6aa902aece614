"""Signs that a model hides its gradients instead of being robust, as warnings in plain words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from generalist.attacks.signals import answers_at_random, gradient_signals
from generalist.data.sets import Batch
from generalist.evaluation.plan import HALF, Column, Plan
from generalist.evaluation.verdicts import Verdicts

BLACK_BOX = "square"
PROBE = 100
"""Images that are looked at before the attacks."""
COMMON = 0.1
"""The share of them from which on a sign is worth a warning: networks of ours show it on none, trained either way."""
NOTEWORTHY = 0.01
"""The share of the samples above which it is no accident that only the black-box attack found something,"""
FEWEST = 3
"""where they are at least so many."""

_PROBED = "the first images"
_HIDDEN = "attacks that follow gradients may find little; trust Square more than them"
_RANDOM = "the model answers the same image differently each time: use aa-rand, which averages over its randomness"


def model_warnings(model: nn.Module, batch: Batch, plan: Plan, *, seed: int) -> list[str]:
    """What a few images tell before the attacks; each sign once, with the threat in which it was seen."""
    if all(_is_black_box(step.key) for step in plan.steps):
        return [_RANDOM] if bool(answers_at_random(model, batch.x).any()) else []
    found: dict[str, None] = {}
    for threat in dict.fromkeys(step.threat for step in plan.steps):
        signals = gradient_signals(model, batch, threat=threat.build(), seed=seed)
        if signals.random > 0:
            # Two answers that differ also make gradients and losses differ: nothing else can be told.
            return [_RANDOM]
        if signals.stepped >= COMMON:
            found[f"the model's answers move in steps on {signals.stepped:.0%} of {_PROBED}: {_HIDDEN}"] = None
        elif signals.zero_gradient >= COMMON:
            found[f"the loss has no gradient on {signals.zero_gradient:.0%} of {_PROBED}: {_HIDDEN}"] = None
        if signals.not_rising >= COMMON:
            share = f"{signals.not_rising:.0%} of {_PROBED}"
            found[f"{threat}: the loss does not rise with the steps of PGD on {share}: {_HIDDEN}"] = None
    return list(found)


def black_box_warnings(columns: Sequence[Column], verdicts: Verdicts) -> list[str]:
    """Where an attack without gradients breaks what every attack with gradients, run on the same sample, left right."""
    warnings = []
    for threat in dict.fromkeys(column.threat for column in columns):
        keys = dict.fromkeys(key for column in columns if column.threat == threat for key in column.steps)
        blind = [key for key in keys if _is_black_box(key)]
        seeing = [key for key in keys if not _is_black_box(key)]
        if not blind or not seeing:
            continue
        only = np.logical_or.reduce([verdicts.broken[key].any(0) for key in blind]) & verdicts.surviving(seeing)
        if only.sum() >= max(FEWEST, NOTEWORTHY * len(only)):
            warnings.append(
                f"{threat}: square, which uses no gradients, broke {int(only.sum())} of {len(only)} samples that no "
                "attack with gradients broke: the model may mask its gradients, and be less robust than it seems"
            )
    return warnings


def _is_black_box(key: str) -> bool:
    label = key.rpartition(" ")[2].removesuffix(HALF)
    return label.rpartition(".")[2] == BLACK_BOX
