"""Interpolated adversarial training (Lamb et al., 2019)."""

from __future__ import annotations

from torch import Tensor

from generalist.core import random
from generalist.data.sets import Batch
from generalist.objectives.at import AdversarialTraining
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, Progress

HALVES = ("natural", "adversarial")


@OBJECTIVES.register("iat")
class InterpolatedAdversarialTraining(AdversarialTraining):
    """Minimises 0.5 (mixup-CE(x) + mixup-CE(x')), x' from PGD on images that are not mixed (Lamb et al., 2019).

    Each half of a batch is mixed with itself: one share lambda ~ Beta(1, 1), which is uniform, and one permutation for
    each half, drawn separately. mixup-CE is lambda CE against a sample's own label + (1 - lambda) CE against its
    partner's. The authors attack by PGD-7: `attack: {steps: 7}`. Costs steps + 2 forward and backward passes,
    one more than AT.
    """

    separable = False  # a sample's partner may be any other of the batch
    attacks_each = False

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        images = (batch.x, self.learner.adversarial(batch, progress))
        made: dict[str, Tensor] = {}
        for half, x in zip(HALVES, images, strict=True):
            share, order = self._draw(half, x, progress)
            made |= {
                half: share * x + (1 - share) * x[order],
                f"{half}_share": share,
                f"{half}_partner": batch.y[order],
            }
        return Inputs(batch, made)

    def _draw(self, half: str, x: Tensor, progress: Progress) -> tuple[Tensor, Tensor]:
        """The share that each sample keeps, and the partner that it is mixed with."""
        seed, purpose = self.learner.seed, f"mixup/{self.learner.name}/{half}"
        share = random.uniform(seed, f"{purpose}/share", progress.step, device=x.device).to(x.dtype)
        return share, random.permutation(len(x), seed, f"{purpose}/order", progress.step, device=x.device)

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        made, y = inputs.made, inputs.batch.y
        losses = {
            half: self._mixed_cross_entropy(
                self.learner.forward(made[half]), y, made[f"{half}_partner"], made[f"{half}_share"]
            )
            for half in HALVES
        }
        metrics = {f"{half}_loss": loss.detach() for half, loss in losses.items()}
        return 0.5 * (losses["natural"] + losses["adversarial"]), metrics

    def _mixed_cross_entropy(self, logits: Tensor, y: Tensor, partner: Tensor, share: Tensor) -> Tensor:
        own, other = (self.learner.cross_entropy(logits, labels) for labels in (y, partner))
        return share * own + (1 - share) * other
