"""examples.npz: a few images and what attacks made of them, for people to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from generalist.attacks.base import Found
from generalist.core.files import atomic_write
from generalist.data.sets import Batch
from generalist.evaluation.packing import Feeder
from generalist.evaluation.plan import Plan, Step
from generalist.evaluation.verdicts import Verdicts

MOST = 32
"""Pairs in all, shared out between the threats."""

RunBatch = Callable[[Step, Batch, Tensor, int], Found]
Predict = Callable[[Tensor], Tensor]


def make_examples(
    plan: Plan, verdicts: Verdicts, feeder: Feeder, run: RunBatch, predict: Predict
) -> dict[str, np.ndarray[Any, Any]]:
    """Pairs of an image and its adversarial version, of the first samples that were broken in each threat.

    They are made again from the records, one batch for each threat: a sample's result depends on nothing but the
    sample and the round, so this also holds for what was found before a resume.
    """
    pieces: list[dict[str, np.ndarray[Any, Any]]] = []
    threats = list(dict.fromkeys(str(step.threat) for step in plan.steps))
    share = max(1, min(MOST // max(1, len(threats)), feeder.size))
    for threat in threats[:MOST]:
        for step in plan.steps:
            first = verdicts.first_broken(step.key)
            rows = np.flatnonzero(first >= 0)[:share]
            if str(step.threat) == threat and len(rows):
                pieces.append(_pairs(step, rows, first[rows], verdicts, feeder, run, predict))
                break
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]} if pieces else {}


def _pairs(
    step: Step, rows: Any, rounds: Any, verdicts: Verdicts, feeder: Feeder, run: RunBatch, predict: Predict
) -> dict[str, np.ndarray[Any, Any]]:
    batch, count = feeder.batch(verdicts.index[rows]), len(rows)
    found = run(step, batch, feeder.rounds(rounds), count)
    return {
        "index": verdicts.index[rows],
        "label": verdicts.label[rows],
        "clean": batch.x[:count].float().cpu().numpy(),
        "adversarial": found.x[:count].float().cpu().numpy(),
        "clean_prediction": verdicts.predicted[rows],
        "adversarial_prediction": predict(found.x)[:count].cpu().numpy(),
        "threat": np.asarray([str(step.threat)] * count),
        "attack": np.asarray([step.label] * count),
    }


def write_examples(path: Path, examples: dict[str, np.ndarray[Any, Any]]) -> None:
    if examples:
        arrays: dict[str, Any] = examples
        atomic_write(path, lambda stream: np.savez_compressed(stream, **arrays))
