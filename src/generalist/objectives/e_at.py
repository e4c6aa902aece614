"""Extreme-norm adversarial training (Croce and Hein, 2022)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from generalist.attacks.threats import ThreatOptions
from generalist.core import random
from generalist.data.sets import Batch
from generalist.objectives.base import OBJECTIVES, Inputs, LearnerView, Metrics, ObjectiveOptions, Progress, accuracy
from generalist.objectives.norms import L1, SeveralNorms, SeveralNormsOptions


class ExtremeOptions(SeveralNormsOptions):
    """Options of extreme-norm adversarial training."""

    kind: str = "e-at"
    """The objective's name."""

    beside: list[ThreatOptions] = Field(default=[L1], min_length=1, max_length=8)
    """Further threat models, in addition to the learner's own `threat`. The authors take the extreme norms linf and l1,
    whose balls together nearly contain the l2 ball between them; l2 itself is never trained on."""


@OBJECTIVES.register("e-at")
class ExtremeNorms(SeveralNorms):
    """Minimises CE(x'), x' from PGD in one of the norms: each batch draws one, with a weight of 1 minus the robust
    accuracy that training has seen in that norm (Croce and Hein, 2022).

    The norms are the learner's own and l1 12, or what `beside` says. The accuracies are those of the training passes,
    averaged over the batches of the previous epoch; they are read once per epoch, so that no iteration waits for the
    device. A norm without any batch keeps its last accuracy, and in the first epoch all norms are equally likely. The
    authors' code attacks by APGD and counts what resists it, over all batches since training began. Costs steps + 1
    forward and backward passes, as AT does.
    """

    Options: ClassVar[type[ObjectiveOptions]] = ExtremeOptions
    attacks_each = True

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.variants = tuple(str(threat) for threat, _ in self.norms)
        device = next(learner.model.parameters()).device
        self.accuracies = torch.zeros(len(self.norms), dtype=torch.float64, device=device)
        self.sums = torch.zeros(len(self.norms), 2, dtype=torch.float64, device=device)
        self._weights = self._read_weights()

    def _read_weights(self) -> list[float]:
        """Each norm's weight, on the host; all equal if nothing is misclassified in any norm."""
        weights: list[float] = (1 - self.accuracies).tolist()
        return weights if sum(weights) > 0 else [1.0] * len(weights)

    def epoch_start(self, epoch: int) -> None:
        correct, count = self.sums.unbind(1)
        self.accuracies.copy_(torch.where(count > 0, correct / count.clamp_min(1), self.accuracies))
        self.sums.zero_()
        self._weights = self._read_weights()

    def variant(self, step: int, epoch: int) -> str:
        draw = float(random.uniform(self.learner.seed, f"norm/{self.learner.name}", step)) * sum(self._weights)
        for name, weight in zip(self.variants, self._weights, strict=True):
            if draw < weight:
                return name
            draw -= weight
        return self.variants[self._weights.index(max(self._weights))]  # rounding has led past the last norm

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        threat, options = self.norms[self.variants.index(progress.variant)]
        attacked = self.learner.adversarial(batch, progress, threat=threat, options=options)
        return Inputs(batch, {"adversarial": attacked})

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        y = inputs.batch.y
        logits = self.learner.forward(inputs.made["adversarial"])
        right = accuracy(logits, y)["accuracy"]
        with torch.no_grad():
            own = self.sums[self.variants.index(progress.variant)]
            (seen,) = self.learner.means([right.double()])
            own.add_(torch.stack([seen, torch.ones_like(seen)]))
        return self.learner.cross_entropy(logits, y), {"accuracy": right, f"accuracy/{progress.variant}": right}

    def state_dict(self) -> dict[str, Tensor]:
        return {"accuracies": self.accuracies, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self._weights = self._read_weights()
