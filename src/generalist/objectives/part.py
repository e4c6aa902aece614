"""Pixel-reweighted adversarial training, PART (Zhang et al., 2024)."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from generalist.attacks.threats import Reweighted
from generalist.core.errors import GeneralistError
from generalist.core.options import Fraction, Number, Positive, format_number
from generalist.data.augment import crop_and_flip
from generalist.data.sets import Batch
from generalist.models.activation_maps import class_activation_maps
from generalist.objectives.at import AdversarialTraining
from generalist.objectives.base import OBJECTIVES, Inputs, LearnerView, ObjectiveOptions, Progress
from generalist.tensors.modes import computing_in

CHUNK = 500
"""Images per pass when maps are made; affects only memory."""


class PartOptions(ObjectiveOptions):
    """Options of PART."""

    kind: str = "part"
    """The objective's name."""

    rest: Positive | None = None
    """The eps of pixels that matter less, for pixels in [0, 1]; at most the eps of the learner's threat, which the
    other pixels keep. Default: seven eighths of that, like the authors' 7/255 and 8/255."""

    threshold: Number = Field(1.0, ge=0)
    """A pixel matters where its class-activation map is at least this many times the map's mean. A larger threshold
    leaves fewer of them."""

    warmup: Fraction = 1 / 6
    """Fraction of training, rounded to whole epochs (20 of 120), that is plain adversarial training: the maps of an
    untrained network are meaningless."""


@OBJECTIVES.register("part")
class PixelReweighted(AdversarialTraining):
    """Minimises CE(x'), x' from PGD in which pixels that matter for the class may move by eps and the others only by
    `rest`, by default 7/8 eps (Zhang et al., 2024).

    At the start of every epoch after the warm-up (a sixth of training) each training image gets a mask: the pixels at
    which the class-activation map of its label is at least `threshold` = 1 times the map's mean (the authors' code: the
    map of the predicted class, and another rule). Masks are kept by sample index, and cropped and flipped with the
    images of a batch (padding counts as not mattering). Extra images (`data.extra`) and images without evidence for
    their label keep the full eps. The data must lie in memory. Costs steps + 1 forward and backward passes, as AT does,
    and one more for the maps.
    """

    Options: ClassVar[type[ObjectiveOptions]] = PartOptions

    def __init__(self, options: PartOptions) -> None:
        super().__init__(options)
        self.threshold, self.share = options.threshold, options.warmup

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        assert learner.threat is not None, "the recipe's check lets no adversarial objective pass without a threat"
        assert isinstance(self.options, PartOptions)
        self.rest = 7 / 8 * learner.threat.eps if self.options.rest is None else self.options.rest
        if self.rest > learner.threat.eps:
            raise GeneralistError(
                f"learner {learner.name!r}: objective.rest, {format_number(self.rest)}, is more than the eps of "
                f"{learner.threat}; lower it"
            )
        if not learner.images.resident:
            raise GeneralistError(
                f"learner {learner.name!r}: part keeps a mask for each image and follows its crop, which streamed "
                "images do not allow; set data.resident to true"
            )
        self.threat = learner.threat
        self.warmup = learner.epochs_of(self.share)
        device = next(learner.model.parameters()).device
        self._maps(learner.images.batch(learner.index[:1]))  # a network that has none is refused before it trains
        self.masks = torch.ones(len(learner.images), 1, *learner.images.shape[1:], dtype=torch.bool, device=device)

    def epoch_start(self, epoch: int) -> None:
        if epoch <= self.warmup:
            return
        for index in torch.split(self.learner.index, CHUNK):
            batch = self.learner.images.batch(index)
            maps = self._maps(batch)
            self.masks[batch.index] = maps >= self.threshold * maps.mean((2, 3), keepdim=True)

    def _maps(self, batch: Batch) -> Tensor:
        model = self.learner.model
        with computing_in(self.learner.autocast, batch.x.device):
            return class_activation_maps(model, batch.x.to(next(model.parameters()).dtype), batch.y)

    def masks_of(self, batch: Batch) -> Tensor:
        """Which pixels of the batch's images, as they were augmented, keep the full eps: [B, 1, H, W]."""
        masks = self.masks[batch.index]
        return crop_and_flip(masks, batch.augmentation, padding=self.learner.padding) if batch.augmentation else masks

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        # During the warm-up padding, too, keeps the full eps: that is plain adversarial training.
        full = self.masks_of(batch) | (progress.epoch <= self.warmup)
        share = torch.where(full, batch.x.new_ones(()), self.rest / self.threat.eps)
        threat = Reweighted(self.threat.eps, inner=self.threat, share=share)
        return Inputs(batch, {"adversarial": self.learner.adversarial(batch, progress, threat=threat)})

    def state_dict(self) -> dict[str, Tensor]:
        return {"masks": self.masks}
