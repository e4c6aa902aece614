"""The baseline: a training iteration as in the published code.

Written from its behaviour (PKU-ML/Generalist, and docs/method.md, the column `published code`), for any number of
learners: ordinary modules in fp32 with PyTorch's default flags; PGD in eval mode, every step of which is a whole
`backward()`, including the gradients of the weights; one torch.optim.SGD each; then, tensor by tensor in a Python loop
over the state dicts, each learner's average and the average of their mixture, including BatchNorm's counters. The
mixture asks each network for its state dict again for every tensor. After each update, an average backs up and reloads
a network of its own, which counts how many images of the batch it gets right. Loss and accuracies are read back in
every iteration.

Left out, so that it is not slower here than necessary: loading and augmenting images, random starts drawn by NumPy in
float64 on the host, nn.DataParallel around every network, the progress bar, redistribution.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generalist.attacks.pgd import starting_point
from generalist.data.sets import Batch
from generalist.training.learner_options import LearnerOptions
from generalist.training.options import Job

DECAY = 0.999
State = dict[str, Tensor]


def why_not_published(job: Job) -> str | None:
    """Why this recipe has no form in the published code; None if it has one."""
    for learner in job.learners:
        if learner.objective.kind not in ("nt", "at"):
            return f"it knows the objectives nt and at, not {learner.objective.kind!r}"
        if learner.optimizer.kind != "sgd":
            return f"it knows the optimizer sgd, not {learner.optimizer.kind!r}"
        if learner.cutout or learner.augmentation is not None:
            return "it knows no augmentation of a learner's own"
        if learner.threat is not None and learner.attack.batchnorm != "eval":
            return "its attacks run in eval mode"
        if learner.attack.scale is not None:
            return "it knows no attack that grows"
        if learner.trains:
            return "its learners train all of their networks"
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
        self.averages = [Average(network) for network in self.models]
        self.mixed = Average(model)
        self.step = 0

    def iteration(self, batch: Batch, *, position: float = 0.0) -> list[float]:
        """One step of every learner and of the averages, `position` epochs into training; returns the losses."""
        losses = []
        for learner, model, optimizer, average in zip(
            self.job.learners, self.models, self.optimizers, self.averages, strict=True
        ):
            rate = self.job.learning_rate(learner) * learner.schedule.at(position, self.job.train.epochs)
            for group in optimizer.param_groups:
                group["lr"] = rate
            x = batch.x if learner.threat is None else self._attack(learner, model, batch)
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), batch.y, label_smoothing=learner.label_smoothing)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            average.update([model], [1.0])
            losses.append(loss)
        self.mixed.update([average.network for average in self.averages], self.job.gammas_at(position))
        for average in self.averages:
            average.accuracy(batch)
        self.step += 1
        return [loss.item() for loss in losses]

    def _attack(self, learner: LearnerOptions, model: nn.Module, batch: Batch) -> Tensor:
        assert learner.threat is not None
        threat, attack, x = learner.threat.build(), learner.attack, batch.x
        size = threat.default_step(attack.steps) if attack.step is None else attack.step
        model.eval()
        start = starting_point(
            threat,
            attack.start,
            seed=self.job.train.seed,
            purpose=f"attack/{learner.name}/{threat}",  # as in the engines, which gives the same images
            index=batch.index,
            step=self.step,
            like=x,
        )
        adversarial = (x + threat.project(start)).clamp(0, 1)
        for _ in range(attack.steps):
            adversarial.requires_grad_()
            logits = model(adversarial)
            model.zero_grad()
            F.cross_entropy(logits, batch.y).backward()  # type: ignore[no-untyped-call]
            assert adversarial.grad is not None
            moved = adversarial.detach() + size * threat.steepest(adversarial.grad)
            adversarial = (x + threat.project(moved - x)).clamp(0, 1)
        return adversarial


class Average:
    """A running average of a network, or of a mixture of networks, and a network with its weights."""

    def __init__(self, model: nn.Module) -> None:
        self.network = copy.deepcopy(model).eval()
        self.state = _copied(self.network)
        self.backup: State = {}
        self.step = 0

    @torch.no_grad()
    def update(self, networks: Sequence[nn.Module], weights: Sequence[float]) -> None:
        """Integer counters are averaged like weights, then truncated by the copy."""
        decay = min(DECAY, (self.step + 1) / (self.step + 10))
        first = networks[0].state_dict()
        for name, value in self.state.items():
            mixture = first[name] * weights[0] if len(networks) > 1 else first[name]
            for network, weight in zip(networks[1:], weights[1:], strict=True):
                mixture = mixture + network.state_dict()[name] * weight  # the whole state dict for every tensor
            value.copy_(decay * value + (1 - decay) * mixture)
        self.step += 1
        self.backup = _copied(self.network)
        self.network.load_state_dict(self.state)

    def accuracy(self, batch: Batch) -> float:
        return float((self.network(batch.x).argmax(1) == batch.y).float().mean())


def _copied(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
