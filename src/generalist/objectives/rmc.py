"""Robust mode connectivity (Wang et al., 2023): a curve of networks between two that are robust in different norms."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from generalist.attacks.accuracy import logits_of
from generalist.attacks.pgd import pgd
from generalist.core import random
from generalist.data.sets import Batch, iterate
from generalist.objectives.base import (
    OBJECTIVES,
    Inputs,
    LearnerView,
    Metrics,
    ObjectiveChoice,
    ObjectiveOptions,
    Progress,
)
from generalist.objectives.distil import DistillationOptions
from generalist.objectives.msd import MsdOptions
from generalist.objectives.teacher import Source
from generalist.objectives.wrapper import Wrapper, WrapperOptions, innermost
from generalist.tensors.batchnorm import reestimate, tracked
from generalist.tensors.modes import computing_in
from generalist.tensors.state import under

CHUNK = 500
"""Images per pass when points of the curve are compared; BatchNorm's statistics are means over such passes."""


class RmcOptions(WrapperOptions):
    """Options of robust mode connectivity."""

    kind: str = "rmc"
    """The objective's name."""

    ends: list[Source] = Field(min_length=2, max_length=2)
    """The networks at t = 0 and t = 1, as `SOURCE[#SUBJECT]`: the global learner, or the learner SUBJECT, of an earlier
    stage or of `RUN[@EPOCH]`. They do not change."""

    around: ObjectiveChoice = MsdOptions()
    """The objective at each point of the curve."""

    @field_validator("around")
    @classmethod
    def _teacher_of_its_own(cls, around: ObjectiveOptions) -> ObjectiveOptions:
        inside = innermost(around)
        if isinstance(inside, DistillationOptions) and inside.teacher is None:
            raise ValueError(f"{inside.kind!r} would average points of the curve; give it a teacher")
        return around

    points: int = Field(default=11, ge=2, le=1001)
    """How many values of t, evenly spaced from 0 to 1, are compared on the validation images before each validation.
    Each costs an attack on them in every norm."""

    statistics: int = Field(default=2000, ge=1, le=2**31)
    """Number of training images on which BatchNorm's statistics at such a point are estimated."""


