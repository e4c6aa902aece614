"""Helper-based adversarial training (Rade and Moosavi-Dezfooli, 2022), around an objective that attacks images."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from generalist.core.options import Number
from generalist.data.sets import Batch
from generalist.objectives.base import (
    OBJECTIVES,
    Inputs,
    LearnerView,
    Metrics,
    ObjectiveChoice,
    ObjectiveOptions,
    Progress,
    class_of,
    gradients_with,
)
from generalist.objectives.teacher import Source, Teacher, companions_of, sources_of
from generalist.objectives.trades import TradesOptions
from generalist.objectives.wrapper import Wrapper, WrapperOptions, innermost
from generalist.tensors.modes import restored
from generalist.tensors.state import under


class HatOptions(WrapperOptions):
    """Options of helper-based adversarial training."""

    kind: str = "hat"
    """The objective's name."""

    teacher: Source
    """The network that labels attacked images, and was trained on natural ones, as `SOURCE[#SUBJECT]`: the global
    learner, or the learner SUBJECT, of an earlier stage or of `RUN[@EPOCH]`. `#NAME`: another learner of this run, as
    it is at the start of each epoch; `#NAME.average`: the average of its weights."""

    around: ObjectiveChoice = TradesOptions(beta=2.5)
    """The objective that attacks the images and learns from them."""

    weight: Number = Field(default=0.5, ge=0)
    """Weight of the helper images' cross-entropy, the authors' gamma."""

    reach: Number = Field(default=2.0, gt=1)
    """The distance of a helper image from the natural one, in units of the perturbation: the authors' h."""

    @field_validator("around")
    @classmethod
    def _attacks_images(cls, around: ObjectiveOptions) -> ObjectiveOptions:
        if class_of(around).chooses_network(around):
            raise ValueError(f"{around.kind!r} moves the weights for its loss alone: put 'hat' inside of it")
        inside = innermost(around)
        if not class_of(inside).attacks_each:
            raise ValueError(f"{inside.kind!r} does not attack each image once; use trades, at, mart or the like")
        return around


@OBJECTIVES.register("hat")
class HelperBasedTraining(Wrapper):
    """Minimises L + weight CE(x + 2 (x' - x)) against the class that a teacher sees in x', weight = 0.5; L and x' are
    those of the objective that it wraps, TRADES with beta 2.5 (Rade and Moosavi-Dezfooli, 2022).

    Twice as far out as the attack goes, an image may look like another class to a network that is not robust; training
    on that class keeps the margin from growing beyond what eps requires. The teacher should be trained on natural
    images; a natural learner of the same run will do. Helper images may leave [0, 1], as the authors' do, but leave no
    trace in BatchNorm's running statistics, unlike theirs. Within `awp` their gradient is taken at the perturbed
    weights; around it, at the unperturbed ones. Costs what it wraps, a forward and a backward pass, and a forward pass
    of the teacher: around TRADES with 10 steps a third more than AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = HatOptions

    def __init__(self, options: HatOptions) -> None:
        super().__init__(options)
        self.source, self.weight, self.reach = options.teacher, options.weight, options.reach

    @classmethod
    def sources(cls, options: ObjectiveOptions) -> list[str]:
        assert isinstance(options, HatOptions)
        return [*sources_of(options.teacher), *super().sources(options)]

    @classmethod
    def companions(cls, options: ObjectiveOptions) -> list[str]:
        assert isinstance(options, HatOptions)
        return [*companions_of(options.teacher), *super().companions(options)]

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.teacher = Teacher(learner, self.source)

    def epoch_start(self, epoch: int) -> None:
        self.teacher.epoch_start()
        super().epoch_start(epoch)

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        made = super().prepare(batch, progress).made
        attacked = made["adversarial"]
        helper = batch.x + self.reach * (attacked - batch.x)
        return Inputs(batch, {**made, "helper": helper, "helper_label": self.teacher.logits(attacked).argmax(1)})

    def gradients_of(self, inputs: Inputs, progress: Progress) -> tuple[list[Tensor], Metrics]:
        gradients, metrics = self.inner.gradients_of(inputs, progress)
        model = self.learner.model
        with restored(model.buffers()):
            logits = self.learner.forward(inputs.made["helper"])
            loss = F.cross_entropy(logits, inputs.made["helper_label"])
            helped = torch._foreach_add(gradients, gradients_with(self.weight * loss, model))
        loss = loss.detach()
        return list(helped), {**metrics, "loss": metrics["loss"] + self.weight * loss, "helper_loss": loss}

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.teacher.state_dict(), **{f"around.{name}": t for name, t in self.inner.state_dict().items()}}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.inner.load_state_dict(under("around.", state))
