"""What the tests of evaluation share: a short ensemble, images, and what records say of every sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from generalist.attacks.apgd import APGD, TargetedAPGD
from generalist.attacks.autoattack import AutoAttack
from generalist.attacks.fab import FAB
from generalist.attacks.square import Square
from generalist.attacks.threats import ThreatOptions, parse_threat
from generalist.data.digits import load_digits
from generalist.data.sets import ImageSet
from generalist.evaluation import Evaluation, evaluate_model
from generalist.evaluation.suite import Place, suite_options

SHORT = AutoAttack(
    name="short",
    attacks=(
        APGD(steps=5),
        TargetedAPGD(targets=4, steps=5),
        FAB(targets=3, iterations=4),
        Square(queries=20),
    ),
)
"""The same kinds of attacks as `aa`, at a budget that tests can pay."""

LINF, L2 = parse_threat("linf:0.12"), parse_threat("l2:0.6")


def first_images(count: int) -> ImageSet:
    test = load_digits()[1]
    return ImageSet(test.images[:count], test.labels[:count], test.classes, "digits")


def run(
    model: nn.Module,
    images: ImageSet,
    out: Path | None = None,
    *,
    threats: tuple[ThreatOptions, ...] = (LINF, L2),
    attacks: tuple[Any, ...] = ("natural", SHORT),
    resume: bool = False,
    index: Any = None,
    listener: Any = lambda moment: None,
    **settings: Any,
) -> Evaluation:
    """An evaluation with its records below `out`."""
    place = Place(out, "net", "digits-test", resume=resume) if out is not None else None
    options = suite_options(**{"batch_size": 25, **settings})
    return evaluate_model(
        model, images, threats=threats, attacks=attacks, index=index, options=options, place=place, listener=listener
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    """Every record below a folder, without headers and times."""
    found = [json.loads(line) for path in sorted(folder.rglob("records-*")) for line in path.open()]
    return [line for line in found if "sample" in line]


def verdicts(folder: Path) -> dict[tuple[Any, ...], Any]:
    """(sample, threat, attack) to the first round that broke it, -1 for none; and natural answers."""
    found: dict[tuple[Any, ...], Any] = {}
    for line in lines(folder):
        if line["attack"] == "natural":
            found[line["sample"], "natural"] = line["predicted"]
            continue
        key = (line["sample"], line["threat"], line["attack"])
        before = found.setdefault(key, -1)
        if line["broken"] and (before < 0 or line["round"] < before):
            found[key] = line["round"]
    return found


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name not in {"seconds", "directory"}}
