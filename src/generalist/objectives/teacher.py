"""A second network that an objective learns from: a run's, an earlier stage's, or another learner's."""

from __future__ import annotations

import copy
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from generalist.attacks.threats import widen
from generalist.objectives.base import LearnerView
from generalist.tensors.modes import computing_in

Source = Annotated[str, Field(min_length=1, max_length=1000)]
"""`SOURCE[#SUBJECT]`: the global learner, or the learner SUBJECT, of an earlier stage or of `RUN[@EPOCH]`; or `#NAME`:
another learner of the same run."""


def sources_of(source: str | None) -> list[str]:
    """Its entry in `Objective.sources`: the source, unless it is a learner of the same run."""
    return [source] if source is not None and not companions_of(source) else []


def companions_of(source: str | None) -> list[str]:
    """Its entry in `Objective.companions`: the name, if it is a learner of the same run."""
    return [source[1:]] if source is not None and source.startswith("#") else []


class Teacher:
    """A network of the learner's architecture, in evaluation mode; without a source it starts as the learner's copy."""

    def __init__(self, learner: LearnerView, source: str | None) -> None:
        self.learner, self.source = learner, source
        self.network = copy.deepcopy(learner.model).eval().requires_grad_(False)
        self.ready = torch.zeros((), dtype=torch.bool, device=next(learner.model.parameters()).device)

    @torch.no_grad()
    def epoch_start(self) -> None:
        """Load its weights: those of another learner of this run, which keep changing, in every epoch; others only
        once, in the first epoch, when earlier stages have run and the learner has its starting weights."""
        if companions_of(self.source) or not self.ready:
            source = self.source
            weights = None if source is None else self.learner.weights_of(source, field="teacher")
            self.network.load_state_dict(self.learner.model.state_dict() if weights is None else weights)
            self.ready.fill_(True)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Its outputs, in at least single precision."""
        with computing_in(self.learner.autocast, x.device):
            return widen(self.network(x))

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint must keep."""
        return {"ready": self.ready, **{f"teacher.{name}": t for name, t in self.network.state_dict().items()}}
