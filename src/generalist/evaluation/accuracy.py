"""Natural and PGD accuracy of any model on any images, with intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from generalist.attacks.accuracy import correct_natural, correct_under_pgd
from generalist.attacks.pgd import AttackOptions
from generalist.attacks.threats import ThreatOptions
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch, Images, iterate
from generalist.evaluation.classifier import AnyPrecision

NATURAL = "natural"
_PGD = re.compile(r"pgd-(\d{1,5})")


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


def steps_of(attack: str) -> int | None:
    """The number of steps of `pgd-N`; None for `natural`."""
    if attack == NATURAL:
        return None
    match = _PGD.fullmatch(attack)
    if match is None or int(match[1]) == 0:
        raise GeneralistError(f"unknown attack {attack!r}; known: natural, pgd-STEPS (for example pgd-20)")
    return int(match[1])


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
    steps = {attack: steps_of(attack) for attack in attacks}
    index = torch.arange(len(images)) if index is None else index
    model, threats = AnyPrecision(model), list(dict.fromkeys(threats))
    counts: dict[str, int] = {}
    for batch in iterate(images, list(torch.split(index, batch_size))):
        for attack, number in steps.items():
            for name, correct in _measure(model, batch, attack, number, threats, seed):
                counts[name] = counts.get(name, 0) + int(correct.sum().item())
    return {name: Accuracy(correct, len(index)) for name, correct in counts.items()}


def _measure(
    model: nn.Module, batch: Batch, attack: str, steps: int | None, threats: Sequence[ThreatOptions], seed: int
) -> list[tuple[str, Tensor]]:
    if steps is None:
        return [(NATURAL, correct_natural(model, batch))]
    return [
        (
            f"{attack}/{threat}",
            correct_under_pgd(model, batch, threat=threat.build(), options=AttackOptions(steps=steps), seed=seed),
        )
        for threat in threats
    ]
