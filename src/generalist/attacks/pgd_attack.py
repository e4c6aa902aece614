"""PGD as an evaluation attack, with restarts and any loss; the steps are those of `pgd`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from generalist.attacks import losses
from generalist.attacks.base import Found, verdict
from generalist.attacks.pgd import AttackOptions, BatchLoss, Classifier, borrowed, pgd, summed_cross_entropy
from generalist.attacks.rounds import InRounds, check_counts
from generalist.attacks.threats import Threat
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch


@dataclass(frozen=True, kw_only=True)
class PGD(InRounds):
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

    def rounds(self, num_classes: int) -> int:
        """One round per restart, whatever the number of classes."""
        return self.restarts

    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        with borrowed(model):
            x = restarted_pgd(model, batch, round, threat=threat, seed=seed, steps=self.steps, step=self.step)
            return verdict(model, batch, x, threat=threat)


def restarted_pgd(
    model: Classifier,
    batch: Batch,
    restart: Tensor,
    *,
    threat: Threat,
    seed: int,
    steps: int,
    step: float | None = None,
    loss: BatchLoss = summed_cross_entropy,
) -> Tensor:
    """PGD from the random start of each sample's `restart`, [B].

    Starts do not depend on the loss or the number of steps, so different attacks can be compared from the same starts.
    """
    return pgd(
        model,
        batch.x,
        batch.y,
        threat=threat,
        options=AttackOptions(steps=steps, step=step),
        seed=seed,
        purpose=f"pgd/{threat}",
        index=batch.index,
        step=restart,
        loss=loss,
        key=("pgd", loss),
    )


def summed_margin(logits: Tensor, y: Tensor) -> Tensor:
    """The margin, summed over the batch."""
    return losses.margin(logits, y).sum()
