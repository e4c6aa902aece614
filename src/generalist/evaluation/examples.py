"""examples.npz: a few images and what attacks made of them, for people to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from generalist.attacks.base import Found
from generalist.core.files import atomic_write
from generalist.data.sets import Batch
from generalist.evaluation.packing import Feeder
from generalist.evaluation.plan import Plan, Step
from generalist.evaluation.verdicts import Bools, Ints, Verdicts

MOST = 32
"""Pairs in all, shared out between the threats."""

RunBatch = Callable[[Step, Batch, Tensor, int], Found]
Predict = Callable[[Tensor], Tensor]


class Kept:
    """What broke the first samples of each step, kept as it is found: for each the image of its first such round."""

    def __init__(self) -> None:
        self._images: dict[str, dict[int, tuple[int, Tensor]]] = {}

    def add(self, key: str, rows: Ints, rounds: Ints, broken: Bools, x: Tensor) -> None:
        """Of the samples at positions `rows`, those `broken`; beyond the first `MOST` of a step none is ever shown."""
        kept, places = self._images.setdefault(key, {}), np.flatnonzero(broken)
        places = places[np.lexsort((rounds[places], rows[places]))]
        _, first = np.unique(rows[places], return_index=True)  # the first round of each sample
        for i in places[first[:MOST]]:
            row, round = int(rows[i]), int(rounds[i])
            if row not in kept or round < kept[row][0]:
                kept[row] = round, x[i].cpu().clone()
        for row in sorted(kept)[MOST:]:
            del kept[row]

    def images(self, key: str, rows: Ints, rounds: Ints) -> Tensor | None:
        """The images of these samples and rounds; None unless all were found here, and not before a resume."""
        kept = self._images.get(key, {})
        found = [kept[row] for row in rows.tolist() if row in kept]
        return torch.stack([x for _, x in found]) if [round for round, _ in found] == rounds.tolist() else None


def make_examples(
    plan: Plan, verdicts: Verdicts, feeder: Feeder, kept: Kept, run: RunBatch, predict: Predict
) -> dict[str, np.ndarray[Any, Any]]:
    """Pairs of an image and its adversarial version, of the first samples that were broken in each threat.

    What was found before a resume is made again from the records, one batch for each threat: a sample's result depends
    on nothing but the sample and the round, so that the pairs are the same.
    """
    pieces: list[dict[str, np.ndarray[Any, Any]]] = []
    threats = list(dict.fromkeys(str(step.threat) for step in plan.steps))
    share = max(1, min(MOST // max(1, len(threats)), feeder.size))
    for threat in threats[:MOST]:
        for step in plan.steps:
            first = verdicts.first_broken(step.key)
            rows = np.flatnonzero(first >= 0)[:share]
            if str(step.threat) == threat and len(rows):
                pieces.append(_pairs(step, rows, first[rows], verdicts, feeder, kept, run, predict))
                break
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]} if pieces else {}


def _pairs(
    step: Step,
    rows: Ints,
    rounds: Ints,
    verdicts: Verdicts,
    feeder: Feeder,
    kept: Kept,
    run: RunBatch,
    predict: Predict,
) -> dict[str, np.ndarray[Any, Any]]:
    batch, count = feeder.batch(verdicts.index[rows]), len(rows)
    images = kept.images(step.key, rows, rounds)
    if images is None:
        x = run(step, batch, feeder.rounds(rounds), count).x
    else:  # as many rows as the batch has, lest the model answer otherwise
        x = images[torch.arange(len(batch.x)) % count].to(batch.x.device)
    return {
        "index": verdicts.index[rows],
        "label": verdicts.label[rows],
        "clean": batch.x[:count].float().cpu().numpy(),
        "adversarial": x[:count].float().cpu().numpy(),
        "clean_prediction": verdicts.predicted[rows],
        "adversarial_prediction": predict(x)[:count].cpu().numpy(),
        "threat": np.asarray([str(step.threat)] * count),
        "attack": np.asarray([step.label] * count),
    }


def write_examples(path: Path, examples: dict[str, np.ndarray[Any, Any]]) -> None:
    if examples:
        arrays: dict[str, Any] = examples
        atomic_write(path, lambda stream: np.savez_compressed(stream, **arrays))
