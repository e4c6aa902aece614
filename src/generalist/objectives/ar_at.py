"""Adversarial training that pulls representations towards those of natural images, AR-AT (Waseda et al., 2025)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from generalist.attacks.accuracy import logits_of
from generalist.attacks.threats import widen
from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.core.options import Decay, Fraction, Number
from generalist.data.sets import iterate
from generalist.objectives.at import AdversarialTraining
from generalist.objectives.base import (
    OBJECTIVES,
    Inputs,
    LearnerView,
    Metrics,
    ObjectiveOptions,
    Progress,
    accuracy,
)
from generalist.tensors.batchnorm import tracked
from generalist.tensors.flat import Flat
from generalist.tensors.modes import computing_in
from generalist.tensors.optimizers import OptimizerOptions, build_optimizer

TRUSTED = 1000
"""Training images on which the weight of the adversarial loss is measured."""
CHUNK = 500
"""Images per pass over them; affects only memory."""


class ArAtOptions(ObjectiveOptions):
    """Options of AR-AT."""

    kind: str = "ar-at"
    """The objective's name."""

    weight: Number = Field(default=30.0, ge=0)
    """Weight of the distance between the representations. The authors: 30 for a ResNet-18, 100 for a wide one."""

    layers: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(default_factory=list, max_length=64)
    """Names of the modules whose outputs are the representation, with equal weights; the authors take the BatchNorm
    layers of the last stage. Default: the input of the classifier, the last linear layer."""

    bottleneck: Fraction = 0.25
    """Width of a predictor's hidden layer, as a share of the representation's."""

    momentum: Decay = 0.9
    """Momentum of the SGD of the predictors and of the second BatchNorm; its learning rate is the learner's."""

    weight_decay: Annotated[Number, Field(ge=0)] = 5e-4
    """L2 penalty on these."""


class Beside(nn.Module):
    """What is trained beside the learner's network: another BatchNorm for it, and a predictor for each layer."""

    def __init__(self, network: nn.Module, predictors: Sequence[nn.Module]) -> None:
        super().__init__()
        self.network, self.predictors = network, nn.ModuleList(predictors)


