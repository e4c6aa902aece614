"""What the objectives against several norms share: their options, their attacks, and the worst of several images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from generalist.attacks.pgd import AttackOptions, Classifier, borrowed
from generalist.attacks.threats import Threat, ThreatOptions, per_sample, widen
from generalist.core.errors import GeneralistError
from generalist.core.options import Positive
from generalist.data.sets import Batch
from generalist.objectives.base import LearnerView, Objective, ObjectiveOptions, Progress
from generalist.tensors.modes import computing_in

L2 = ThreatOptions(norm="l2", eps=128 / 255)
L1 = ThreatOptions(norm="l1", eps=12.0)


class SeveralNormsOptions(ObjectiveOptions):
    """Options of an objective against the learner's own threat and others."""

    beside: list[ThreatOptions] = Field(default=[L2], min_length=1, max_length=8)
    """Further threat models, in addition to the learner's own `threat`, which comes first. Each costs as many passes as
    the learner's own attack."""

    step: dict[Literal["linf", "l2", "l1"], Positive] = Field(default_factory=dict)
    """Step size of the attack by norm, for pixels in [0, 1], e.g. `{l1: 1}`. Default: `attack.step` for the learner's
    own threat, and the usual step of every other threat (a quarter of eps in linf and l2)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.beside)) != len(self.beside):
            raise ValueError("beside: a threat is named twice; name each once")
        return self


class SeveralNorms(Objective):
    """Base class. `norms` holds each threat with the options of its attack, the learner's own first."""

    Options: ClassVar[type[ObjectiveOptions]] = SeveralNormsOptions

    def __init__(self, options: SeveralNormsOptions) -> None:
        super().__init__(options)
        self.beside, self.step = options.beside, options.step
        self.norms: list[tuple[Threat, AttackOptions]] = []

    @classmethod
    def threats(cls, options: ObjectiveOptions) -> list[ThreatOptions]:
        assert isinstance(options, SeveralNormsOptions)
        return options.beside

    @classmethod
    def attack_on(cls, options: ObjectiveOptions, threat: Threat, attack: AttackOptions, *, own: bool) -> AttackOptions:
        """The learner's attack, with the step of this norm."""
        assert isinstance(options, SeveralNormsOptions)
        size = {str(norm): size for norm, size in options.step.items()}.get(threat.name, attack.step if own else None)
        return attack.model_copy(update={"step": size})

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        assert learner.threat is not None, "the recipe's check lets no adversarial objective pass without a threat"
        others = [threat.build() for threat in self.beside]
        if learner.threat in others:
            raise GeneralistError(
                f"learner {learner.name!r}: {learner.threat} is its own threat already; take it out of "
                "objective.beside, or name another"
            )
        names = [threat.name for threat in (learner.threat, *others)]
        if unused := [norm for norm in self.step if norm not in names]:
            raise GeneralistError(
                f"learner {learner.name!r}: objective.step names {unused[0]}, but its norms are {', '.join(names)}; "
                "take it out"
            )
        self.norms = [
            (threat, self.attack_on(self.options, threat, learner.attack, own=i == 0))
            for i, threat in enumerate([learner.threat, *others])
        ]

    def attacked(self, batch: Batch, progress: Progress) -> list[Tensor]:
        """The batch's images under each norm's own PGD."""
        return [
            self.learner.adversarial(batch, progress, threat=threat, options=options) for threat, options in self.norms
        ]

    def worst(self, candidates: Sequence[Tensor], y: Tensor) -> Tensor:
        """For each image the candidate with the highest cross-entropy, in the attack's BatchNorm mode."""
        attack = self.learner.attack
        model = self.learner.under_attack(attack)
        with computing_in(self.learner.autocast, y.device), borrowed(model, training=attack.batchnorm == "train"):
            losses = [each_loss(model, images, y) for images in candidates]
        return highest(candidates, losses)[0]


@torch.no_grad()
def each_loss(model: Classifier, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of every image, [B], without gradient."""
    return F.cross_entropy(widen(model(x)), y, reduction="none")


def highest(candidates: Sequence[Tensor], losses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """For each sample the candidate with the highest loss, and that loss; in a tie, the earlier one."""
    images, top = candidates[0], losses[0]
    for candidate, loss in zip(candidates[1:], losses[1:], strict=True):
        higher = loss > top
        images = torch.where(per_sample(higher, images), candidate, images)
        top = torch.where(higher, loss, top)
    return images, top
