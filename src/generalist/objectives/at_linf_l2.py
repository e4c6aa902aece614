"""Adversarial training on the average over several norms."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from generalist.data.sets import Batch
from generalist.objectives.base import OBJECTIVES, Inputs, Metrics, ObjectiveOptions, Progress, accuracy
from generalist.objectives.norms import SeveralNorms, SeveralNormsOptions


class AverageOptions(SeveralNormsOptions):
    """Options of training on the average over norms."""

    kind: str = "at-linf-l2"
    """The objective's name."""


@OBJECTIVES.register("at-linf-l2")
class AverageOfNorms(SeveralNorms):
    """Minimises the mean of CE(x'_p) over the norms p, x'_p from PGD in each (Tramer and Boneh, 2019, average).

    The norms are the learner's own and l2 128/255, or what `beside` says. The batch of each norm is forwarded
    separately, with its own BatchNorm statistics. With n norms it costs n (steps + 1) forward and backward passes: n
    times AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = AverageOptions

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        images = self.attacked(batch, progress)
        return Inputs(batch, {str(threat): x for (threat, _), x in zip(self.norms, images, strict=True)})

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        losses, metrics = [], {}
        for name, images in inputs.made.items():
            logits = self.learner.forward(images)
            losses.append(self.learner.cross_entropy(logits, inputs.batch.y))
            metrics[f"accuracy/{name}"] = accuracy(logits, inputs.batch.y)["accuracy"]
        return torch.stack(losses).mean(), metrics
