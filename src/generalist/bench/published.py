"""The baseline: a training iteration in the form that the published code gives it.

Written from a description of its behaviour (docs/method.md, the column `published code`), for any number of learners:
ordinary modules in fp32 with PyTorch's default flags, switched to eval mode for the attack and back; PGD by
torch.autograd.grad; one torch.optim.SGD each; then, tensor by tensor in a Python loop over the state dicts, each
learner's average and the average of their mixture, BatchNorm's counters included. Nothing is fused, captured, cast
or laid out for speed. Loading and logging are left out, so that it is not slower here than it has to be.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generalist.attacks.pgd import starting_point
from generalist.data.sets import Batch
from generalist.training.options import Job, LearnerOptions

DECAY = 0.999
State = dict[str, Tensor]


def why_not_published(job: Job) -> str | None:
    """Why the published code has no form for this recipe; None where it has one."""
    for learner in job.learners:
        if learner.objective.kind not in ("nt", "at"):
            return f"it knows the objectives nt and at, not {learner.objective.kind!r}"
        if learner.optimizer.kind != "sgd":
            return f"it knows the optimizer sgd, not {learner.optimizer.kind!r}"
        if learner.cutout:
            return "it knows no cutout of a learner's own"
        if learner.threat is not None and learner.attack.batchnorm != "eval":
            return "its attacks run in eval mode"
    return None


class PublishedLoop:
    """Every learner's network, optimizer and average, and the global average of the averages."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job = job
        self.models = [copy.deepcopy(model).train() for _ in job.learners]
        self.optimizers = [
            torch.optim.SGD(
                network.parameters(),
                lr=job.learning_rate(learner),
                momentum=learner.optimizer.momentum,
                weight_decay=learner.optimizer.weight_decay,
                nesterov=learner.optimizer.nesterov,
            )
            for learner, network in zip(job.learners, self.models, strict=True)
        ]
        self.averages = [_copied(network) for network in self.models]
        self.mixed = _copied(model)
        self.step = 0

    def iteration(self, batch: Batch, *, position: float = 0.0) -> list[Tensor]:
        """One step of every learner and of the averages, `position` epochs into training; the losses."""
        losses = []
        for learner, model, optimizer in zip(self.job.learners, self.models, self.optimizers, strict=True):
            rate = self.job.learning_rate(learner) * learner.schedule.at(position, self.job.train.epochs)
            for group in optimizer.param_groups:
                group["lr"] = rate
            x = batch.x if learner.threat is None else self._attack(learner, model, batch)
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), batch.y, label_smoothing=learner.label_smoothing)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.detach())
        self._average(self.job.gammas_at(position))
        self.step += 1
        return losses

    def _attack(self, learner: LearnerOptions, model: nn.Module, batch: Batch) -> Tensor:
        assert learner.threat is not None
        threat, attack, x = learner.threat.build(), learner.attack, batch.x
        size = threat.default_step(attack.steps) if attack.step is None else attack.step
        model.eval()
        start = starting_point(
            threat,
            attack.start,
            seed=self.job.train.seed,
            purpose=f"attack/{learner.name}/{threat}",  # the engines' own: the same images come out
            index=batch.index,
            step=self.step,
            like=x,
        )
        adversarial = (x + threat.project(start)).clamp(0, 1)
        for _ in range(attack.steps):
            adversarial.requires_grad_()
            loss = F.cross_entropy(model(adversarial), batch.y)
            (gradient,) = torch.autograd.grad(loss, [adversarial])
            moved = adversarial.detach() + size * threat.steepest(gradient)
            adversarial = (x + threat.project(moved - x)).clamp(0, 1)
        return adversarial

    @torch.no_grad()
    def _average(self, gammas: list[float]) -> None:
        decay = min(DECAY, (self.step + 1) / (self.step + 10))
        for average, model in zip(self.averages, self.models, strict=True):
            _blend(average, model.state_dict(), decay)
        mixture: State = {}
        for name in self.mixed:
            parts = [gamma * average[name] for gamma, average in zip(gammas, self.averages, strict=True)]
            mixture[name] = sum(parts[1:], start=parts[0])
        _blend(self.mixed, mixture, decay)


def _copied(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _blend(average: State, state: State, decay: float) -> None:
    """Integer counters are averaged like weights, and truncated by the copy."""
    for name, value in average.items():
        value.copy_(decay * value + (1 - decay) * state[name])
