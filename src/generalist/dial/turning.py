"""Turning the dial: a model of the learners' mixture, with BatchNorm statistics that are mixed or re-estimated."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from generalist.attacks.base import Attack
from generalist.attacks.pgd import AttackOptions, pgd
from generalist.attacks.pgd_attack import PGD
from generalist.attacks.threats import Shrunk, Threat, ThreatOptions
from generalist.core.errors import DataError, GeneralistError, RunError
from generalist.core.run import GLOBAL, RunDirectory
from generalist.data.augment import own_cutout
from generalist.data.options import Splits, load_splits
from generalist.data.sampler import epoch_batches
from generalist.data.sets import Batch, Images, iterate
from generalist.data.split import subset
from generalist.dial.learners import ROUNDING, Gamma, Learners, Source, State, gammas_of, learners_of, mixed_state
from generalist.evaluation import Accuracy, evaluate_model
from generalist.evaluation.accuracy import NATURAL
from generalist.objectives.base import SMALLEST
from generalist.tensors.batchnorm import reestimate, statistics_names
from generalist.training.artefacts import SHARE, UPDATES, save_weights
from generalist.training.environment import choose_device
from generalist.training.learner_options import LearnerOptions
from generalist.training.validation import Validation, validation_indices
from generalist.training.validation_options import ValidationOptions
from generalist.weights import network_of

Kind = Literal["mixed", "reestimated"]
Statistics = Literal["best", "mixed", "reestimated"]

REESTIMATION_IMAGES = 10_000
"""Training images that statistics are estimated on, or all if there are fewer. Using more changes the statistics less
than using other images does."""


@dataclass(frozen=True)
class Mixture:
    """A model that the dial made."""

    model: nn.Module
    """In evaluation mode, on the dial's device."""
    state: State
    """Its state dict, on the CPU and in the precision of the snapshot."""
    about: dict[str, Any]
    """The header of its weights file."""
    gammas: dict[str, float]
    """Every learner's share, in the dial's order."""
    statistics: Kind
    """Where its BatchNorm statistics come from."""
    measured: dict[Kind, dict[str, Accuracy]] = field(default_factory=dict)
    """Accuracies on the validation images, by statistics; empty if there was nothing to choose between."""

    def save(self, path: Path) -> None:
        """A weights file like any other: `generalist.load` and `generalist evaluate` take it."""
        save_weights(path, self.state, self.about)


