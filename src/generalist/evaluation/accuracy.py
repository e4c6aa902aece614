"""An accuracy: how many images are right, and how far chance alone may have moved that share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
        # It always holds the share itself; at 0 and 1 it ends there, which rounding would miss.
        return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))

    def as_json(self) -> dict[str, Any]:
        """What summary.json says of it."""
        return {"correct": self.correct, "total": self.total, "value": self.value, "interval": list(self.interval)}

    def __str__(self) -> str:
        return f"{100 * self.value:.2f}%"

    def __repr__(self) -> str:
        """As it stands in a printed `Evaluation`."""
        return f"{self} ({self.correct} of {self.total})"
