"""A base learner: one network, one objective, one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from generalist.attacks.pgd import Moves
from generalist.attacks.threats import Threat
from generalist.core.compiling import compiled, ready
from generalist.core.errors import GeneralistError
from generalist.core.schedule import Schedule
from generalist.data.augment import own_cutout
from generalist.data.sets import Batch, Images
from generalist.objectives.base import SCALE, LearnerView, Metrics, Objective, Progress
from generalist.tensors.batchnorm import tracked
from generalist.tensors.flat import Flat
from generalist.tensors.fused import fastest
from generalist.tensors.modes import restored
from generalist.tensors.optimizers import build_optimizer
from generalist.training.averaging import Average
from generalist.training.learner_options import LearnerOptions
from generalist.training.parallel import Parallel
from generalist.training.parts import Part


class Learner:
    """State: flat weights, their gradient, the optimizer's vectors and, if asked for, an average of the weights and the
    learner's part of the global learner (which `GlobalLearner` updates)."""

    def __init__(
        self,
        options: LearnerOptions,
        model: nn.Module,
        objective: Objective,
        *,
        seed: int,
        images: Images,
        index: Tensor,
        artefact: Callable[[str], dict[str, Tensor]],
        epochs: int,
        padding: int = 0,
        validation: tuple[Images, Tensor] | None = None,
        autocast: torch.dtype | None = None,
        counters: str = "copy",
        parallel: Parallel | None = None,
    ) -> None:
        self.options = options
        self.name = options.name
        self.model = model
        self.seed = seed
        self.parallel = parallel or Parallel()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                raise GeneralistError(f"parameter {name!r} is frozen, but learners train all: set requires_grad")
        self.flat = Flat(model)
        self.resting = resting(model, options.trains, learner=self.name)
        self.fixed = [tensor.data for tensor in resting_weights(model, self.resting)]
        self.gradient = torch.zeros_like(self.flat.parameters)
        self.optimizer = build_optimizer(options.optimizer, self.flat.parameters)
        layers = list(tracked(model).values())
        self.statistics = statistics(layer for layer in layers if layer not in self.resting)
        self.batchnorm = [t.data for layer in layers for t in (layer.weight, layer.bias) if t is not None]
        self.batchnorm += statistics(layers)
        self.average = Average(self.flat, options.averaging, counters=counters) if options.averaging else None
        self.part: Part | None = None
        self.threat: Threat | None = options.threat.build() if options.threat else None
        self.objective = objective
        self.view = LearnerView(
            name=self.name,
            model=model,
            threat=self.threat,
            attack=options.own_attack(),
            seed=seed,
            images=images,
            index=index,
            artefact=artefact,
            epochs=epochs,
            padding=padding,
            validation=validation,
            label_smoothing=options.label_smoothing,
            autocast=autocast,
            means=self.parallel.means,
        )
        self._augment: Callable[..., Batch] = images.augmented
        objective.setup(self.view)

    def compile(self, *, network: bool = True) -> None:
        """Compile what an iteration runs. The first iteration takes seconds longer; results change only by rounding."""
        if network:
            ready()
            self.model.compile(dynamic=False)
        self.optimizer.compile()
        self._augment = compiled(self._augment)
        self.view.moves = Moves.compiled()

    def fold(self, shape: Sequence[int], *, compiled: bool) -> None:
        """Attack a folded form of the network from now on; raises `CannotFoldError` if there is none."""
        dtype = self.view.autocast or self.flat.vector.dtype
        self.view.constant = fastest(self.model, dtype, shape=shape, compiled=compiled)

    def schedules(self) -> dict[str, Schedule]:
        """Every value that changes during training, except the learning rate; they arrive in `Progress.scalars`."""
        scale = self.options.attack.scale
        return {**self.objective.schedules(), **({SCALE: scale} if scale is not None else {})}

    def begin(self) -> None:
        """Put every module into the mode in which it learns."""
        self.model.train()
        for module in self.resting:
            module.training = False  # not `eval()`, which would include modules inside that are trained

    def step(self, batch: Batch, progress: Progress) -> Metrics:
        """One optimizer step on the learner's own task."""
        self.begin()
        with self.parallel.whole_batch():
            gradients, metrics = self.objective.gradients(self._augmented(batch, progress), progress)
        with torch.no_grad():
            self.flat.gather_gradients(gradients, self.gradient)
            self.parallel.mean(self.gradient)
            if self.parallel.ranks > 1 and self.parallel.sync is None and self.statistics:
                torch._foreach_copy_(self.statistics, self.parallel.means(self.statistics))
            with restored(self.fixed):  # weight decay would move weights even where their gradient is zero
                self.optimizer.step(self.flat.parameters, self.gradient, progress.lr)
            if self.average:
                self.average.update(self.flat)
        return metrics

    @torch.no_grad()
    def end_epoch(self, epoch: int, *, steps: int) -> Tensor:
        """Run the objective's `epoch_end`, after an epoch of `steps` iterations; returns how it changed the weights.

        The learner's average is updated as if that change had been spread evenly over the epoch's iterations. Adding
        all of it at once would overshoot, and could make BatchNorm variances negative.
        """
        before = self.flat.vector.clone()
        with restored(self.fixed):
            self.objective.epoch_end(epoch)
        moved = self.flat.vector - before
        if self.average and moved.any():
            self.average.vector.add_(moved, alpha=self.average.trail(steps)[-1])
        return moved

    def _augmented(self, batch: Batch, progress: Progress) -> Batch:
        """The shared batch, or its samples in this learner's own augmentation; with its own cutout, if it has one."""
        if self.options.augmentation is not None:
            shared, options = batch.x, self.options.augmentation
            batch = self._augment(batch.index, epoch=progress.epoch, seed=self.seed, options=options)
            batch = replace(batch, x=torch.empty_like(shared).copy_(batch.x))  # in the networks' type and layout
        if not self.options.cutout:
            return batch
        side, epoch = self.options.cutout, progress.epoch
        x, places = own_cutout(batch.x, batch.index, side=side, epoch=epoch, seed=self.seed, name=self.name)
        return replace(batch, x=x, augmentation={**batch.augmentation, **places})

    @property
    def attacks(self) -> bool:
        """Whether an iteration may attack the network in evaluation mode."""
        return type(self.objective).needs_threat(self.options.objective) and self.options.attack.batchnorm == "eval"

    def source(self, kind: str) -> tuple[Tensor, Tensor]:
        """What this learner contributes to the mix, as (vector, counters): its raw weights or its average."""
        if kind == "averaged" and self.average:
            return self.average.vector, self.average.counters
        return self.flat.vector, self.flat.counters

    @torch.no_grad()
    def receive(self, vector: Tensor, counters: Tensor, *, reset: bool, own_batchnorm: bool = False) -> None:
        """Take over the global learner's weights, but not BatchNorm's if `own_batchnorm`; `reset` momenta, average."""
        kept = [tensor.clone() for tensor in self.batchnorm] if own_batchnorm else []
        self.flat.load(vector, counters)
        if kept:
            torch._foreach_copy_(self.batchnorm, kept)
        if reset:
            self.optimizer.reset()
            if self.average:
                self.average.restart(self.flat)
        self.objective.redistributed(reset=reset)

    def state(self) -> dict[str, Tensor]:
        """The live tensors (not copies) that a checkpoint keeps, by name."""
        state = {"weights": self.flat.vector, "counters": self.flat.counters}
        state |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state.items()}
        if self.average:
            state |= {f"average.{name}": tensor for name, tensor in self.average.state().items()}
        if self.part:
            state |= {f"part.{name}": tensor for name, tensor in self.part.state().items()}
        return state


