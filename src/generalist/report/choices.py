"""Which attack stands for robustness: AutoAttack if it was run, else the strongest that all networks have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from generalist.compare import AUTOATTACK, ranked
from generalist.comparison_rows import UNION_MEAN, UNION_WORST, Cell, Row, parts_of
from generalist.report.runs import Network
from generalist.report.section import names


@dataclass(frozen=True)
class Choice:
    """The column by which the networks in a plane are compared."""

    attack: str
    threat: str
    note: str
    """A note for the reader if it is not AutoAttack on every network."""

    @property
    def column(self) -> str:
        return f"{self.attack}/{self.threat}"

    @property
    def label(self) -> str:
        attack = "AutoAttack" if self.attack == AUTOATTACK else self.attack
        return f"{attack}, {self.threat}"


def threats_of(row: Row) -> dict[str, dict[str, Cell]]:
    """A row's cells by threat, then attack."""
    found: dict[str, dict[str, Cell]] = {}
    for column in ranked(row.cells):
        attack, threat = parts_of(column)
        if ":" in threat and attack not in (UNION_MEAN, UNION_WORST):
            found.setdefault(threat, {})[attack] = row.cells[column]
    return found


def strongest(attacks: Mapping[str, Cell]) -> tuple[str, Cell]:
    """AutoAttack, or else the attack with the lowest accuracy."""
    if AUTOATTACK in attacks:
        return AUTOATTACK, attacks[AUTOATTACK]
    return min(attacks.items(), key=lambda entry: entry[1].value)


def choose(networks: Sequence[Network], norm: str) -> Choice | None:
    """The column of a norm that lets most networks be compared; None if nothing was attacked in that norm."""
    found = {network.name: threats_of(network.row) for network in networks}
    threats = Counter(threat for by in found.values() for threat in by if threat.startswith(f"{norm}:"))
    if not threats:
        return None
    threat = threats.most_common(1)[0][0]
    having = {name: by[threat] for name, by in found.items() if threat in by}
    attacks = Counter(attack for by in having.values() for attack in by)
    common = [attack for attack, count in attacks.items() if count == len(having)]
    if AUTOATTACK in common:
        return Choice(AUTOATTACK, threat, "")
    lacking = names([name for name, by in having.items() if AUTOATTACK not in by])
    if common:
        attack = min(common, key=lambda name: sum(by[name].value for by in having.values()))
        text = f"{attack} is the strongest attack that all these networks have in {threat}"
    else:
        cells = {name: [by[name].value for by in having.values() if name in by] for name in attacks}
        attack = max(attacks, key=lambda name: (attacks[name], name == AUTOATTACK, -fmean(cells[name])))
        count = attacks[attack]
        text = f"no attack in {threat} was run on all networks: {attack}, which {count} have, is shown"
    return Choice(attack, threat, f"AutoAttack was not run on {lacking}. {text}; it overestimates robust accuracy.")
