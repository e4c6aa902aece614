"""Evaluation attacks by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from generalist.attacks.apgd import APGD, TargetedAPGD
from generalist.attacks.autoattack import PLUS, RAND, AutoAttack
from generalist.attacks.base import Attack
from generalist.attacks.cw import CW, CWL2
from generalist.attacks.fab import FAB
from generalist.attacks.fgsm import FGSM
from generalist.attacks.mim import MIM
from generalist.attacks.pgd_attack import PGD
from generalist.attacks.square import Square
from generalist.core.errors import GeneralistError
from generalist.core.registry import unknown_name

ATTACKS: dict[str, Callable[[], Attack | AutoAttack]] = {
    "fgsm": FGSM,
    "cw-l2": CWL2,
    "apgd-ce": APGD,
    "apgd-dlr": lambda: APGD(loss="dlr"),
    "apgd-t": TargetedAPGD,
    "fab": FAB,
    "fab-t": lambda: FAB(targets=9),
    "square": Square,
    "aa": AutoAttack,
    "aa-plus": lambda: AutoAttack(name="aa-plus", attacks=PLUS),
    "aa-rand": lambda: AutoAttack(name="aa-rand", attacks=RAND),
}
WITH_STEPS: dict[str, Callable[[int], Attack]] = {
    "pgd": lambda steps: PGD(steps=steps),
    "mim": lambda steps: MIM(steps=steps),
    "cw": lambda steps: CW(steps=steps),
}
"""Written with the number of their steps: `pgd-20` really runs 20."""


def attack_named(name: str) -> Attack | AutoAttack:
    """The attack or the ensemble of that name, with its usual settings."""
    if name in ATTACKS:
        return ATTACKS[name]()
    match = re.fullmatch(r"([a-z]+)-(\d{1,5})", name)
    if match is not None and match[1] in WITH_STEPS:
        if int(match[2]) == 0:
            raise GeneralistError(f"attack {name!r} has no steps; write 1 or more, as in {match[1]}-20")
        return WITH_STEPS[match[1]](int(match[2]))
    meant = re.fullmatch(r"([a-z]+)\W?([1-9]\d{0,4})", name.lower())
    if meant is not None and meant[1] in WITH_STEPS:
        raise GeneralistError(f"unknown attack {name!r}; write {meant[1]}-{meant[2]}")
    if name.lower() in WITH_STEPS:
        raise GeneralistError(f"unknown attack {name!r}; write it with its steps, as in {name.lower()}-20")
    if name.lower() in ("autoattack", "auto-attack"):
        raise GeneralistError(f"unknown attack {name!r}; write aa")
    known = ["natural", *ATTACKS, *(f"{kind}-STEPS" for kind in WITH_STEPS)]
    raise GeneralistError(unknown_name("attack", name, known))