class Dial:
    """The learners of a run and its images; `turn` makes models of them. Images are read only when they are needed."""

    def __init__(
        self,
        learners: Learners,
        *,
        device: str = "auto",
        data: Any = None,
        samples: int | None = None,
        steps: int | None = None,
        trust_code: bool = False,
    ) -> None:
        self.learners, self.recipe = learners, learners.recipe
        self.device, self.data, self.trust_code = choose_device(device), data, trust_code
        self.samples = samples
        self.steps = self.recipe.validation.steps if steps is None else steps
        PGD(steps=self.steps)  # a wrong number is refused before anything is read

    def turn(self, gammas: Sequence[float], *, statistics: Statistics = "best") -> Mixture:
        """The model for these shares, which are in the recipe's order.

        `best` takes, of mixed and re-estimated statistics, those that validate better by the run's own rule (by natural
        + mean PGD accuracy if that is `last`), and mixed ones in a tie. If one learner has the whole share, its own
        statistics fit already, so `best` keeps them, as it does for networks without BatchNorm.
        """
        state = mixed_state(self.learners.states, gammas, lead=self.learners.lead)
        plain = self._network(state)
        if statistics == "mixed" or (statistics == "best" and (max(gammas) == 1 or not statistics_names(plain))):
            return self._mixture(plain, state, gammas, "mixed", {})
        fresh = self.reestimated(plain, gammas)
        if statistics == "reestimated":
            return self._mixture(fresh, state, gammas, "reestimated", {})
        measured: dict[Kind, dict[str, Accuracy]] = {
            "mixed": self.validate(plain),
            "reestimated": self.validate(fresh),
        }
        mixed, anew = (_score(accuracy, self.recipe.validation) for accuracy in measured.values())
        if anew > mixed:
            return self._mixture(fresh, state, gammas, "reestimated", measured)
        return self._mixture(plain, state, gammas, "mixed", measured)

    def _network(self, state: State) -> nn.Module:
        network = network_of(state, self.learners.about, self.learners.run.path, trust_code=self.trust_code)
        return network.to(self.device).eval()

    def _mixture(
        self,
        model: nn.Module,
        state: State,
        gammas: Sequence[float],
        kind: Kind,
        measured: dict[Kind, dict[str, Accuracy]],
    ) -> Mixture:
        own = model.state_dict()
        fresh = statistics_names(model) if kind == "reestimated" else set()
        state = {name: own[name].cpu().to(t.dtype) if name in fresh else t for name, t in state.items()}
        named = dict(zip(self.learners.names, gammas, strict=True))
        shares = {name: named[name] for name in self.learners.order}
        about = {name: value for name, value in self.learners.about.items() if name not in (UPDATES, SHARE)}
        about["mix"] = {"gamma": shares, "statistics": kind, "source": self.learners.source}
        return Mixture(model, state, about, shares, kind, measured)

    # -- images -------------------------------------------------------------------------------------------------------

    @cached_property
    def splits(self) -> Splits:
        """The run's images on the device, without extra ones; refused if they are not those it was trained on."""
        options = self.recipe.data.model_copy(update={"extra": None})
        if options.name == "arrays" and self.data is None:
            raise RunError(
                f"{self.learners.run.path} was trained on images in memory: give them again as `data` in Python, "
                "or ask for mixed statistics of one gamma, which need none"
            )
        splits = load_splits(options, trust_code=self.trust_code, arrays=self.data)
        if self.learners.about.get("data") != splits.train.checksum():
            raise DataError(
                f"{self.learners.run.path} was trained on other images than these, which may include held-out ones: "
                "give it its original data"
            )
        test = splits.test.to(self.device) if splits.test is not None else None
        return Splits(splits.train.to(self.device), test)

    @cached_property
    def _validation(self) -> tuple[Images, Tensor, Tensor]:
        """(images to validate on, their indices, the indices of the images that were trained on)."""
        images, held, trained = validation_indices(self.recipe, self.splits)
        return images, self._some(held), trained

    def check_samples(self, *, test: bool) -> None:
        """Refuse to measure more samples than the largest of the measured sets has."""
        if self.samples is None:
            return
        held = validation_indices(self.recipe, self.splits)[1]
        most = max(len(held), len(self.splits.test) if test and self.splits.test is not None else 0)
        if self.samples > most:
            raise GeneralistError(f"samples: cannot take {self.samples} of {most} images; ask for 1 to {most}")

    def _some(self, index: Tensor) -> Tensor:
        if self.samples is None:
            return index
        return index[subset(len(index), min(self.samples, len(index)), self.recipe.train.seed)]

    def validate(self, model: nn.Module) -> dict[str, Accuracy]:
        """Natural and PGD accuracy on the run's validation images, by `natural` and threat."""
        images, index, _ = self._validation
        return self._measure(model, images, index)

    def test(self, model: nn.Module) -> dict[str, Accuracy]:
        """The same on its test images."""
        return self._measure(model, *self._test)

    @cached_property
    def _test(self) -> tuple[Images, Tensor]:
        test = self.splits.test
        if test is None:
            raise DataError(f"{self.splits.train.name} has no test split: leave --test out")
        return test, self._some(torch.arange(len(test)))

    def _measure(self, model: nn.Module, images: Images, index: Tensor) -> dict[str, Accuracy]:
        """Run one evaluation for all the threats that share a step size."""
        threats = self.recipe.threats()
        by_length: dict[float | None, list[ThreatOptions]] = {}
        for threat in threats:
            by_length.setdefault(self.recipe.validation.step.get(threat.norm), []).append(threat)
        found: dict[str, Accuracy] = {}
        for length, group in (by_length or {None: []}).items():
            attacks: list[str | Attack] = [NATURAL]
            if group:
                attacks.append(PGD(steps=self.steps, step=length))
            seed = self.recipe.train.seed
            result = evaluate_model(model, images, threats=group, attacks=attacks, index=index, seed=seed)
            found |= {name.partition("/")[2] or name: accuracy for name, accuracy in result.items()}
        return {name: found[name] for name in (NATURAL, *map(str, threats))}

    # -- statistics ---------------------------------------------------------------------------------------------------

    def reestimated(self, model: nn.Module, gammas: Sequence[float]) -> nn.Module:
        """A copy of `model` with BatchNorm statistics estimated on augmented training images.

        Each batch is divided among the learners by their shares. A learner's images are as in its training: in its own
        augmentation, natural or attacked by its own PGD, here against the mixture. For that PGD, statistics are first
        estimated on natural images, because attacks would be weak on a network with mixed ones, which may fit nothing.
        """
        if not statistics_names(model):
            raise RunError("this network has no BatchNorm statistics to re-estimate: use mixed ones")
        target = copy.deepcopy(model)
        reestimate(target, (batch.x for batch in self._training_batches(target)))
        tasks = [task for task in self._tasks(gammas) if task.share > 0]
        if all(task.as_shared for task in tasks):
            return target
        fresh = copy.deepcopy(model)
        reestimate(fresh, (self._attacked(target, batch, tasks) for batch in self._training_batches(model)))
        return fresh

    def _tasks(self, gammas: Sequence[float]) -> list[Task]:
        tasks = []
        for options, gamma in zip(self.recipe.learners, gammas, strict=True):
            attacks = [(self._grown(threat, attack), attack) for threat, attack in options.attacks()]
            tasks += [Task(gamma / len(attacks), *each, options) for each in attacks] or [
                Task(gamma, None, options.attack, options)
            ]
        return tasks

    def _grown(self, threat: ThreatOptions, attack: AttackOptions) -> Threat:
        """The threat, reduced to the share of eps that the learner trained against at that epoch."""
        whole = threat.build()
        if attack.scale is None:
            return whole
        share = max(attack.scale.at(self.learners.epoch, self.recipe.train.epochs), SMALLEST)
        return Shrunk(whole.eps, inner=whole, share=torch.tensor(share, device=self.device))

    def _training_batches(self, model: nn.Module) -> Iterator[Batch]:
        """Training images, augmented as in an epoch after the last."""
        train, (_, _, index) = self.recipe.train, self._validation
        size, epoch = min(train.batch_size, len(index)), self._next_epoch
        batches = epoch_batches(index, batch_size=size, seed=train.seed, epoch=epoch, last="drop")
        batches = batches[: math.ceil(REESTIMATION_IMAGES / size)]
        dtype = next(model.parameters()).dtype
        options = self.recipe.data.augmentation
        for batch in iterate(self.splits.train, batches, epoch=epoch, seed=train.seed, options=options):
            yield Batch(batch.x.to(self.device, dtype), batch.y.to(self.device), batch.index.to(self.device))

    @property
    def _next_epoch(self) -> int:
        return self.recipe.train.epochs + 1

    def _own_view(self, options: LearnerOptions, x: Tensor, index: Tensor) -> Tensor:
        """The images in the learner's own augmentation, which replaces the shared one or is added to it."""
        at = {"epoch": self._next_epoch, "seed": self.recipe.train.seed}
        if options.augmentation is not None:
            x = self.splits.train.augmented(index.cpu(), **at, options=options.augmentation).x.to(x.device, x.dtype)
        return own_cutout(x, index, side=options.cutout, **at, name=options.name)[0] if options.cutout else x

    def _attacked(self, target: nn.Module, batch: Batch, tasks: Sequence[Task]) -> Tensor:
        counts = portions(len(batch.y), [task.share for task in tasks])
        parts = zip(*(torch.split(tensor, counts) for tensor in (batch.x, batch.y, batch.index)), strict=True)
        made = []
        for task, (x, y, index) in zip(tasks, parts, strict=True):
            if len(y):
                x = self._own_view(task.options, x, index)
            if task.threat is not None and len(y):
                x = pgd(
                    target,
                    x,
                    y,
                    threat=task.threat,
                    options=task.attack,
                    seed=self.recipe.train.seed,
                    purpose=f"dial/{task.threat}",
                    index=index,
                )
            made.append(x)
        return torch.cat(made)


