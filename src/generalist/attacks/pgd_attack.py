"""PGD as an evaluation attack, with restarts; the steps are those of `pgd`, the loss is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from generalist.attacks import losses
from generalist.attacks.base import Attack, Found
from generalist.attacks.pgd import AttackOptions, BatchLoss, Classifier, pgd, summed_cross_entropy
from generalist.attacks.rounds import check_counts, run_rounds, settle
from generalist.attacks.threats import Threat
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch


@dataclass(frozen=True, kw_only=True)
class PGDRound:
    """One restart of PGD from a random point of the ball."""

    name: str
    steps: int
    step: float | None = None
    """Length of a step; by default the threat's own."""
    restart: int = 0
    loss: BatchLoss = summed_cross_entropy

    def run(self, model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Found:
        # One purpose whatever the loss and the steps: the start is the one that accuracy under PGD uses elsewhere.
        x = pgd(
            model,
            batch.x,
            batch.y,
            threat=threat,
            options=AttackOptions(steps=self.steps, step=self.step),
            seed=seed,
            purpose=f"pgd/{threat}",
            index=batch.index,
            step=self.restart,
            loss=self.loss,
        )
        return settle(model, batch, x, threat=threat)


@dataclass(frozen=True, kw_only=True)
class PGD:
    """PGD on the cross-entropy: `pgd-20` is PGD(steps=20)."""

    steps: int = 20
    restarts: int = 1
    step: float | None = None
    """Length of a step in the threat's norm; by default a quarter of eps for linf and l2."""

    def __post_init__(self) -> None:
        check_counts("pgd", steps=self.steps, restarts=self.restarts)
        if self.step is not None and not self.step > 0:
            raise GeneralistError(f"pgd: step must be above 0, not {self.step!r}")

    @property
    def name(self) -> str:
        return f"pgd-{self.steps}"

    def rounds(self, num_classes: int) -> Sequence[Attack]:
        """A round a restart, whatever the number of classes."""
        return [
            PGDRound(name=self.name, steps=self.steps, step=self.step, restart=restart)
            for restart in range(self.restarts)
        ]

    def run(self, model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Found:
        return run_rounds(self, model, batch, threat=threat, seed=seed)


def summed_margin(logits: Tensor, y: Tensor) -> Tensor:
    """The largest other logit less the label's, over the batch."""
    return losses.margin(logits, y).sum()
