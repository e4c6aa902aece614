"""AutoAttack (Croce & Hein 2020): attacks in sequence, each on the samples that those before it did not break."""

from __future__ import annotations

from dataclasses import dataclass

from generalist.attacks.apgd import APGD, TargetedAPGD
from generalist.attacks.base import Attack, Found, verdict
from generalist.attacks.fab import FAB
from generalist.attacks.pgd import Classifier, borrowed
from generalist.attacks.rounds import class_count
from generalist.attacks.square import Square
from generalist.attacks.threats import Threat
from generalist.data.sets import Batch

STANDARD: tuple[Attack, ...] = (APGD(), TargetedAPGD(), FAB(targets=9), Square())
"""The reference's `standard`: apgd-ce; apgd-t and fab-t with 9 targets; 100 steps each; square with 5,000 queries."""

STANDARD_L1: tuple[Attack, ...] = (APGD(restarts=5), TargetedAPGD(targets=5), FAB(targets=9), Square())
"""The reference's `standard` for l1: more restarts of apgd-ce, fewer targets of apgd-t."""

PLUS: tuple[Attack, ...] = (
    APGD(restarts=5),
    APGD(loss="dlr", restarts=5),
    FAB(restarts=5),
    Square(),
    TargetedAPGD(),
    FAB(targets=9),
)
"""The reference's `plus`: five restarts of the untargeted attacks, and those of `standard`."""

RAND: tuple[Attack, ...] = (APGD(draws=20), APGD(loss="dlr", draws=20))
"""The reference's `rand`, for models with random outputs: each gradient is the mean over 20 passes."""


@dataclass(frozen=True, kw_only=True)
class AutoAttack:
    """An ensemble: `aa`, `aa-plus`, `aa-rand`. Later attacks only see the samples that are not broken yet."""

    name: str = "aa"
    attacks: tuple[Attack, ...] = STANDARD

    def attacks_for(self, threat: Threat) -> tuple[Attack, ...]:
        """The attacks in order; the standard ensemble has other settings for l1."""
        return STANDARD_L1 if self.attacks == STANDARD and threat.name == "l1" else self.attacks

    def run(self, model: Classifier, batch: Batch, *, threat: Threat, seed: int) -> Found:
        """All attacks on one batch: for each sample the first success, or the last try."""
        with borrowed(model):
            natural = verdict(model, batch, batch.x, threat=threat)
            x, broken = batch.x.clone(), natural.broken.clone()
            classes = class_count(model, batch)
            for attack in self.attacks_for(threat):
                for i in range(attack.rounds(classes)):
                    left = (~broken).nonzero().squeeze(1)  # waits for the device, once a round
                    if len(left) == 0:
                        return Found(x=x, broken=broken)
                    rest = Batch(x=batch.x[left], y=batch.y[left], index=batch.index[left])
                    found = attack.run_round(model, rest, left.new_full(left.shape, i), threat=threat, seed=seed)
                    x[left], broken[left] = found.x, found.broken
            return Found(x=x, broken=broken)
