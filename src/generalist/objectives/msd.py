"""Multi steepest descent (Maini, Wong and Kolter, 2020)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from generalist.attacks.pgd import Start, borrowed, input_gradient
from generalist.attacks.threats import perturb
from generalist.data.sets import Batch
from generalist.objectives.at_max import WorstOfNorms
from generalist.objectives.base import OBJECTIVES, Inputs, ObjectiveOptions, Progress
from generalist.objectives.norms import SeveralNormsOptions, each_loss, highest
from generalist.tensors.modes import computing_in


class MsdOptions(SeveralNormsOptions):
    """Options of multi steepest descent."""

    kind: str = "msd"
    """The objective's name."""


@OBJECTIVES.register("msd")
class MultiSteepestDescent(WorstOfNorms):
    """Minimises CE(x'), x' from one attack on the union of the norms' balls (Maini, Wong and Kolter, 2020).

    The norms are the learner's own and l2 128/255, or what `beside` says. From the current perturbation, every step
    tries the steepest step of each norm, projected onto that norm's ball, and continues, example by example, from the
    one with the highest cross-entropy. The best image seen, including the start, is trained on. It starts at the image
    itself. The authors take 50 steps of eps / 10. With n norms it costs steps + 1 forward and backward passes and n
    steps + 1 forward passes: about (n + 2) / 2 times AT, as a step of AT is two passes, forward and back to the image.
    """

    Options: ClassVar[type[ObjectiveOptions]] = MsdOptions

    @classmethod
    def usual_start(cls, options: ObjectiveOptions) -> Start:
        return "none"

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        with computing_in(self.learner.autocast, batch.x.device):
            return Inputs(batch, {"adversarial": self._descend(batch, progress)})

    def _descend(self, batch: Batch, progress: Progress) -> Tensor:
        learner, y, x = self.learner, batch.y, batch.x.detach()
        attack, moves, model = learner.attack, learner.moves, learner.under_attack(learner.attack)
        threats = [learner.within(threat, progress) for threat, _ in self.norms]
        start = moves.start(
            threats[0],
            attack.start,
            seed=learner.seed,
            purpose=f"attack/{learner.name}/msd",
            index=batch.index,
            step=progress.step,
            like=x,
        )
        sizes = [o.step if o.step is not None else threat.default_step(o.steps) for threat, o in self.norms]
        current = perturb(x, threats[0].project(start))
        with borrowed(model, training=attack.batchnorm == "train"):
            best, top = current, each_loss(model, current, y)
            for _ in range(attack.steps):
                grad = input_gradient(model, current, y, moves.loss)
                steps = [
                    moves.ascend(x, current, grad, threat, size) for threat, size in zip(threats, sizes, strict=True)
                ]
                current, loss = highest(steps, [each_loss(model, images, y) for images in steps])
                best, top = highest([best, current], [top, loss])
        return best
