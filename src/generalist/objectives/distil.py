"""Training on a teacher's outputs: soft targets are harder to memorise than labels."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import field_validator, model_validator
from torch import Tensor

from generalist.core.options import Decay, Positive
from generalist.core.schedule import Schedule
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
from generalist.objectives.teacher import Source, Teacher, companions_of, sources_of
from generalist.tensors.averages import warm_decay


class DistillationOptions(ObjectiveOptions):
    """Options of training on a teacher's outputs."""

    teacher: Source | None = None
    """The teacher, as `SOURCE[#SUBJECT]`: the global learner, or the learner SUBJECT, of an earlier stage or of
    `RUN[@EPOCH]`; it does not change. `#NAME`: another learner of this run, as it is at the start of each epoch;
    `#NAME.average`: the average of its weights (`learners.NAME.averaging`), which is steadier. Default: an average of
    the learner's own weights, which starts anew when the learner is redistributed."""

    weight: Schedule = Schedule.model_validate(0.5)
    """Share of the teacher in the loss, from 0 to 1; the label has the rest. A schedule can wait until there is
    something to learn from the teacher."""

    match: Literal["probabilities", "logits"] = "probabilities"
    """What should match the teacher's: probabilities, by cross-entropy, or logits, by the mean squared difference.
    Logits also tell by how much a class leads, which limits the learner's own margins (Cui et al., 2021)."""

    temperature: Positive = 1.0
    """The teacher's logits are divided by it before they become probabilities: above 1 these are softer."""

    decay: Decay = 0.999
    """Share of the old average kept at each iteration, if the teacher is an average; less in the first iterations."""

    @field_validator("weight")
    @classmethod
    def _is_a_share(cls, weight: Schedule) -> Schedule:
        if not all(0 <= value <= 1 for value in weight.values):
            raise ValueError("its values are shares of the loss: from 0 to 1")
        return weight

    @model_validator(mode="after")
    def _nothing_idle(self) -> Self:
        if self.match == "logits" and self.temperature != 1:
            raise ValueError("temperature: logits are matched as they are; leave it out, or match probabilities")
        if self.teacher is not None and self.decay != 0.999:
            raise ValueError("decay: only an average of the learner's own weights has one; leave it out with a teacher")
        return self


class AdversarialDistillationOptions(DistillationOptions):
    """Options of training on a teacher's outputs under attack."""

    attack_from: Literal["label", "teacher"] = "label"
    """What the attack moves away from: the label, by cross-entropy, or the teacher's output, by the same distance as in
    the loss (Zi et al., 2021). The latter attacks what the loss asks for, even where the teacher is wrong."""


