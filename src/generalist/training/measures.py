"""Measures that tell, during training, whether mixing still works: drift, mixing gap, output ensemble, regret."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def drift(parameters: Sequence[Tensor], center: Tensor, gammas: Sequence[float]) -> float:
    """sum_a gamma_a ||theta_a - theta_bar||^2, theta_bar the global learner: the second paper's Theorem 2."""
    pairs = zip(parameters, gammas, strict=True)
    return sum(gamma * (theta - center).double().square().sum().item() for theta, gamma in pairs)


def mixing_gap(mixed_logits: Tensor, learner_logits: Sequence[Tensor], gammas: Sequence[float]) -> Tensor:
    """|| f_mix(x) - sum_a gamma_a f_a(x) || per sample: its Eq. 36."""
    gap: Tensor = torch.linalg.vector_norm(mixed_logits - ensemble(learner_logits, gammas), dim=1)
    return gap


def ensemble(learner_logits: Sequence[Tensor], gammas: Sequence[float]) -> Tensor:
    """sum_a gamma_a f_a(x): what mixing the outputs, not the weights, would give."""
    total = torch.zeros_like(learner_logits[0])
    for logits, gamma in zip(learner_logits, gammas, strict=True):
        total.add_(logits, alpha=gamma)
    return total


class Regret:
    """R_T = mean_a sum_t [ l_a(theta_a^t) - min_s l_a(theta_a^s) ], each image's loss clipped to [0, 1].

    One t a validation, on the fixed validation images: a lower estimate of the true regret, because the best of the
    visited weights stands for the best of all.
    """

    def __init__(self, history: dict[str, list[float]] | None = None) -> None:
        self.history: dict[str, list[float]] = history or {}

    def add(self, losses: dict[str, float]) -> None:
        for name, loss in losses.items():
            self.history.setdefault(name, []).append(loss)

    def value(self) -> float:
        per_learner = [sum(losses) - len(losses) * min(losses) for losses in self.history.values()]
        return sum(per_learner) / len(per_learner)

    def rounds(self) -> int:
        """T: how many validations have been counted."""
        return max((len(losses) for losses in self.history.values()), default=0)


def without_nan(value: Any) -> Any:
    """JSON has no nan: a measure that could not be taken is null."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
