"""What is run and what is reported.

A *column* is a number in the table: an attack in a threat model. It consists of *steps*, each a single attack; an
ensemble has several. Columns that need the same step share it: if AutoAttack's parts are columns of their own,
AutoAttack itself costs nothing more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from generalist.attacks.apgd import APGD, TargetedAPGD
from generalist.attacks.autoattack import AutoAttack
from generalist.attacks.base import Attack
from generalist.attacks.cw import CWL2
from generalist.attacks.threats import Threat, ThreatOptions
from generalist.core.errors import GeneralistError
from generalist.core.registry import unknown_name
from generalist.evaluation.accuracy import NATURAL
from generalist.evaluation.named import attack_named

Mode = Literal["each", "cascade"]
Precision = Literal["default", "fast"]

HALF = "@bf16"
"""Marks the label of a step that searches in bfloat16."""

CONFIRM: dict[str, Attack] = {"apgd-ce": APGD(), "apgd-t": TargetedAPGD()}
"""The attacks in full precision that samples not broken in bfloat16 must also survive to count as robust."""


@dataclass(frozen=True)
class Preset:
    """A usual choice of attacks."""

    attacks: tuple[str, ...]
    mode: Mode
    samples: int | None = None
    """The size of a random subset of the images; None for all."""
    threats: tuple[str, ...] = ()
    """Threats that are measured if none is named, except in norms that the run itself trains against."""


PRESETS = {
    "standard": Preset((NATURAL, "aa"), "cascade"),
    "quick": Preset((NATURAL, "pgd-20", "apgd-ce"), "each", samples=1000),
    "papers": Preset(
        (
            NATURAL,
            "pgd-20",
            "pgd-100",
            "mim-20",
            "cw-20",
            "apgd-ce",
            "apgd-dlr",
            "apgd-t",
            "fab-t",
            "square",
            "aa",
        ),
        "each",
        threats=("linf:8/255", "l2:128/255"),
    ),
}


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        raise GeneralistError(unknown_name("preset", name, list(PRESETS)))
    return PRESETS[name]


@dataclass(frozen=True)
class Step:
    """One attack in one threat model, run on the samples for which some column needs it."""

    threat: ThreatOptions
    attack: Attack
    label: str
    """The attack's name in the records, with `@bf16` where it searches in bfloat16."""

    @property
    def key(self) -> str:
        return step_key(str(self.threat), self.label)

    @property
    def half(self) -> bool:
        return self.label.endswith(HALF)


@dataclass(frozen=True)
class Column:
    """A number in the table: the share of samples that are classified correctly and that no step breaks."""

    attack: str
    threat: str
    steps: tuple[str, ...]
    """The keys of its steps, in the order in which they run."""

    @property
    def name(self) -> str:
        return f"{self.attack}/{self.threat}"


@dataclass(frozen=True)
class Plan:
    """All steps, each once, in the order in which they run; and the columns made of them."""

    steps: tuple[Step, ...]
    columns: tuple[Column, ...]


def step_key(threat: str, label: str) -> str:
    return f"{threat} {label}"


def make_plan(
    attacks: Sequence[str | Attack | AutoAttack],
    threats: Sequence[ThreatOptions],
    *,
    mode: Mode,
    precision: Precision,
) -> Plan:
    """The steps and columns of `attacks` (names, or attack objects) in each of `threats`."""
    chosen = _by_name(attacks)
    steps: dict[str, Step] = {}
    columns = []
    for threat in dict.fromkeys(threats):
        parts = _labelled(chosen, threat.build(), precision=precision)
        _check_norm(threat, parts)
        for name, members in _members(threat, parts, mode=mode, precision=precision).items():
            steps |= {step.key: step for step in members if step.key not in steps}
            columns.append(Column(name, str(threat), tuple(dict.fromkeys(step.key for step in members))))
    return Plan(tuple(steps.values()), tuple(columns))


def _check_norm(threat: ThreatOptions, parts: Mapping[str, Mapping[str, Attack]]) -> None:
    """Refuse an attack that only works in another norm, before anything runs."""
    if threat.norm != "l2" and any(isinstance(part, CWL2) for members in parts.values() for part in members.values()):
        raise GeneralistError(f"cw-l2 is for l2 threats and cannot judge {threat}: leave one out, or use cw-20 there")


