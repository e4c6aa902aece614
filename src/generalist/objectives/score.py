"""SCORE (Pang et al., 2022): squared errors of probabilities instead of cross-entropy and divergence."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from generalist.attacks.pgd import Start
from generalist.core.options import Fraction, Number
from generalist.data.sets import Batch
from generalist.objectives.base import (
    OBJECTIVES,
    Inputs,
    LearnerView,
    Metrics,
    Objective,
    ObjectiveOptions,
    Progress,
    accuracy,
)
from generalist.tensors.modes import frozen

CLIPS = {"at": 0.4, "trades": 0.3}


class ScoreOptions(ObjectiveOptions):
    """Options of SCORE."""

    kind: str = "score"
    """The objective's name."""

    form: Literal["at", "trades"] = "trades"
    """`at`: the error of the adversarial image. `trades`: the error of the natural image, and the distance between
    the two predictions."""

    weight: Annotated[Number, Field(ge=0)] | None = None
    """Weight of the distance, the method's lambda, 6 by default; form `trades` alone. Larger is more robust and less
    accurate."""

    clip: Fraction | None = None
    """Probability mass on wrong classes up to which a sample does not count: its error must exceed that of a prediction
    with 1 - clip on the label. Default: the authors' 0.4 (`at`) or 0.3 (`trades`); 0 clips nothing."""

    @model_validator(mode="after")
    def _no_idle_weight(self) -> Self:
        if self.form == "at" and self.weight is not None:
            raise ValueError("weight: form `at` has no distance to weigh; leave it out, or use form `trades`")
        return self


@OBJECTIVES.register("score")
class Score(Objective):
    """Minimises relu(|p(x') - y|^2 - bound) (form `at`, clip 0.4), or relu(|p(x) - y|^2 + lambda |p(x') - p(x)|^2 -
    bound) (form `trades`, lambda 6, clip 0.3), y one-hot (Pang et al., 2022).

    The bound is the squared distance between a one-hot vector and one with 1 - clip on the label and clip spread evenly
    over the rest. x' maximises |p(x') - y|^2, or |p(x') - p(x)|^2, which has no gradient at x: form `trades` needs a
    random start, in the authors' code x + 0.001 N(0, 1), as here (form `at`: uniform). For form `at` the authors' code
    attacks in training mode, which also moves BatchNorm's statistics; here the mode is `attack.batchnorm`. The
    learner's label smoothing acts on y. Costs steps + 1 forward and backward passes, as AT does (`at`), or one more
    and a forward pass (`trades`).
    """

    Options: ClassVar[type[ObjectiveOptions]] = ScoreOptions
    attacks_each = True

    @classmethod
    def usual_start(cls, options: ObjectiveOptions) -> Start:
        assert isinstance(options, ScoreOptions)
        return "gaussian" if options.form == "trades" else "uniform"

    def __init__(self, options: ScoreOptions) -> None:
        super().__init__(options)
        self.form, self.weight = options.form, 6.0 if options.weight is None else options.weight
        self.clip = CLIPS[options.form] if options.clip is None else options.clip

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        if self.form == "trades":
            learner.require_random_start()

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        target = self._target(batch)
        attacked = self.learner.adversarial(
            batch, progress, loss=lambda logits, _: squared_distance(logits.softmax(1), target).sum()
        )
        return Inputs(batch, {"adversarial": attacked})

    def _target(self, batch: Batch) -> Tensor:
        """What the attack moves the prediction away from."""
        if self.form == "at":
            return one_hot(batch.y, len(self.learner.images.classes)).to(batch.x.dtype)
        with torch.no_grad(), frozen(self.learner.model, training=self.learner.attack.batchnorm == "train"):
            return self.learner.forward(batch.x).softmax(1)

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        batch = inputs.batch
        logits = self.learner.forward(inputs.made["adversarial"])
        robust = logits.softmax(1)
        y = smoothed_one_hot(batch.y, robust, self.learner.label_smoothing)
        if self.form == "at":
            error = squared_distance(robust, y)
        else:
            natural = self.learner.forward(batch.x).softmax(1)
            error = squared_distance(natural, y) + self.weight * squared_distance(robust, natural)
        bound = error_bound(self.clip, robust.shape[1])
        metrics = {"clipped": (error.detach() <= bound).float().mean(), **accuracy(logits, batch.y)}
        return F.relu(error - bound).mean(), metrics


def squared_distance(p: Tensor, q: Tensor) -> Tensor:
    """|p - q|^2 for each sample, [B]."""
    return (p - q).square().sum(1)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Whether each class is the label, [B, K]. torch's own looks at the labels, which may wait for the device."""
    return torch.arange(classes, device=y.device) == y.unsqueeze(1)


def smoothed_one_hot(y: Tensor, like: Tensor, smoothing: float) -> Tensor:
    """One-hot targets of the shape and type of `like`, smoothed as cross-entropy does it."""
    classes = like.shape[1]
    return one_hot(y, classes).to(like.dtype) * (1 - smoothing) + smoothing / classes


def error_bound(clip: float, classes: int) -> float:
    """Squared distance of a one-hot vector from one with 1 - clip on the label and clip / (classes - 1) elsewhere."""
    return clip**2 + clip**2 / (classes - 1) if classes > 1 else 0.0
