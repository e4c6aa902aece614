"""RAMP (Jiang and Singh, 2024)."""

from __future__ import annotations

import copy
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from generalist.attacks.threats import ThreatOptions, widen
from generalist.core.options import Decay, Fraction, Number
from generalist.data.sets import Batch
from generalist.objectives.base import (
    OBJECTIVES,
    Inputs,
    LearnerView,
    Metrics,
    ObjectiveOptions,
    Progress,
    accuracy,
    gradients_with,
)
from generalist.objectives.geometry import unit
from generalist.objectives.norms import L2, SeveralNorms, SeveralNormsOptions
from generalist.tensors.flat import Flat
from generalist.tensors.modes import computing_in
from generalist.tensors.optimizers import OptimizerOptions, build_optimizer


class RampOptions(SeveralNormsOptions):
    """Options of RAMP."""

    kind: str = "ramp"
    """The objective's name."""

    beside: list[ThreatOptions] = Field(default=[L2], min_length=1, max_length=1)
    """The second threat model, beside the learner's own `threat`."""

    pairing: Number = Field(5.0, ge=0)
    """Weight of the divergence between the predictions under the two norms. The authors: 5 for a ResNet-18 from
    scratch, 2 for a wide one."""

    clean_share: Fraction = 0.5
    """Share of the clean copy's update over an epoch in the merged weights, before it is multiplied by the cosine of
    the two updates; the adversarial one has the rest. At 0 the copy is trained in vain: use `at-max` instead."""

    clean_momentum: Decay = 0.9
    """Momentum of the clean copy's SGD; its learning rate is the learner's."""

    clean_weight_decay: Annotated[Number, Field(ge=0)] = 5e-4
    """L2 penalty on the clean copy's weights."""


@OBJECTIVES.register("ramp")
class Ramp(SeveralNorms):
    """Minimises max_p CE(x'_p), example by example over two norms, + pairing * KL(p(x'_1) || p(x'_2)), averaged over
    the examples that are correct under the first norm, pairing = 5 (Jiang and Singh, 2024).

    The norms are the learner's own and l2 128/255, or what `beside` says. In addition, a copy of the network is trained
    on clean images (SGD, momentum 0.9, weight decay 0.0005). Both start an epoch from the same weights; at its end
    every tensor becomes old + s max(cos, 0) d_clean + (1 - s) d_adv, where d are the two updates over the epoch, cos
    the cosine between them and s = `clean_share` = 0.5; likewise BatchNorm's statistics. Costs 2 (steps + 1) + 1
    forward and backward passes: about twice AT.

    The authors' code differs in three points: it attacks by APGD; it chooses the worse image in evaluation mode and
    forwards the chosen ones as a third batch, where here the losses of the two forward passes decide; and the copy
    keeps its momentum between epochs, which here starts at zero, because redistribution may have moved the weights.
    """

    Options: ClassVar[type[ObjectiveOptions]] = RampOptions
    trains_copy = True
    separable = False  # its divergence is a mean over the samples that are right, and the copy has gradients of its own

    def __init__(self, options: RampOptions) -> None:
        super().__init__(options)
        self.pairing, self.share = options.pairing, options.clean_share
        self._sgd = OptimizerOptions(momentum=options.clean_momentum, weight_decay=options.clean_weight_decay)

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.clean = Flat(copy.deepcopy(learner.model))
        self.clean.module.train()
        self.old = self.clean.vector.clone()
        self.gradient = torch.zeros_like(self.clean.parameters)
        self.optimizer = build_optimizer(self._sgd, self.clean.parameters)

    @torch.no_grad()
    def epoch_start(self, epoch: int) -> None:
        """The learner may have been given other weights since the last epoch's end."""
        self.clean.load(*self.clean.read(self.learner.model.state_dict()))
        self.old.copy_(self.clean.vector)
        self.optimizer.reset()

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        self._train_clean(batch, progress)
        first, second = self.attacked(batch, progress)
        return Inputs(batch, {"first": first, "second": second})

    def _train_clean(self, batch: Batch, progress: Progress) -> None:
        """One step of the clean copy."""
        with torch.enable_grad(), computing_in(self.learner.autocast, batch.x.device):
            logits = widen(self.clean.module(batch.x))
        loss = self.learner.cross_entropy(logits, batch.y)
        gradients = gradients_with(loss, self.clean.module)
        with torch.no_grad():
            self.clean.gather_gradients(gradients, self.gradient)
            self.optimizer.step(self.clean.parameters, self.gradient, progress.lr)

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        y, smoothing = inputs.batch.y, self.learner.label_smoothing
        logits = [self.learner.forward(inputs.made[name]) for name in ("first", "second")]
        losses = [F.cross_entropy(each, y, label_smoothing=smoothing, reduction="none") for each in logits]
        worst = torch.maximum(*losses).mean()
        pairing = paired_divergence(logits[0], logits[1], y)
        metrics = {"worst_loss": worst.detach(), "divergence": pairing.detach(), **accuracy(logits[0], y)}
        return worst + self.pairing * pairing, metrics

    @torch.no_grad()
    def epoch_end(self, epoch: int) -> None:
        live = {**dict(self.learner.model.named_parameters()), **dict(self.learner.model.named_buffers())}
        for slot in self.clean.slots:
            own = live[slot.name]
            own.copy_(merged(slot.view(self.old), slot.view(self.clean.vector), own, share=self.share))

    def state_dict(self) -> dict[str, Tensor]:
        optimizer = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state.items()}
        return {"old": self.old, "clean": self.clean.vector, "counters": self.clean.counters, **optimizer}


def paired_divergence(first: Tensor, second: Tensor, y: Tensor) -> Tensor:
    """KL(p_first || p_second), the mean over the samples that `first` gets right; 0 where there is none.

    In terms of log-probabilities, so that it stays finite where a probability underflows to zero.
    """
    each = F.kl_div(F.log_softmax(second, 1), F.log_softmax(first, 1), reduction="none", log_target=True).sum(1)
    right = (first.detach().argmax(1) == y).to(each.dtype)
    return (each * right).sum() / right.sum().clamp_min(1)


def merged(old: Tensor, clean: Tensor, adversarial: Tensor, *, share: float) -> Tensor:
    """One tensor after the epoch: the old value and both updates, the clean one times its cosine with the other."""
    natural, robust = clean - old, adversarial - old
    cosine = (unit(natural) * unit(robust)).sum().clamp_min(0)
    return old + share * cosine * natural + (1 - share) * robust