def _members(
    threat: ThreatOptions, parts: Mapping[str, Mapping[str, Attack]], *, mode: Mode, precision: Precision
) -> dict[str, list[Step]]:
    """The steps of each column in one threat model."""
    if mode == "each":
        # Single attacks run in full precision, to be comparable with what others report under their names.
        alone = {label for members in parts.values() if len(members) == 1 for label in members}
        return {
            name: _ensemble(threat, members, precision=precision, in_full=alone)
            if len(members) > 1
            else [Step(threat, attack, label) for label, attack in members.items()]
            for name, members in parts.items()
        }
    columns: dict[str, list[Step]] = {}
    so_far: dict[str, Attack] = {}
    for name, members in parts.items():
        so_far |= members
        columns[name] = _ensemble(threat, so_far, precision=precision, confirm=len(columns) + 1 == len(parts))
    return columns


def _ensemble(
    threat: ThreatOptions,
    members: Mapping[str, Attack],
    *,
    precision: Precision,
    in_full: Collection[str] = (),
    confirm: bool = True,
) -> list[Step]:
    """The steps of attacks in sequence. With precision `fast` they search in bfloat16, with `CONFIRM` at the end.
    Attacks that run in full precision anyway (`in_full`, or in the confirmation) do not run in bfloat16 as well."""
    if precision == "default":
        return [Step(threat, attack, label) for label, attack in members.items()]
    full = {label for label, attack in members.items() if label in in_full or CONFIRM.get(label) == attack}
    steps = [Step(threat, attack, label if label in full else label + HALF) for label, attack in members.items()]
    return [*steps, *(Step(threat, attack, name) for name, attack in CONFIRM.items())] if confirm else steps


def _by_name(attacks: Sequence[str | Attack | AutoAttack]) -> dict[str, Attack | AutoAttack]:
    """Attacks by the name of their column; repeated ones count once."""
    chosen: dict[str, Attack | AutoAttack] = {}
    for attack in attacks:
        if isinstance(attack, str) and attack == NATURAL:
            continue
        name, built = (attack, attack_named(attack)) if isinstance(attack, str) else (_checked(attack).name, attack)
        if chosen.setdefault(name, built) != built:
            raise GeneralistError(f"two attacks are called {name!r}, but have different settings: leave one out")
    return chosen


def _checked(attack: Attack | AutoAttack) -> Attack | AutoAttack:
    """Refuse what is no attack before anything has run."""
    if isinstance(attack, type):
        raise GeneralistError(f"attacks: {attack.__name__} is a class: give one with its settings, {attack.__name__}()")
    lacking = [part for part in ("name", "rounds", "run_round", "run") if not hasattr(attack, part)]
    if lacking and not isinstance(attack, AutoAttack):
        raise GeneralistError(
            f"attacks: a {type(attack).__name__} is no attack, for it has no {', '.join(lacking)}: write a name, as in "
            "pgd-20, or a subclass of generalist.attacks.rounds.InRounds"
        )
    return attack


def _labelled(
    chosen: Mapping[str, Attack | AutoAttack], threat: Threat, *, precision: Precision
) -> dict[str, dict[str, Attack]]:
    """The single attacks of each, by label. Equal attacks have equal labels, whichever ensemble they are part of; the
    labels of `CONFIRM` are reserved where it is used."""
    known: dict[str, Attack] = {} if precision == "default" else dict(CONFIRM)
    return {
        name: {_label(part, name, known): part for part in _plain(attack, threat)} for name, attack in chosen.items()
    }


def _plain(attack: Attack | AutoAttack, threat: Threat) -> tuple[Attack, ...]:
    return attack.attacks_for(threat) if isinstance(attack, AutoAttack) else (attack,)


def _label(part: Attack, column: str, known: dict[str, Attack]) -> str:
    """The attack's name, if that identifies it; attacks with other settings are told apart by their column's name."""
    first = label = part.name if part.name == column or _is_usual(part) else f"{column}.{part.name}"
    number = 1
    while known.setdefault(label, part) != part:
        number += 1
        label = f"{first}-{number}"
    return label


def _is_usual(part: Attack) -> bool:
    """Whether its name alone builds an equal attack."""
    try:
        return attack_named(part.name) == part
    except GeneralistError:
        return False
