"""Attacks in rounds: restarts and targets, each a complete attack; a broken sample needs no further rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from generalist.attacks.base import Attack, Found, verdict
from generalist.attacks.losses import margin
from generalist.attacks.pgd import Classifier, borrowed
from generalist.attacks.threats import Threat, per_sample, perturb, widen
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch

BEYOND = 1.1
"""The factor by which attacks for the nearest image enlarge the perturbation that they found."""


class InRounds(ABC):
    """Base class of attacks: `run` follows from `rounds` and `run_round`. One round unless an attack says otherwise."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    def rounds(self, num_classes: int) -> int:
        return 1

    @abstractmethod
    def run_round(self, model: Classifier, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found: ...

    def run(self, model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Found:
        return run_rounds(self, model, batch, threat=threat, seed=seed)


def run_rounds(attack: Attack, model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Found:
    """All rounds over the whole batch: for each sample the first success, or the last try.

    A sample that is wrong as it is keeps its own image.
    """
    with borrowed(model):
        count = attack.rounds(class_count(model, batch))
        wrong = verdict(model, batch, batch.x, threat=threat).broken
        found = attack.run_round(model, batch, torch.zeros_like(batch.y), threat=threat, seed=seed)
        found = replace(found, x=torch.where(per_sample(wrong, found.x), batch.x, found.x), broken=found.broken | wrong)
        for i in range(1, count):
            if bool(found.broken.all()):  # waits for the device, once a round
                break
            another = attack.run_round(model, batch, torch.full_like(batch.y, i), threat=threat, seed=seed)
            x = torch.where(per_sample(found.broken, found.x), found.x, another.x)
            found = Found(x=x, broken=found.broken | another.broken)
        return found


@torch.no_grad()
def a_little_beyond(model: Classifier, batch: Batch, x: Tensor, *, threat: Threat) -> Tensor:
    """Move the images a tenth further from the originals, within the ball, where that makes them more wrong.

    For attacks that look for the nearest misclassified image. It lies on the decision boundary, where rounding decides
    whether the model under evaluation, which has the last word, agrees with the network that was searched.
    """
    delta = x - batch.x
    size = threat.norm(delta)
    factor = torch.where(size > 0, threat.eps / size, 1).clamp(1, BEYOND)
    further = perturb(batch.x, per_sample(factor, x).to(x.dtype) * delta)
    before, after = (margin(widen(model(image)), batch.y) for image in (x, further))
    return torch.where(per_sample(after > before, x), further, x)


@torch.no_grad()
def class_count(model: Classifier, batch: Batch) -> int:
    """The number of classes, at least 2, as the width of the model's output."""
    count = model(batch.x[:1]).shape[1]
    if count < 2:
        raise GeneralistError(f"an attack needs a model with 2 classes or more; this one has {count} output per image")
    return count


def check_counts(attack: str, **counts: int) -> None:
    """Refuse counts below 1."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise GeneralistError(f"{attack}: {name} must be a whole number of at least 1, not {count!r}")
