"""The options of a learner: its task and how it learns it.

Defaults are those of the recipes called plain (docs/method.md). Where the papers or their published code differ, the
field says how; a recipe's `style` sets a whole column at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from generalist.attacks.pgd import AttackOptions
from generalist.attacks.threats import ThreatOptions
from generalist.core.options import Decay, Number, Options
from generalist.core.schedule import Schedule
from generalist.data.augment import AugmentOptions
from generalist.objectives import ObjectiveChoice
from generalist.objectives.base import class_of
from generalist.objectives.wrapper import innermost
from generalist.tensors.optimizers import OptimizerOptions
from generalist.training.mixing_options import Name


class AveragingOptions(Options):
    """An exponential average of weights (and BatchNorm statistics)."""

    decay: Decay = 0.999
    """Share of the old average kept at each iteration."""

    warmup: bool = True
    """Use min(decay, (k+1)/(k+10)) at iteration k, so that the random start is soon forgotten. Papers: no; the
    published code: yes."""


DEFAULT_LR_SCHEDULE: dict[str, Any] = {"fractions": [0, "1/3", "2/3", 1], "values": [1, 1, 0.1, 0.01]}


class LearnerOptions(Options):
    """One base learner: its task and how it learns it."""

    name: Name
    """Its name in logs, snapshots and `mixing`: letters, digits, `-` and `_`."""

    objective: ObjectiveChoice
    """What it minimises: a name (`nt`, `at`, `trades`, ...; docs/method.md), a mapping `{kind: trades, beta: 6}`, or an
    import path."""

    threat: ThreatOptions | None = None
    """The perturbations it trains against; needed by adversarial objectives."""

    attack: AttackOptions = AttackOptions()
    """How its adversarial examples are made during training. Papers: PGD-10, random start, step 2/255 (linf) or
    eps/4 (l2); silent on the BatchNorm mode; published code: eval mode, step 0.007."""

    optimizer: OptimizerOptions = OptimizerOptions()
    """How its weights are updated from its gradients."""

    schedule: Schedule = Schedule.model_validate(DEFAULT_LR_SCHEDULE)
    """Factor on the learning rate. Papers: 1, 1, 0.1, 0.01 at epochs 0, 40, 60, 120 of 120; published code and ours:
    at 0, 40, 80, 120."""

    averaging: AveragingOptions | None = None
    """Keep an average of this learner's own weights. The published code does, and mixes the averages."""

    label_smoothing: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Probability mass spread evenly over all classes in cross-entropy targets."""

    augmentation: AugmentOptions | None = None
    """An augmentation of its own that replaces `data.augmentation`; for images in memory only."""

    cutout: int = Field(default=0, ge=0, le=4096)
    """Side in pixels of a square that is blanked out of this learner's images, on top of the augmentation."""

    trains: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(default_factory=list, max_length=64)
    """Names of the modules that it trains, with everything inside them. The rest of the network stays in evaluation
    mode and keeps the weights and statistics that it starts with or is given by redistribution. Default: the whole
    network, as in the papers."""

    @model_validator(mode="before")
    @classmethod
    def _one_architecture(cls, value: Any) -> Any:
        if isinstance(value, dict) and "model" in value:
            raise ValueError(
                "all learners share one architecture, because their weights are mixed one by one; "
                "move `model` to the recipe's top level"
            )
        return value

    def threats(self) -> list[ThreatOptions]:
        """Every threat model that it trains against."""
        own = [self.threat] if self.threat else []
        return own + class_of(self.objective).threats(self.objective)

    def own_attack(self) -> AttackOptions:
        """Its attack; where no start is set, the usual one of its objective is filled in."""
        start = self.attack.start or class_of(self.objective).usual_start(self.objective)
        return self.attack.model_copy(update={"start": start})

    def attacks(self) -> list[tuple[ThreatOptions, AttackOptions]]:
        """Its threat models, each with how images are attacked in it."""
        return [(threat, self._attack_on(threat, self.own_attack())) for threat in self.threats()]

    def _attack_on(self, threat: ThreatOptions, attack: AttackOptions) -> AttackOptions:
        kind = class_of(self.objective)
        return kind.attack_on(self.objective, threat.build(), attack, own=threat == self.threat)

    def companions(self) -> list[str]:
        """The other learners whose weights its objective asks for, as NAME or NAME.average."""
        return class_of(self.objective).companions(self.objective)

    def sources(self) -> list[str]:
        """Earlier stages and runs whose weights its objective will ask for."""
        return class_of(self.objective).sources(self.objective)

    @model_validator(mode="after")
    def _needs_threat(self) -> Self:
        kind = self.objective.kind
        adversarial = class_of(self.objective).needs_threat(self.objective)
        if adversarial and self.threat is None:
            raise ValueError(f"objective {kind!r} needs a threat; add `threat: {{norm: linf, eps: 8/255}}`")
        if not adversarial and self.threat is not None:
            raise ValueError(f"objective {kind!r} makes no adversarial examples; remove `threat` or use `at`")
        if not self.threats() and self.attack != AttackOptions():
            raise ValueError(f"objective {kind!r} makes no adversarial examples; leave `attack` out, or use `at`")
        return self

    @model_validator(mode="after")
    def _no_idle_attack(self) -> Self:
        """Refuse a field of `attack` that the objective would override."""
        for field, info in AttackOptions.model_fields.items():
            without = self.attack.model_copy(update={field: info.default})
            same = [
                self._attack_on(threat, self.attack) == self._attack_on(threat, without) for threat in self.threats()
            ]
            if self.attack != without and same and all(same):
                raise ValueError(f"attack.{field}: objective {self.objective.kind!r} has its own; leave it out")
        return self

    @model_validator(mode="after")
    def _trains_a_part(self) -> Self:
        inside = innermost(self.objective)
        if self.trains and class_of(inside).trains_copy:
            raise ValueError(f"trains: {inside.kind!r} trains a second network, all of it; leave `trains` out")
        if self.trains and self.own_attack().batchnorm == "train":
            raise ValueError("trains: attack.batchnorm train would put the resting part into training mode; use eval")
        return self
