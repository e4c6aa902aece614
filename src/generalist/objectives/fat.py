"""Friendly adversarial training (Zhang et al., 2020)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor

from generalist.attacks.pgd import AttackOptions, BatchLoss, Classifier, Moves, borrowed, gradient_of
from generalist.attacks.threats import Threat, per_sample, perturb, widen
from generalist.core import random
from generalist.core.options import Number
from generalist.core.schedule import Schedule
from generalist.data.sets import Batch
from generalist.objectives.at import AdversarialTraining
from generalist.objectives.base import OBJECTIVES, Inputs, ObjectiveOptions, Progress
from generalist.tensors.modes import computing_in

# Epochs 50 and 90 of the authors' 120.
DEFAULT_TAU: dict[str, Any] = {"fractions": [0, "5/12", "5/12", 0.75, 0.75], "values": [0, 0, 1, 1, 2]}


class FATOptions(ObjectiveOptions):
    """Options of friendly adversarial training."""

    kind: str = "fat"
    """The objective's name."""

    tau: Schedule = Schedule.model_validate(DEFAULT_TAU)
    """How many more steps an image is attacked once it is misclassified, rounded down. Default: 0, then 1 from 5/12 and
    2 from 3/4 of training (epochs 50 and 90 of 120). A larger value is closer to AT."""

    noise: Number = Field(default=0.001, ge=0, le=1)
    """Standard deviation of the noise added in every step, in units of the pixel range."""

    @field_validator("tau")
    @classmethod
    def _no_fewer_than_none(cls, tau: Schedule) -> Schedule:
        if min(tau.values) < 0:
            raise ValueError(f"a negative number of steps ({min(tau.values):g}); make every value 0 or more")
        return tau


@OBJECTIVES.register("fat")
class FriendlyAdversarialTraining(AdversarialTraining):
    """Minimises CE(x'), x' from PGD that stops moving a sample once it has been found misclassified tau + 1 times
    (Zhang et al., 2020).

    tau = 0, 1, 2 in the three parts of training, and 0.001 N(0, 1) is added in each step. A sample that has stopped
    stays in the batch, behind a mask, so shapes do not depend on data. Costs steps + 1 forward and backward passes, as
    AT does.
    """

    Options: ClassVar[type[ObjectiveOptions]] = FATOptions

    def __init__(self, options: FATOptions) -> None:
        super().__init__(options)
        self.tau, self.noise = options.tau, options.noise

    def schedules(self) -> dict[str, Schedule]:
        return {"tau": self.tau}

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        learner = self.learner
        with computing_in(learner.autocast, batch.x.device):
            attacked = friendly_pgd(
                learner.under_attack(learner.attack),
                batch,
                threat=learner.within(learner.threat, progress),
                options=learner.attack,
                tau=progress.scalars["tau"],
                noise=self.noise,
                seed=learner.seed,
                purpose=f"attack/{learner.name}/{learner.threat}",
                step=progress.step,
                moves=learner.moves,
            )
        return Inputs(batch, {"adversarial": attacked})


def friendly_pgd(
    model: Classifier,
    batch: Batch,
    *,
    threat: Threat,
    options: AttackOptions,
    tau: Tensor,
    noise: float,
    seed: int,
    purpose: str,
    step: random.Key = 0,
    moves: Moves | None = None,
) -> Tensor:
    """PGD on cross-entropy that stops moving a sample once more than `tau` of its steps have found it misclassified.

    A step checks the image before it moves, so the image after the last step is never checked.
    """
    moves = moves or Moves()
    x, y, index = batch.x.detach(), batch.y, batch.index
    size = threat.default_step(options.steps) if options.step is None else options.step
    start = moves.start(threat, options.start, seed=seed, purpose=purpose, index=index, step=step, like=x)
    adversarial = perturb(x, threat.project(start))
    misses = torch.zeros_like(y)
    with borrowed(model, training=options.batchnorm == "train"):
        for number in range(options.steps):
            grad, wrong = gradient_and_misses(model, adversarial, y, moves.loss)
            misses = misses + wrong
            draw = random.normal(seed, f"{purpose}/noise/{number}", index, step, shape=x.shape[1:], device=x.device)
            moved = moves.ascend(x, adversarial + noise * draw.to(x.dtype), grad, threat, size)
            adversarial = torch.where(per_sample(misses <= tau, x), moved, adversarial)
    return adversarial


def gradient_and_misses(model: Classifier, x: Tensor, y: Tensor, loss: BatchLoss) -> tuple[Tensor, Tensor]:
    """The gradient of `loss` with respect to the images, and which of them are misclassified, from one forward pass."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        logits = widen(model(x))
        return gradient_of(loss(logits, y), x), logits.detach().argmax(1) != y
