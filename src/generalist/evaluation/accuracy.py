"""Accuracy of any model on any images, natural and under attack, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from generalist.attacks.accuracy import correct_natural
from generalist.attacks.threats import ThreatOptions
from generalist.core.errors import GeneralistError
from generalist.data.sets import Images, iterate
from generalist.evaluation.classifier import AnyPrecision
from generalist.evaluation.named import attack_named

NATURAL = "natural"


@dataclass(frozen=True)
class Accuracy:
    """How many of `total` images are right. A number like any other, with what it is worth."""

    correct: int
    total: int

    @property
    def value(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval."""
        z, n, p = 1.959964, self.total, self.value
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        return f"{100 * self.value:.2f}%"


def evaluate_model(
    model: nn.Module,
    images: Images,
    *,
    threats: Sequence[ThreatOptions],
    attacks: Sequence[str] = (NATURAL, "pgd-20"),
    index: Tensor | None = None,
    batch_size: int = 500,
    seed: int = 0,
) -> dict[str, Accuracy]:
    """Accuracy by `natural`, and by `attack/threat` for each attack and threat, on the images of `index`.

    A sample counts as right under attack only where it is right as it is, too. What is named twice counts once.
    """
    if batch_size < 1:
        raise GeneralistError(f"batch_size must be at least 1, not {batch_size}")
    chosen = {name: attack_named(name) for name in attacks if name != NATURAL}
    index = torch.arange(len(images)) if index is None else index
    model, threats = AnyPrecision(model), list(dict.fromkeys(threats))
    counts: dict[str, int] = {}
    for batch in iterate(images, list(torch.split(index, batch_size))):
        right = correct_natural(model, batch)
        found = {NATURAL: right} if NATURAL in attacks else {}
        for name, attack in chosen.items():
            for threat in threats:
                broken = attack.run(model, batch, threat=threat.build(), seed=seed).broken
                found[f"{name}/{threat}"] = right & ~broken
        for what, correct in found.items():
            counts[what] = counts.get(what, 0) + int(correct.sum().item())
    return {name: Accuracy(correct, len(index)) for name, correct in counts.items()}
