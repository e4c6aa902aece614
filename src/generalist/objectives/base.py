"""The interface of a training objective.

An objective answers `gradients(batch, progress)`: by default the gradients of `loss`. One that combines gradients,
perturbs the weights, keeps a second network or remembers things per sample overrides the hooks it needs; the training
loop never asks which objective is running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import BeforeValidator, SerializeAsAny, ValidationInfo
from torch import Tensor, nn

from generalist.attacks.pgd import AttackOptions, BatchLoss, Classifier, Moves, Start, pgd
from generalist.attacks.threats import Shrunk, Threat, ThreatOptions, widen
from generalist.core.errors import GeneralistError
from generalist.core.options import Options
from generalist.core.registry import Registry
from generalist.core.schedule import Schedule, whole_epochs
from generalist.data.sets import Batch, Images
from generalist.tensors.folding import FoldedNetwork
from generalist.tensors.modes import computing_in
from generalist.tensors.state import restore

Metrics = dict[str, Tensor]

SCALE = "attack.scale"
"""The current share of eps in `Progress.scalars`, for a learner with an `attack.scale`."""
SMALLEST = 1e-6
"""Replaces a scale of 0, because perturbations are divided by it."""


@dataclass(frozen=True)
class Progress:
    """Where training stands. Device scalars, so that a captured iteration can be replayed with new values."""

    step: Tensor
    """Iterations done so far, int64."""

    epoch: Tensor
    """The current epoch, counted from 1, int64."""

    lr: Tensor
    """The learner's learning rate, for an objective that trains a second network."""

    variant: str = "default"
    """Which of the objective's `variants` this iteration runs."""

    scalars: dict[str, Tensor] = field(default_factory=dict)
    """The current value of each of the objective's own `schedules`, and of the attack's `SCALE` where it has one."""


