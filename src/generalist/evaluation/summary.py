"""summary.json: what the records of an evaluation say, as numbers. A pure function of them, whoever joined them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from generalist.evaluation.accuracy import NATURAL, Accuracy
from generalist.evaluation.masking import black_box_warnings
from generalist.evaluation.plan import Column
from generalist.evaluation.records import Header
from generalist.evaluation.verdicts import Bools, Verdicts

FORMAT = 1
_PRECISION = {
    "default": "the model's own precision under PyTorch's default flags",
    "fast": "ensembles and cascades searched in bfloat16, every success confirmed in the model's own precision, and "
    "what they leave has withstood apgd-ce and apgd-t in it; single attacks in the model's own precision",
}


class Evaluation(dict[str, Accuracy]):
    """Accuracy by `natural` and by `attack/threat`, as asked for; `summary` has everything else."""

    def __init__(self, accuracies: dict[str, Accuracy], summary: dict[str, Any]) -> None:
        super().__init__(accuracies)
        self.summary = summary


def accuracies(columns: Sequence[Column], verdicts: Verdicts) -> dict[str, Accuracy]:
    """Natural accuracy and that of every column."""
    rows = {NATURAL: verdicts.right} | {column.name: verdicts.surviving(column.steps) for column in columns}
    return {name: _accuracy(right) for name, right in rows.items()}


def summarise(header: Header, verdicts: Verdicts) -> dict[str, Any]:
    """The content of summary.json."""
    columns = header.plan()
    autoattack = _autoattack(columns, cascade=header.identity["mode"] == "cascade")
    threats = list(dict.fromkeys(column.threat for column in columns))
    worst = {threat: _worst_case(columns, verdicts, threat) for threat in threats}
    union = np.logical_and.reduce([verdicts.right, *worst.values()])
    summary: dict[str, Any] = {
        "format": FORMAT,
        "subject": header.subject,
        "split": header.split,
        "device": header.device,
        "identity": header.identity,
        "precision": _PRECISION[str(header.identity["precision"])],
        "samples": len(verdicts.index),
        "images": header.images,
        "indices": header.indices,
        "accuracy": {name: value.as_json() for name, value in accuracies(columns, verdicts).items()},
        "after_each_part": _after_each_part(columns, verdicts),
        "autoattack": {c.threat: _accuracy(verdicts.surviving(c.steps)).as_json() for c in autoattack},
        "worst_case": {threat: _accuracy(right).as_json() for threat, right in worst.items()},
        "classes": _by_class(header.classes, verdicts, {NATURAL: verdicts.right, **worst, "union": union}),
        "seconds": _seconds(verdicts),
        "notes": list(header.notes),
        "warnings": [*header.warnings, *black_box_warnings(columns, verdicts)],
    }
    if len(threats) > 1:
        summary["union_worst_case"] = _accuracy(union).as_json()
        summary["mean_over_threats"] = _mean(autoattack, verdicts, worst)
    if header.shards > 1 and len(verdicts.index) < len(header.whole_index()):
        summary["shard"] = f"{header.shard}/{header.shards}"
    return summary


def _accuracy(right: Bools) -> Accuracy:
    return Accuracy(int(right.sum()), len(right))


def _worst_case(columns: Sequence[Column], verdicts: Verdicts, threat: str) -> Bools:
    """Right under everything that was tried in this threat model."""
    return verdicts.surviving([key for column in columns if column.threat == threat for key in column.steps])


def _after_each_part(columns: Sequence[Column], verdicts: Verdicts) -> dict[str, dict[str, Any]]:
    """What is left after each step of an ensemble or a cascade, in the order in which they ran."""
    return {
        column.name: {
            key: _accuracy(verdicts.surviving(column.steps[:number])).as_json()
            for number, key in enumerate(column.steps, 1)
        }
        for column in columns
        if len(column.steps) > 1
    }


def _autoattack(columns: Sequence[Column], *, cascade: bool) -> list[Column]:
    """The columns of AutoAttack and nothing else: in a cascade those behind other attacks are of these as well."""
    first = {column.threat: column for column in reversed(columns)}
    return [c for c in columns if c.attack == "aa" and (not cascade or first[c.threat] is c)]


def _mean(autoattack: Sequence[Column], verdicts: Verdicts, worst: dict[str, Bools]) -> dict[str, Any]:
    """What the papers call union: the mean of the robust accuracies, of AutoAttack where it was run in every threat."""
    found = {column.threat: verdicts.surviving(column.steps) for column in autoattack}
    rows = found if found.keys() == worst.keys() else worst
    value = float(np.mean([right.mean() for right in rows.values()]))
    return {"value": value, "of": "aa" if rows is found else "worst_case"}


def _by_class(names: Sequence[str], verdicts: Verdicts, rows: dict[str, Bools]) -> dict[str, dict[str, Any]]:
    """Accuracies by class, for the classes that have samples. `union` is right under every threat."""
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        members = verdicts.label == number
        if members.any():
            found[name] = {what: _accuracy(right[members]).as_json() for what, right in rows.items()}
    return found


def _seconds(verdicts: Verdicts) -> dict[str, float]:
    return {"total": round(sum(verdicts.seconds.values()), 3)} | {k: round(s, 3) for k, s in verdicts.seconds.items()}
