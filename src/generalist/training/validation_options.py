"""The options of validation: what is measured during training, and which epoch is kept as the best."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from generalist.attacks.threats import ThreatOptions
from generalist.core.options import Fraction, Options, Positive
from generalist.core.schedule import whole_epochs


class ValidationOptions(Options):
    """What is measured during training, on which images, and which epoch's model is kept as the best."""

    split: Literal["held-out", "test"] = "held-out"
    """`held-out`: class-balanced images taken out of the training set. `test`: the papers' selection on the test set,
    for faithful reproduction only; every output says so."""

    images: int = Field(default=1000, ge=1, le=2**31)
    """How many are held out (or used of the test set)."""

    every: int = Field(default=5, ge=1, le=1_000_000)
    """Epochs between validations; the last epoch is always validated."""

    threats: list[ThreatOptions] | None = None
    """Threat models of the PGD accuracy; default: those of the learners."""

    steps: int = Field(default=20, ge=1, le=100_000)
    """Steps of that PGD. The published code ignores the asked number and always runs 10."""

    step: dict[Literal["linf", "l2", "l1"], Positive] = Field(default_factory=dict)
    """Its step size by norm, e.g. `{linf: 2/255}`; default: the threat's own, eps/4 in linf and l2."""

    rule: Literal["sum", "natural", "robust", "last"] = "sum"
    """The best epoch has the highest natural + mean PGD accuracy of the global learner (`sum`), or of one of the two,
    or is the `last`."""

    min_natural: Fraction = 0.0
    """Only epochs with at least this natural accuracy can be the best. If none (from `start` on) has it, the one that
    comes closest is kept, and every output says so. Published code: 0.88."""

    start: Fraction = 0.0
    """Fraction of training before which no epoch can be the best; until then the newest one is kept. For recipes whose
    learners are mixed only late in training."""

    batch_size: int = Field(default=500, ge=1, le=1_000_000)
    """Images per validation batch; affects only speed and memory."""

    def first_epoch(self, epochs: int) -> int:
        """The first epoch that can be the best."""
        return whole_epochs(self.start * epochs)