@dataclass(eq=False)
class LearnerView:
    """What an objective can see of its learner."""

    name: str
    model: nn.Module
    threat: Threat | None
    attack: AttackOptions
    seed: int
    images: Images
    """The training images, for what is done once per epoch: maps, masks, a pass over all of them."""
    index: Tensor
    """Indices of the images that are trained on, which leaves out the held-out ones."""
    artefact: Callable[[str], dict[str, Tensor]]
    """Returns weights by name. `SOURCE[#SUBJECT]` is the global learner, or the learner SUBJECT, of an earlier stage or
    run. `#NAME[.average]` is another learner of this run as it is now; copy those tensors at once. Call it from
    `epoch_start`: at `setup` the earlier stage may not have run, and within an epoch learners do not wait for one
    another."""
    epochs: int
    """The length of training, to turn fractions of it into epochs."""
    padding: int = 0
    """Pixels of padding of the random crop; a mask needs them to follow its sample's augmentation."""
    validation: tuple[Images, Tensor] | None = None
    """The images that validation uses and their indices, for an objective that chooses among several networks."""
    label_smoothing: float = 0.0
    autocast: torch.dtype | None = None
    """Compute type of forward passes; None: that of the weights."""
    constant: FoldedNetwork | None = None
    """A faster form of the network in evaluation mode, if the engine has made one."""
    moves: Moves = field(default_factory=Moves)
    """The steps of an attack outside of the network; an engine may put compiled ones here."""
    means: Callable[[Sequence[Tensor]], list[Tensor]] = list
    """Turns means over this process's part of a batch into means over the whole batch. An objective needs it for all
    that is not a plain sum of gradients (a norm, a cosine, a running accuracy). All ranks that share a batch must make
    the same calls in the same order."""

    def epochs_of(self, share: float) -> int:
        """A fraction of training in whole epochs."""
        return whole_epochs(share * self.epochs)

    def weights_of(self, source: str, *, field: str) -> dict[str, Tensor]:
        """The weights of `source`, refused if the architecture differs; `field` is the option that named it."""
        state, own = self.artefact(source), self.model.state_dict()
        for name, tensor in own.items():
            if name not in state or state[name].shape != tensor.shape:
                raise GeneralistError(f"objective.{field}: {source!r} is another architecture: {name!r} differs")
        return {name: state[name] for name in own}

    def require_random_start(self) -> None:
        """Refuse `attack.start: none`, for an attack that drives the output away from that on the clean image.

        Its loss has no gradient at the image itself, so an attack that starts there never moves, and adversarial
        training would silently become natural training.
        """
        if self.attack.start == "none":
            raise GeneralistError(
                f"learner {self.name!r}: its attack has no gradient at the image itself, where attack.start none "
                "begins; use gaussian, or uniform"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Logits in at least single precision."""
        with computing_in(self.autocast, x.device):
            return widen(self.model(x))

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y, label_smoothing=self.label_smoothing)

    def adversarial(
        self,
        batch: Batch,
        progress: Progress,
        *,
        threat: Threat | None = None,
        options: AttackOptions | None = None,
        loss: BatchLoss | None = None,
    ) -> Tensor:
        """The batch's images, attacked by PGD against the learner's current weights.

        In the learner's own threat model and with its own attack options, unless others are given.
        """
        threat = self.within(threat or self.threat, progress)
        options = options or self.attack
        with computing_in(self.autocast, batch.x.device):
            return pgd(
                self.under_attack(options),
                batch.x,
                batch.y,
                threat=threat,
                options=options,
                seed=self.seed,
                purpose=f"attack/{self.name}/{threat}",  # two threats of one learner start at different points
                index=batch.index,
                step=progress.step,
                loss=loss,
                moves=self.moves,
            )

    def within(self, threat: Threat | None, progress: Progress) -> Threat:
        """The threat, reduced to the share of eps that `attack.scale` currently allows."""
        assert threat is not None, "the recipe's check lets no adversarial objective pass without a threat"
        scale = progress.scalars.get(SCALE)
        return threat if scale is None else Shrunk(threat.eps, inner=threat, share=scale.clamp_min(SMALLEST))

    def under_attack(self, options: AttackOptions) -> Classifier:
        """The learner's current network, in the fastest form for this attack."""
        if self.constant is None or options.batchnorm == "train":
            return self.model
        self.constant.refresh()
        return self.constant


@dataclass(frozen=True)
class Inputs:
    """The inputs of a loss: the batch, and what `prepare` made of it."""

    batch: Batch
    made: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by name, adversarial images among them. No gradient flows into them."""


class ObjectiveOptions(Options):
    """Options of an objective; each objective extends these."""

    kind: str
    """The objective's name, or an import path `package.module:Class`."""


class Objective:
    """Base class. `Options` holds the settings; `learner` is set by `setup`."""

    Options: ClassVar[type[ObjectiveOptions]] = ObjectiveOptions
    adversarial: ClassVar[bool] = True
    """Whether it needs a threat model."""

    attacks_each: ClassVar[bool] = False
    """Whether `prepare` makes `adversarial`, an attacked version of each image of the batch; some wrappers rely on
    it."""

    trains_copy: ClassVar[bool] = False
    """Whether it trains a second network beside the learner's; such a copy is trained as a whole, whatever the
    learner's `trains` says."""

    variants: tuple[str, ...] = ("default",)
    """The different forms that an iteration can take, each recorded as a graph of its own; `variant` picks one, on the
    host. Known after `setup`; a wrapper has those of the objective it wraps."""

    capturable: bool = True
    """Whether an iteration can be recorded as a CUDA graph: nothing waits for the device, no shape depends on data."""

    separable: bool = True
    """Whether the gradient of a batch is the mean of the gradients of its parts, so that ranks may divide it. True if
    the objective uses `learner.means` wherever it needs the whole batch, false if it mixes samples with each other."""

    def __init__(self, options: ObjectiveOptions) -> None:
        self.options = options
        self.learner: LearnerView

    def setup(self, learner: LearnerView) -> None:
        """Called once, before training."""
        self.learner = learner

    def schedules(self) -> dict[str, Schedule]:
        """The objective's own values that change during training; they arrive in `Progress.scalars`."""
        return {}

    @classmethod
    def needs_threat(cls, options: ObjectiveOptions) -> bool:
        """Whether the learner must have a threat model; a wrapper asks the objective it wraps."""
        return cls.adversarial

    @classmethod
    def usual_start(cls, options: ObjectiveOptions) -> Start:
        """Where its attack starts if the learner's `attack.start` does not say."""
        return "uniform"

    @classmethod
    def chooses_network(cls, options: ObjectiveOptions) -> bool:
        """Whether `best_network` names another network than the learner's own."""
        return False

    @classmethod
    def threats(cls, options: ObjectiveOptions) -> list[ThreatOptions]:
        """Further threat models of the objective's own; validation measures these, too."""
        return []

    @classmethod
    def attack_on(cls, options: ObjectiveOptions, threat: Threat, attack: AttackOptions, *, own: bool) -> AttackOptions:
        """The learner's `attack` as it is used in the learner's own threat model, or in one of `threats`."""
        return attack if own else attack.model_copy(update={"step": None})

    @classmethod
    def sources(cls, options: ObjectiveOptions) -> list[str]:
        """The sources it will ask `learner.artefact` for, so that a wrong one is refused before anything runs."""
        return []

    @classmethod
    def companions(cls, options: ObjectiveOptions) -> list[str]:
        """Other learners of the same run whose weights it needs: NAME, or NAME.average for that learner's average. It
        gets them as `learner.artefact("#NAME")`."""
        return []

    def variant(self, step: int, epoch: int) -> str:
        """Which variant iteration `step` runs. Called once per iteration, on the host."""
        return self.variants[0]

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        """Make the inputs of `loss`: attack the batch, mix it, mask it. Called once per batch, even where a wrapper
        takes `gradients_of` several times, at perturbed weights."""
        return Inputs(batch)

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        """The scalar to minimise, and detached scalars to log."""
        raise TypeError(f"{type(self).__name__} defines neither loss nor gradients")

    def gradients_of(self, inputs: Inputs, progress: Progress) -> tuple[list[Tensor], Metrics]:
        """The gradients of `loss` on inputs that `prepare` has made."""
        loss, metrics = self.loss(inputs, progress)
        return gradients_with(loss, self.learner.model), {"loss": loss.detach(), **metrics}

    def gradients(self, batch: Batch, progress: Progress) -> tuple[list[Tensor], Metrics]:
        """One gradient per parameter, in the order of `model.parameters()`, and scalars to log (`loss` among them)."""
        return self.gradients_of(self.prepare(batch, progress), progress)

    def epoch_start(self, epoch: int) -> None:
        """Called before the first iteration of an epoch, but not when a run resumes in the middle of one: what is made
        here and needed later belongs in `state_dict`."""

    def epoch_end(self, epoch: int) -> None:
        """Called after the last iteration of an epoch, before validation."""

    def best_network(self) -> dict[str, Tensor] | None:
        """The state dict to validate and save if the learner is alone and trains more than one network (a curve of
        them, say); None: the learner's own. Called before each validation."""
        return None

    def redistributed(self, *, reset: bool) -> None:
        """Called after the learner has taken over the global learner's weights and, if `reset`, cleared its momenta."""

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint must keep: the live ones, not copies."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy an earlier `state_dict` into the live tensors."""
        restore(self.state_dict(), state)


OBJECTIVES: Registry[type[Objective]] = Registry("objective")


def trust_code_of(info: ValidationInfo) -> bool:
    """Whether the caller trusts import paths in what is being validated."""
    return bool((info.context or {}).get("trust_code", False))


def _parse(value: Any, info: ValidationInfo) -> Any:
    """`trades`, or `{kind: trades, beta: 6}`, to the options of that objective."""
    if isinstance(value, ObjectiveOptions):
        return value
    if isinstance(value, str):
        value = {"kind": value}
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError("give an objective's name, or a mapping with its name as `kind` and its options")
    try:
        objective = OBJECTIVES.get(value["kind"], trust_code=trust_code_of(info))
    except GeneralistError as error:
        raise ValueError(str(error)) from error
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        raise ValueError(f"{value['kind']!r} is not a subclass of generalist.objectives.Objective")
    return objective.Options.model_validate(value, context=info.context)


ObjectiveChoice = Annotated[SerializeAsAny[ObjectiveOptions], BeforeValidator(_parse)]
"""A recipe's `objective` field."""


def class_of(options: ObjectiveOptions) -> type[Objective]:
    """The class of an objective whose options were checked, import paths included."""
    return OBJECTIVES.get(options.kind, trust_code=True)


def build_objective(options: ObjectiveOptions) -> Objective:
    return class_of(options)(options)


def gradients_with(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """The gradient of `loss` for each parameter of `model`; zeros for one that took no part in it."""
    parameters = list(model.parameters())
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def accuracy(logits: Tensor, y: Tensor) -> Metrics:
    """The share of the batch that is classified correctly, as a metric."""
    return {"accuracy": (logits.detach().argmax(1) == y).float().mean()}