class Distilled(Objective):
    """Base class: holds the teacher, and compares with it."""

    Options: ClassVar[type[ObjectiveOptions]] = DistillationOptions

    def __init__(self, options: DistillationOptions) -> None:
        super().__init__(options)
        self.source, self.decay = options.teacher, options.decay
        self.weight, self.temperature, self.match = options.weight, options.temperature, options.match

    @classmethod
    def sources(cls, options: ObjectiveOptions) -> list[str]:
        assert isinstance(options, DistillationOptions)
        return sources_of(options.teacher)

    @classmethod
    def companions(cls, options: ObjectiveOptions) -> list[str]:
        assert isinstance(options, DistillationOptions)
        return companions_of(options.teacher)

    def schedules(self) -> dict[str, Schedule]:
        return {"weight": self.weight}

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.teacher = Teacher(learner, self.source)

    def epoch_start(self, epoch: int) -> None:
        self.teacher.epoch_start()

    def redistributed(self, *, reset: bool) -> None:
        if self.source is None:
            self.teacher.network.load_state_dict(self.learner.model.state_dict())

    @torch.no_grad()
    def answers(self, batch: Batch, progress: Progress) -> Tensor:
        """The teacher's outputs for the natural images; if it is the learner's average, that is updated first."""
        if self.source is None:
            self._follow(progress)
        logits = self.teacher.logits(batch.x)
        return logits if self.match == "logits" else F.softmax(logits / self.temperature, 1)

    def _follow(self, progress: Progress) -> None:
        own = self.learner.model.state_dict()
        pairs = [(old, own[name]) for name, old in self.teacher.network.state_dict().items() if old.is_floating_point()]
        olds, currents = [old for old, _ in pairs], [current for _, current in pairs]
        share = 1 - warm_decay(progress.step.double(), self.decay, warmup=True)
        moves = torch._foreach_sub(currents, olds)
        torch._foreach_mul_(moves, share.to(olds[0].dtype))
        torch._foreach_add_(olds, moves)

    def distance(self, logits: Tensor, answers: Tensor) -> Tensor:
        """The distance of logits from the teacher's outputs, averaged over the batch."""
        like = F.mse_loss if self.match == "logits" else F.cross_entropy
        return like(logits, answers.to(logits.dtype))

    def taught(self, logits: Tensor, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        """The losses against label and teacher, each weighted by its share."""
        weight = progress.scalars["weight"].to(logits.dtype)
        labelled = self.learner.cross_entropy(logits, inputs.batch.y)
        copied = self.distance(logits, inputs.made["answers"])
        metrics = {"label_loss": labelled.detach(), **accuracy(logits, inputs.batch.y)}
        return (1 - weight) * labelled + weight * copied, metrics

    def state_dict(self) -> dict[str, Tensor]:
        return self.teacher.state_dict()


@OBJECTIVES.register("nt-distil")
class NaturalDistillation(Distilled):
    """Minimises (1 - weight) CE(x) + weight CE(p(x), teacher's p(x)), weight = 0.5 (Hinton et al., 2015, without its
    scaling), or with `match: logits` the mean of (z(x) - teacher's z(x))^2 in place of the second.

    The teacher is an average of the learner's own weights (decay 0.999), or what `teacher` says. Costs a forward and a
    backward pass, and a forward pass of the teacher: about a sixth of AT with 10 steps.
    """

    adversarial = False

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        return Inputs(batch, {"answers": self.answers(batch, progress)})

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        return self.taught(self.learner.forward(inputs.batch.x), inputs, progress)


@OBJECTIVES.register("at-distil")
class AdversarialDistillation(Distilled):
    """Minimises (1 - weight) CE(x') + weight CE(p(x'), teacher's p(x)), weight = 0.5; with `match: logits` the mean of
    (z(x') - teacher's z(x))^2 in place of the second. x' is from PGD on CE with the label, or on the teacher's part of
    the loss (`attack_from: teacher`).

    The teacher sees the natural images (Goldblum et al., 2020). With the learner's own average as the teacher (decay
    0.999) it works against robust over-fitting. With logits, weight 1 and a natural learner of the same run as the
    teacher it is learnable boundary guidance (Cui et al., 2021, "Learnable boundary guided adversarial training",
    without the TRADES term), where the teacher is at most an epoch old.

    Costs steps + 1 forward and backward passes, as AT, and a forward pass of the teacher.
    """

    Options: ClassVar[type[ObjectiveOptions]] = AdversarialDistillationOptions
    attacks_each = True

    def __init__(self, options: AdversarialDistillationOptions) -> None:
        super().__init__(options)
        self.from_teacher = options.attack_from == "teacher"

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        if self.from_teacher and self.source is None:  # at first the learner is its own teacher
            learner.require_random_start()

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        answers = self.answers(batch, progress)
        # A sum over the batch, as an attack's losses are: each image's gradient is its own.
        away = (lambda logits, _: len(logits) * self.distance(logits, answers)) if self.from_teacher else None
        return Inputs(batch, {"adversarial": self.learner.adversarial(batch, progress, loss=away), "answers": answers})

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        return self.taught(self.learner.forward(inputs.made["adversarial"]), inputs, progress)