@dataclass(frozen=True)
class Task:
    """What is done to a learner's share of the images."""

    share: float
    threat: Threat | None
    attack: AttackOptions
    options: LearnerOptions
    """Of the learner that sees them."""

    @property
    def as_shared(self) -> bool:
        """Whether it leaves the images in the augmentation that all learners share."""
        return self.threat is None and self.options.augmentation is None and not self.options.cutout


def portions(count: int, shares: Sequence[float]) -> list[int]:
    """`count` divided by `shares` into whole numbers, each off by less than one; the largest remainders round up."""
    exact = [count * share / math.fsum(shares) for share in shares]
    whole = [math.floor(value + ROUNDING) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: count - sum(whole)]:
        whole[i] += 1
    return whole


def _score(accuracy: Mapping[str, Accuracy], options: ValidationOptions) -> float:
    """The score of these accuracies by the run's own rule."""
    rule = "sum" if options.rule == "last" else options.rule
    values = {name: value.value for name, value in accuracy.items()}
    found = Validation({GLOBAL: values}, {}, {}, ensemble=0.0, drift=0.0, gap=0.0)
    return found.score(options.model_copy(update={"rule": rule}))


def mix(
    run: RunDirectory,
    gamma: Gamma,
    *,
    epoch: int | None = None,
    source: Source | None = None,
    statistics: Statistics = "best",
    device: str = "auto",
    data: Any = None,
    trust_code: bool = False,
) -> Mixture:
    """The run's learners mixed by other shares: a model, and how it was made. Nothing is written."""
    check_statistics(statistics)
    learners = learners_of(run, epoch, source=source, trust_code=trust_code)
    gammas = gammas_of(learners, gamma)
    return Dial(learners, device=device, data=data, trust_code=trust_code).turn(gammas, statistics=statistics)


def check_statistics(statistics: str) -> None:
    if statistics not in ("best", "mixed", "reestimated"):
        raise GeneralistError(f"statistics are best, mixed or reestimated, not {statistics!r}")