@OBJECTIVES.register("ar-at")
class RepresentationRegularized(AdversarialTraining):
    """Minimises a CE(x') + (1 - a) CE(x) + weight (1 - cos(h(z'), z)), weight = 30, x' from PGD (Waseda et al., 2025).

    z and z' are the representations of x and x', with their positive parts averaged over positions; h is a predictor of
    two layers (hidden width 0.25 of z's), trained with the rest, and no gradient flows into z: the robust
    representation is drawn to the natural one, and not the other way. Natural images pass through the same weights with
    a BatchNorm of their own, which is trained beside the network (like the predictors: SGD, momentum 0.9, weight decay
    0.0005) and discarded at the end. a is the accuracy on 1000 natural training images before each epoch. Costs steps
    + 2 forward and backward passes, one more than AT.
    """

    Options: ClassVar[type[ObjectiveOptions]] = ArAtOptions
    trains_copy = True
    separable = False  # the predictors have BatchNorm and gradients of their own

    def __init__(self, options: ArAtOptions) -> None:
        super().__init__(options)
        self.weight, self.layers, self.bottleneck = options.weight, options.layers, options.bottleneck
        self._sgd = OptimizerOptions(momentum=options.momentum, weight_decay=options.weight_decay)

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        model = learner.model
        self._check_layers(model)
        network = copy.deepcopy(model)
        first = next(model.parameters())
        blank = torch.zeros(1, *learner.images.shape, dtype=first.dtype, device=first.device)
        was_training = model.training
        with torch.no_grad(), self._observed(model.eval()) as seen:
            model.forward(blank)
        model.train(was_training)
        predictors = [
            predictor(z.shape[1], self.bottleneck, seed=learner.seed, purpose=f"predictor/{learner.name}/{i}").to(z)
            for i, z in enumerate(seen)
        ]
        self.beside = Flat(Beside(network, predictors))
        self.beside.module.train()
        self.gradient = torch.zeros_like(self.beside.parameters)
        self.optimizer = build_optimizer(self._sgd, self.beside.parameters)
        apart = {f"{layer}.{name}" for layer in tracked(model) for name in ("weight", "bias")}
        self.shared = [i for i, (name, _) in enumerate(model.named_parameters()) if name not in apart]
        self.trust = torch.zeros((), dtype=torch.float64, device=first.device)
        self.ready = torch.zeros((), dtype=torch.bool, device=first.device)

    def _check_layers(self, model: nn.Module) -> None:
        named = dict(model.named_modules())
        if unknown := [name for name in self.layers if name not in named]:
            last = [name for name, module in named.items() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
            raise GeneralistError(
                f"learner {self.learner.name!r}: objective.layers: the network has no layer {unknown[0]!r:.80}; "
                f"its last BatchNorm layers are {', '.join(last[-6:]) or 'none'}"
            )
        if not self.layers and not linear_layers(model):
            raise GeneralistError(
                f"learner {self.learner.name!r}: the network has no linear layer as its classifier: name the layers of "
                "its representation in objective.layers"
            )

    @contextmanager
    def _observed(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """Within this context, a pass of `model` adds its representations, [B, C] each, to the list."""
        seen: list[Tensor] = []

        def output(module: nn.Module, given: Any, out: Tensor) -> None:
            seen.append(pooled(out))

        def classified(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen.append(pooled(given[0]))

        if self.layers:
            hooks = [model.get_submodule(name).register_forward_hook(output) for name in self.layers]
        else:
            hooks = [linear_layers(model)[-1].register_forward_pre_hook(classified)]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def epoch_start(self, epoch: int) -> None:
        """Measure the accuracy a. The first time also copy the learner's weights, which it has only now."""
        network = self._network()
        if not self.ready:
            network.load_state_dict(self.learner.model.state_dict())
            self.ready.fill_(True)
        self._share(network)
        index, right = self.learner.index, 0
        chosen = random.permutation(len(index), self.learner.seed, "trust")[:TRUSTED].to(index.device)
        dtype = next(network.parameters()).dtype
        for batch in iterate(self.learner.images, torch.split(index[chosen], CHUNK)):
            with computing_in(self.learner.autocast, batch.x.device):
                right += int((logits_of(network, batch.x.to(dtype)).argmax(1) == batch.y).sum())
        self.trust.fill_(right / len(chosen))

    def redistributed(self, *, reset: bool) -> None:
        if reset:
            self.optimizer.reset()

    def _network(self) -> nn.Module:
        assert isinstance(self.beside.module, Beside)
        return self.beside.module.network

    @torch.no_grad()
    def _share(self, network: nn.Module) -> None:
        """Copy all weights but BatchNorm's from the learner."""
        own, others = list(self.learner.model.parameters()), list(network.parameters())
        torch._foreach_copy_([others[i].data for i in self.shared], [own[i].data for i in self.shared])

    def gradients_of(self, inputs: Inputs, progress: Progress) -> tuple[list[Tensor], Metrics]:
        model, beside, batch = self.learner.model, self.beside.module, inputs.batch
        assert isinstance(beside, Beside)
        self._share(beside.network)
        with torch.enable_grad():
            logits, robust = self._pass(model, inputs.made["adversarial"])
            clean_logits, natural = self._pass(beside.network, batch.x)
            apart = torch.stack(
                [
                    1 - F.cosine_similarity(predict(z), target.detach(), dim=1).mean()
                    for predict, z, target in zip(beside.predictors, robust, natural, strict=True)
                ]
            ).mean()
            losses = [self.learner.cross_entropy(each, batch.y) for each in (logits, clean_logits)]
            trust = self.trust.to(apart.dtype)
            loss = trust * losses[0] + (1 - trust) * losses[1] + self.weight * apart
            own, inside = list(model.parameters()), list(beside.parameters())
            found = torch.autograd.grad(loss, own + inside, allow_unused=True, materialize_grads=True)
        gradients, rest = list(found[: len(own)]), list(found[len(own) :])
        for i in self.shared:
            gradients[i] = gradients[i] + rest[i]  # `rest` begins with the gradients of the second network
        with torch.no_grad():
            self.beside.gather_gradients(rest, self.gradient)
            self.optimizer.step(self.beside.parameters, self.gradient, progress.lr)
        metrics = {"natural_loss": losses[1].detach(), "apart": apart.detach(), "trust": trust.clone()}
        return gradients, {"loss": loss.detach(), **metrics, **accuracy(logits, batch.y)}

    def _pass(self, model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits and representations. Not by `model(x)`: a compiled call may have been compiled without the hooks."""
        with computing_in(self.learner.autocast, x.device), self._observed(model) as seen:
            return widen(model.forward(x)), seen

    def state_dict(self) -> dict[str, Tensor]:
        optimizer = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state.items()}
        known = {"trust": self.trust, "ready": self.ready}
        return {"beside": self.beside.vector, "counters": self.beside.counters, **known, **optimizer}


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def pooled(features: Tensor) -> Tensor:
    """The positive part of a feature map, averaged over positions, [B, C]."""
    positive = widen(features).relu()
    return positive.flatten(2).mean(2) if positive.dim() > 2 else positive


def predictor(width: int, bottleneck: float, *, seed: int, purpose: str) -> nn.Module:
    """Two linear layers with BatchNorm between them, as in SimSiam (Chen and He, 2021)."""
    hidden = max(1, round(bottleneck * width))
    down = linear(width, hidden, bias=False, seed=seed, purpose=f"{purpose}/down")
    up = linear(hidden, width, bias=True, seed=seed, purpose=f"{purpose}/up")
    return nn.Sequential(down, nn.BatchNorm1d(hidden), nn.ReLU(), up)


@torch.no_grad()
def linear(width: int, to: int, *, bias: bool, seed: int, purpose: str) -> nn.Linear:
    """A linear layer with PyTorch's own range of weights, drawn from the run's seed."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, width, to, bias=bias)  # type: ignore[no-untyped-call]
    layer.weight.copy_(width**-0.5 * (2 * random.uniform(seed, purpose, shape=(to, width)) - 1))
    if bias:
        layer.bias.zero_()
    return layer
