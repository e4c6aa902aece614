"""AutoAttack (Croce & Hein 2020): four attacks one after the other, each on what those before it did not break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from generalist.attacks.apgd import APGD, TargetedAPGD
from generalist.attacks.base import Attack, Found, verdict
from generalist.attacks.fab import FAB
from generalist.attacks.pgd import Classifier, borrowed
from generalist.attacks.rounds import InRounds, class_count
from generalist.attacks.square import Square
from generalist.attacks.threats import Threat
from generalist.data.sets import Batch

STANDARD: tuple[InRounds, ...] = (APGD(), TargetedAPGD(), FAB(targets=9), Square())
"""The reference's `standard`: apgd-ce; apgd-t and fab-t with 9 targets; 100 steps each; square with 5,000 queries."""


@dataclass(frozen=True, kw_only=True)
class AutoAttack:
    """`aa`: the standard ensemble. A sample that is broken leaves; the later attacks see the rest only."""

    attacks: tuple[InRounds, ...] = STANDARD

    @property
    def name(self) -> str:
        return "aa"

    def rounds(self, num_classes: int) -> Sequence[Attack]:
        return [part for attack in self.attacks for part in attack.rounds(num_classes)]

    def run(self, model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Found:
        with borrowed(model):
            natural = verdict(model, batch, batch.x, threat=threat)
            x, broken = batch.x.clone(), natural.broken.clone()
            for part in self.rounds(class_count(model, batch)):
                left = (~broken).nonzero().squeeze(1)  # waits for the device, once a round
                if len(left) == 0:
                    break
                rest = Batch(x=batch.x[left], y=batch.y[left], index=batch.index[left])
                found = part.run(model, rest, threat=threat, seed=seed)
                x[left], broken[left] = found.x, found.broken
            return Found(x=x, broken=broken)