def statistics(layers: Iterable[nn.modules.batchnorm._BatchNorm]) -> list[Tensor]:
    """The running means and variances of the layers."""
    return [t for layer in layers for t in (layer.running_mean, layer.running_var) if t is not None]


def resting(model: nn.Module, trains: Sequence[str], *, learner: str) -> list[nn.Module]:
    """The modules outside of those named in `trains`; none if that is empty, as then all are trained."""
    if not trains:
        return []
    named = dict(model.named_modules())
    if unknown := [name for name in trains if name not in named]:
        top = ", ".join(name for name, _ in model.named_children())
        raise GeneralistError(
            f"learner {learner!r}: trains: the network has no module {unknown[0]!r:.80}; it has {top}"
        )
    inside = {module for name in trains for module in named[name].modules()}
    if not any(True for module in inside for _ in module.parameters()):
        raise GeneralistError(f"learner {learner!r}: trains: there are no weights in {', '.join(trains):.80}")
    return [module for module in model.modules() if module not in inside]


def resting_weights(model: nn.Module, resting: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of these modules, without those that they share with a trained one."""
    trained = {id(p) for module in model.modules() if module not in resting for p in module.parameters(recurse=False)}
    found = (parameter for module in resting for parameter in module.parameters(recurse=False))
    return [parameter for parameter in found if id(parameter) not in trained]
