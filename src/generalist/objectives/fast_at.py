"""Fast adversarial training (Wong et al., 2020)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from generalist.attacks.pgd import AttackOptions
from generalist.attacks.threats import Threat
from generalist.core.options import Number
from generalist.data.sets import Batch
from generalist.objectives.at import AdversarialTraining
from generalist.objectives.base import OBJECTIVES, Inputs, LearnerView, ObjectiveOptions, Progress


class FastATOptions(ObjectiveOptions):
    """Options of fast adversarial training."""

    kind: str = "fast-at"
    """The objective's name."""

    alpha: Number = Field(default=1.25, gt=0, le=100)
    """Length of the only step, in units of the threat's eps. Much above 1.25, or in long training, robustness to
    stronger attacks can be lost within an epoch (catastrophic overfitting)."""


@OBJECTIVES.register("fast-at")
class FastAdversarialTraining(AdversarialTraining):
    """Minimises CE(x'), x' one steepest step of 1.25 eps from a uniform start in the ball (Wong et al., 2020).

    It uses only `batchnorm` and `scale` of the learner's `attack`. The authors' short training (15 epochs) with a
    learning rate that rises and falls is up to the recipe's `schedule`. Costs 2 forward and backward passes, a fifth of
    AT with 10 steps.
    """

    Options: ClassVar[type[ObjectiveOptions]] = FastATOptions

    @classmethod
    def attack_on(cls, options: ObjectiveOptions, threat: Threat, attack: AttackOptions, *, own: bool) -> AttackOptions:
        assert isinstance(options, FastATOptions)
        step = {"steps": 1, "step": options.alpha * threat.eps, "start": "uniform"}
        return attack.model_copy(update=step)

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        assert learner.threat is not None, "the recipe's check lets no adversarial objective pass without a threat"
        self.attack = self.attack_on(self.options, learner.threat, learner.attack, own=True)

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        return Inputs(batch, {"adversarial": self.learner.adversarial(batch, progress, options=self.attack)})