@OBJECTIVES.register("rmc")
class RobustModeConnectivity(Wrapper):
    """Minimises the expectation over t ~ U(0, 1), drawn once per batch, of another objective (`around`, attack and
    loss) at the weights w(t) of a quadratic Bezier curve with fixed ends (Wang et al., 2023).

    The learner's weights are the curve's point m = w(1/2), so that they always are a proper network; the control point
    is 2 m - (w(0) + w(1)) / 2, and w(t) = (1 - t)(1 - 2t) w(0) + 4t(1 - t) m + t(2t - 1) w(1). Training starts at the
    mean of the ends. The optimizer's weight decay acts on m. (The authors train the control point, with which the curve
    moves a quarter as far at the same learning rate, and put the penalty on w(t).) BatchNorm's running statistics fit
    no single t, so the attack should use the batch's own (`attack: {batchnorm: train}`). Before each validation, of 11
    values of t the one with the highest accuracy on the validation images under the worst of all norms is chosen, with
    statistics of its own from 2000 training images; that network is validated and saved. If it is the only learner, it
    cannot be redistributed, which would move the curve to that point. Costs what `around` does (with msd about twice
    AT), in addition to the two ends.
    """

    Options: ClassVar[type[ObjectiveOptions]] = RmcOptions

    def __init__(self, options: RmcOptions) -> None:
        super().__init__(options)
        self.points, self.statistics = options.points, options.statistics

    @classmethod
    def chooses_network(cls, options: ObjectiveOptions) -> bool:
        return True

    @classmethod
    def sources(cls, options: ObjectiveOptions) -> list[str]:
        assert isinstance(options, RmcOptions)
        return [*options.ends, *super().sources(options)]

    # -- the curve --------------------------------------------------------------------------------------------------

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.ends = [{name: torch.zeros_like(p) for name, p in learner.model.named_parameters()} for _ in range(2)]
        device = next(learner.model.parameters()).device
        self.ready = torch.zeros((), dtype=torch.bool, device=device)
        self.best = torch.full((), 0.5, dtype=torch.float64, device=device)

    @torch.no_grad()
    def epoch_start(self, epoch: int) -> None:
        if not self.ready:
            self._read_ends()
            self.ready.fill_(True)
        super().epoch_start(epoch)

    def _read_ends(self) -> None:
        """Fetch the two networks, and start at their mean."""
        assert isinstance(self.options, RmcOptions)
        states = [self.learner.weights_of(source, field="ends") for source in self.options.ends]
        for end, state in zip(self.ends, states, strict=True):
            for name, tensor in end.items():
                tensor.copy_(state[name])
        for name, tensor in self.learner.model.state_dict().items():
            if tensor.is_floating_point():
                first, last = (state[name].to(tensor.device, tensor.dtype) for state in states)
                tensor.copy_((first + last) / 2)

    def position(self, progress: Progress) -> Tensor:
        """The t of this iteration."""
        return random.uniform(self.learner.seed, f"curve/{self.learner.name}", progress.step)

    @contextmanager
    def at(self, t: Tensor, model: nn.Module) -> Iterator[None]:
        """Within this context the weights of `model` are w(t), computed from its own, which come back afterwards."""
        parameters = dict(model.named_parameters())
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(curve_point(self.ends[0][name], own[name], self.ends[1][name], t))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(own[name])

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        with self.at(self.position(progress), self.learner.model):
            return super().prepare(batch, progress)

    def gradients_of(self, inputs: Inputs, progress: Progress) -> tuple[list[Tensor], Metrics]:
        """The gradients with respect to the learner's weights: those at w(t), times dw(t)/dm."""
        t = self.position(progress)
        with self.at(t, self.learner.model):
            gradients, metrics = self.inner.gradients_of(inputs, progress)
        slopes = {g.dtype: 4 * t.to(g.dtype) * (1 - t.to(g.dtype)) for g in gradients}
        return [slopes[g.dtype] * g for g in gradients], {**metrics, "best_t": self.best.clone()}

    # -- the best point ---------------------------------------------------------------------------------------------

    def best_network(self) -> dict[str, Tensor] | None:
        if not self.ready:
            return None
        best, state = (-1.0, -1.0), None
        for t in torch.linspace(0, 1, self.points, dtype=torch.float64, device=self.best.device):
            model = self._network(t)
            if (found := self._accuracies(model)) > best:
                best, state = found, model.state_dict()
                self.best.copy_(t)
        return state

    def _network(self, t: Tensor) -> nn.Module:
        """A separate network at w(t), with BatchNorm statistics estimated for these weights."""
        model = copy.deepcopy(self.learner.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(curve_point(self.ends[0][name], parameter, self.ends[1][name], t))
        index = self.learner.index
        chosen = random.permutation(len(index), self.learner.seed, "curve/statistics")[: self.statistics]
        chunks = torch.split(index[chosen.to(index.device)], CHUNK)
        dtype = next(model.parameters()).dtype
        if tracked(model):
            with computing_in(self.learner.autocast, self.best.device):
                reestimate(model, (batch.x.to(dtype) for batch in iterate(self.learner.images, chunks)))
        return model.eval()

    def _accuracies(self, model: nn.Module) -> tuple[float, float]:
        """Accuracies on the validation images: under the worst of all threats, and natural."""
        assert self.learner.validation is not None, "training always validates"
        images, index = self.learner.validation
        own = [self.learner.threat] if self.learner.threat else []
        threats = [*own, *(threat.build() for threat in type(self).threats(self.options))]
        attack = self.learner.attack.model_copy(update={"batchnorm": "eval", "step": None})
        dtype = next(model.parameters()).dtype
        robust = natural = 0
        for batch in iterate(images, torch.split(index, CHUNK)):
            x, y = batch.x.to(dtype), batch.y
            with computing_in(self.learner.autocast, x.device):
                right = logits_of(model, x).argmax(1) == y
                natural += int(right.sum())
                for threat in threats:
                    keys = {"seed": self.learner.seed, "purpose": f"curve/{threat}", "index": batch.index}
                    attacked = pgd(model, x, y, threat=threat, options=attack, **keys)  # type: ignore[arg-type]
                    right &= logits_of(model, attacked).argmax(1) == y
            robust += int(right.sum())
        return robust / len(index), natural / len(index)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        ends = {f"end{i}.{name}": tensor for i, end in enumerate(self.ends) for name, tensor in end.items()}
        inner = {f"around.{name}": tensor for name, tensor in self.inner.state_dict().items()}
        return {"ready": self.ready, "best": self.best, **ends, **inner}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.inner.load_state_dict(under("around.", state))


def curve_point(first: Tensor, middle: Tensor, last: Tensor, t: Tensor) -> Tensor:
    """The quadratic curve through `first` at 0, `middle` at 1/2 and `last` at 1, at `t`."""
    t = t.to(first.dtype)
    return (1 - t) * (1 - 2 * t) * first + 4 * t * (1 - t) * middle + t * (2 * t - 1) * last
