"""The options of mixing: how the global learner follows the learners, and when they restart from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator

from generalist.core.options import Fraction, Options
from generalist.core.schedule import DecaySchedule, Schedule, whole_epochs

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]

Source = Literal["raw", "averaged"]
"""What each learner contributes to the mix: its weights, or its own average of them."""

DEFAULT_GAMMA: dict[str, Any] = {"fractions": [0, "1/3", "2/3", 1], "values": [1, 1, 1, 0.4]}


class RedistributionOptions(Options):
    """When the learners restart from the global learner."""

    every: int | None = Field(default=None, ge=0, le=1_000_000)
    """Redistribute every this many epochs (the papers' c); 0: never. Default: a 24th of training, at least 1 and at
    most 5, which is the papers' 5 of 120 epochs; never for a single learner."""

    start: Fraction = 0.625
    """When redistribution begins, as a fraction of training (the papers' t': epoch 75 of 120)."""

    start_epoch: int | None = Field(default=None, ge=1, le=1_000_000)
    """The same as an epoch number, counted from 1; overrides `start`."""

    when: Literal["epoch-end", "every-iteration"] = "epoch-end"
    """`epoch-end`: once, at the end of epochs t' and later that are multiples of c, never after the last epoch.
    `every-iteration`: after each iteration of those epochs, the last one included, as the published code does."""

    reset: bool = True
    """Also reset the learners' momenta and averages, which belong to the weights that are replaced. Papers: silent;
    published code: keeps them."""

    batchnorm: Literal["global", "own"] = "global"
    """Which BatchNorm scales, shifts and statistics a learner continues with: the global learner's, like all other
    weights, or its own, which fit the images that this learner sees (after Li et al., 2021, "FedBN"). They are mixed
    either way."""

    def first_epoch(self, epochs: int) -> int:
        """t'."""
        return self.start_epoch if self.start_epoch is not None else max(1, whole_epochs(self.start * epochs))

    def interval(self, epochs: int) -> int:
        """c."""
        return self.every if self.every is not None else min(5, max(1, whole_epochs(5 * epochs / 120)))

    def due(self, epoch: int, epochs: int) -> bool:
        """Whether `epoch` (from 1) is one of those that redistribute."""
        every = self.interval(epochs)
        if every == 0 or epoch < self.first_epoch(epochs) or epoch % every != 0:
            return False
        return self.when == "every-iteration" or epoch < epochs

    def last_apart(self, epochs: int) -> int | None:
        """The last epoch at whose end no redistribution has happened yet; None if there is none in all of training."""
        every = self.interval(epochs)
        if every == 0:
            return None
        first = -(-self.first_epoch(epochs) // every) * every
        if first > epochs or not self.due(first, epochs):
            return None
        return first - 1 if self.when == "every-iteration" else first


class MixingOptions(Options):
    """The global learner: theta_g <- d theta_g + (1 - d) sum_a gamma_a source_a, after every iteration."""

    lead: Name | None = None
    """The learner that `gamma` belongs to (the papers' gamma_1); default: the first with an linf threat, else the
    first with any threat, else the first."""

    gamma: Schedule = Schedule.model_validate(DEFAULT_GAMMA)
    """Weight of the lead learner. Papers: 1, 1, 1, 0 at 0, 1/3, 2/3 and 1 of training; published code and ours: ends
    at 0.4. With one learner it is 1."""

    shares: dict[Name, Fraction] = Field(default_factory=dict)
    """How 1 - gamma is split among the other learners, by name, adding up to 1; default: evenly. The papers' b is the
    natural learner's share."""

    gammas: dict[Name, Schedule] | None = None
    """A schedule of its own for every learner, adding up to 1 at all times; overrides `gamma` and `shares`."""

    decay: DecaySchedule = 0.999
    """d: the share of the global learner that each iteration keeps, from 0 to below 1; it may be a schedule."""

    warmup: bool = True
    """Use min(d, (k+1)/(k+10)) at iteration k. Papers: no; published code: yes."""

    source: Source = "raw"
    """Mix the learners' raw weights (papers, ours) or their own averages (published code: an average of averages)."""

    parts: bool = False
    """Also keep each learner's part of the global learner: the average over time of what that learner has contributed.
    The dial then mixes these parts (`generalist mix RUN`). Costs one more copy of the weights per learner."""

    counters: Literal["copy", "truncate"] = "copy"
    """BatchNorm's integer step counts: copied from the lead learner, or averaged and truncated (published code). Its
    float statistics are always mixed like weights."""

    redistribution: RedistributionOptions = RedistributionOptions()
    """When the learners restart from the global learner."""

    @field_validator("decay")
    @classmethod
    def _keeps_a_share(cls, decay: float | Schedule) -> float | Schedule:
        if isinstance(decay, Schedule) and not all(0 <= value < 1 for value in decay.values):
            raise ValueError("every value is a share of the global learner that is kept: from 0 to below 1")
        return decay

    def decay_at(self, epoch: float, epochs: int) -> float:
        """d after `epoch` (fractional, from 0) of `epochs` epochs, before any warm-up."""
        return self.decay.at(epoch, epochs) if isinstance(self.decay, Schedule) else self.decay
