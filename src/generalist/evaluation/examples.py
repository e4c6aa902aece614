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
from generalist.evaluation.verdicts import Bools, Ints, Verdicts

MOST = 32
"""Pairs in all, shared out between the threats."""

RunBatch = Callable[[Step, Batch, Tensor, int], Found]
Predict = Callable[[Tensor], Tensor]


class Gallery:
    """Adversarial images as they were found: of every step those of the first few samples that it broke."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, tuple[int, Tensor]]] = {}

    def add(self, key: str, rows: Ints, rounds: Ints, broken: Bools, x: Tensor) -> None:
        """Look at a batch of the step `key`: what was found for these samples, each in its own round."""
        kept = self._kept.setdefault(key, {})
        broken_first = sorted(((int(rows[i]), int(rounds[i]), int(i)) for i in np.flatnonzero(broken)), reverse=True)
        found = {row: (round, i) for row, round, i in broken_first}  # the first round of each
        new = [row for row in sorted(found) if row not in kept or found[row][0] < kept[row][0]][:MOST]
        images = x[[found[row][1] for row in new]].cpu()
        kept |= {row: (found[row][0], image) for row, image in zip(new, images, strict=True)}
        self._kept[key] = {row: kept[row] for row in sorted(kept)[:MOST]}

    def find(self, key: str, row: int, round: int) -> Tensor | None:
        """The image, unless it was found before a resume."""
        found, image = self._kept.get(key, {}).get(row, (None, None))
        return image if found == round else None


def make_examples(
    plan: Plan, verdicts: Verdicts, feeder: Feeder, gallery: Gallery, run: RunBatch, predict: Predict
) -> dict[str, np.ndarray[Any, Any]]:
    """Pairs of an image and its adversarial version, of the first samples that were broken in each threat.

    What was found before a resume is made again from the records, one batch for each threat: a sample's result depends
    on nothing but the sample and the round.
    """
    pieces: list[dict[str, np.ndarray[Any, Any]]] = []
    threats = list(dict.fromkeys(str(step.threat) for step in plan.steps))
    share = max(1, min(MOST // max(1, len(threats)), feeder.size))
    for threat in threats[:MOST]:
        for step in plan.steps:
            first = verdicts.first_broken(step.key)
            rows = np.flatnonzero(first >= 0)[:share]
            if str(step.threat) == threat and len(rows):
                batch, rounds = feeder.batch(verdicts.index[rows]), first[rows]
                images = [gallery.find(step.key, int(row), int(round)) for row, round in zip(rows, rounds, strict=True)]
                again = any(image is None for image in images)
                x = run(step, batch, feeder.rounds(rounds), len(rows)).x if again else batch.x.clone()
                for i, image in enumerate(images):
                    x[i] = x[i] if image is None else image
                pieces.append(_pairs(step, rows, batch, x, verdicts, predict))
                break
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]} if pieces else {}


def _pairs(
    step: Step, rows: Ints, batch: Batch, x: Tensor, verdicts: Verdicts, predict: Predict
) -> dict[str, np.ndarray[Any, Any]]:
    count = len(rows)
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
