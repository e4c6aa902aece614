"""Attacks in rounds: restarts and targets, each a whole attack, after which a broken sample needs no more of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from generalist.attacks.base import Attack, Found, verdict
from generalist.attacks.pgd import Classifier, borrowed
from generalist.attacks.threats import Threat, widen
from generalist.core.errors import GeneralistError
from generalist.data.sets import Batch


class InRounds(Protocol):
    """An attack of several rounds. A round's result for a sample does not depend on the rounds before it."""

    @property
    def name(self) -> str: ...

    def rounds(self, num_classes: int) -> Sequence[Attack]: ...


def run_rounds(attack: InRounds, model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Found:
    """All rounds over the whole batch: for each sample the first success, or the last try."""
    with borrowed(model):
        x, broken = batch.x, torch.zeros_like(batch.y, dtype=torch.bool)
        for part in attack.rounds(class_count(model, batch)):
            found = part.run(model, batch, threat=threat, seed=seed)
            x = torch.where(per_sample(broken, x), x, found.x)
            broken = broken | found.broken
            if bool(broken.all()):
                break
        return verdict(model, batch, x, threat=threat)


@torch.no_grad()
def settle(model: Classifier, batch: Batch, x: Tensor, *, threat: Threat) -> Found:
    """The verdict on an attack's images `x`; a sample that is wrong as it is keeps its own image."""
    with borrowed(model):
        wrong = widen(model(batch.x)).argmax(1) != batch.y
        return verdict(model, batch, torch.where(per_sample(wrong, x), batch.x, x), threat=threat)


@torch.no_grad()
def class_count(model: Classifier, batch: Batch) -> int:
    """How many classes the model tells apart."""
    count = model(batch.x[:1]).shape[1]
    if count < 2:
        raise GeneralistError(f"an attack needs a model with two classes or more; this one has {count} output")
    return count


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Values [B] in the shape [B, 1, ...], to go with images `like`."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def check_counts(attack: str, **counts: int) -> None:
    """Refuse counts below 1."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise GeneralistError(f"{attack}: {name} must be a whole number of at least 1, not {count!r}")
