"""Samples on which networks disagree, found in the records of their evaluations and shown with Grad-CAM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import nn

from generalist import api
from generalist.cam import gradcam
from generalist.core.errors import GeneralistError
from generalist.data.options import load_splits
from generalist.data.sets import Images
from generalist.evaluation.accuracy import NATURAL
from generalist.evaluation.directory import read_shards
from generalist.evaluation.records import Header, shard_files
from generalist.evaluation.verdicts import Bools, Verdicts
from generalist.report.pictures import Examples, Floats, read_examples
from generalist.report.runs import Network


@dataclass(frozen=True)
class Recorded:
    """What is known about every sample of a network's largest evaluation."""

    network: Network
    header: Header
    verdicts: Verdicts
    examples: Examples | None

    def right(self, kind: str) -> dict[int, bool]:
        """By sample: whether it is right unperturbed, or under everything that was tried in a threat model."""
        return dict(zip(self.verdicts.index.tolist(), self._right(kind).tolist(), strict=True))

    def _right(self, kind: str) -> Bools:
        if kind == NATURAL:
            return self.verdicts.right
        columns = [column for column in self.header.plan() if column.threat == kind]
        return self.verdicts.surviving([key for column in columns for key in column.steps])

    @property
    def threats(self) -> list[str]:
        return list(dict.fromkeys(column.threat for column in self.header.plan()))

    def class_name(self, number: int) -> str:
        names = self.header.classes
        return names[number] if 0 <= number < len(names) else str(number)


def recorded(network: Network) -> Recorded | None:
    """The records of a network's largest evaluation with attacks, else of its largest; None if it has no records."""
    kept = [found for found in network.evaluations if shard_files(found.folder)]
    if not kept:
        return None
    folder = next((found for found in kept if found.summary.worst_case), kept[0]).folder
    return Recorded(network, *read_shards(folder), read_examples(folder / "examples.npz"))


@dataclass(frozen=True)
class Case:
    """An image that one network gets right and another wrong."""

    kind: str
    """`natural`, or a threat; in that case the image is adversarial for the network that is wrong."""
    sample: int
    label: str
    image: Floats
    right: Network
    wrong: Network
    right_says: str
    """What the network that is right predicts for this very image."""
    wrong_says: str
    right_map: Floats | None
    wrong_map: Floats | None


@dataclass(frozen=True)
class Disagreements:
    """How many samples networks disagree on, and a few of these samples."""

    kinds: Sequence[str]
    counts: dict[tuple[str, int, int], int]
    """By kind and the positions of the network that is right and of the one that is wrong."""
    members: Sequence[Network]
    cases: Sequence[Case]
    notes: Sequence[str]


def disagreements(records: Sequence[Recorded], *, most: int, device: str, trust_code: bool) -> Disagreements | None:
    """Within the largest group of networks evaluated on the same images; None if no two were."""
    group = _same_images(records)
    if len(group) < 2:
        return None
    kinds = [NATURAL, *(threat for threat in group[0].threats if all(threat in other.threats for other in group))]
    counts: dict[tuple[str, int, int], int] = {}
    cases: list[Case] = []
    viewer = _Viewer(device, trust_code)
    for kind in kinds:
        found = _candidates(group, kind, counts)
        chosen = _by_turns(found, most)
        cases += [case for pair in chosen if (case := viewer.case(kind, group[pair[0]], group[pair[1]], pair[2]))]
    notes = list(viewer.notes)
    if len(kinds) == 1 and any(entry.threats for entry in group):
        notes.append("under attack they are not compared: there is no threat in which all of them were attacked")
    if len(group) < len(records):
        left = [entry.network.name for entry in records if entry not in group]
        notes.append(f"evaluated on other images, and left out here: {', '.join(left)}")
    return Disagreements(kinds, counts, [entry.network for entry in group], cases, notes)


def _same_images(records: Sequence[Recorded]) -> list[Recorded]:
    groups: dict[Any, list[Recorded]] = {}
    for entry in records:
        data = str(entry.header.identity.get("data", ""))
        groups.setdefault((data, entry.header.split), []).append(entry)
    return max(groups.values(), key=len, default=[])


def _candidates(
    group: Sequence[Recorded], kind: str, counts: dict[tuple[str, int, int], int]
) -> dict[tuple[int, int], list[int]]:
    """Samples that the first of a pair gets right, the second wrong, and that can be shown; all of them are counted."""
    right = [entry.right(kind) for entry in group]
    found: dict[tuple[int, int], list[int]] = {}
    for a, b in permutations(range(len(group)), 2):
        samples = [sample for sample, good in right[a].items() if good and right[b].get(sample) is False]
        counts[kind, a, b] = len(samples)
        if kind != NATURAL:
            kept = group[b].examples
            here = set() if kept is None else set(kept.index[np.asarray(kept.threat) == kind].tolist())
            samples = [sample for sample in samples if sample in here]
        found[a, b] = samples
    return found


def _by_turns(found: dict[tuple[int, int], list[int]], most: int) -> list[tuple[int, int, int]]:
    """One sample of each pair of networks in turn, without repeats."""
    chosen: list[tuple[int, int, int]] = []
    seen: set[int] = set()
    queues = {pair: iter(samples) for pair, samples in found.items() if samples}
    while queues and len(chosen) < most:
        for pair in list(queues):
            sample = next((s for s in queues[pair] if s not in seen), None)
            if sample is None:
                del queues[pair]
            elif len(chosen) < most:
                seen.add(sample)
                chosen.append((*pair, sample))
    return chosen


class _Viewer:
    """Loads networks and images when they are needed, and reports what failed."""

    def __init__(self, device: str, trust_code: bool) -> None:
        self.device, self.trust_code = device, trust_code
        self.models: dict[int, nn.Module | None] = {}
        self.images: dict[str, Images | None] = {}
        self.notes: dict[str, None] = {}

    def case(self, kind: str, right: Recorded, wrong: Recorded, sample: int) -> Case | None:
        """The image and what both networks predict for it; None if it cannot be shown as it was evaluated."""
        image = self._natural(wrong, sample) if kind == NATURAL else _adversarial(wrong, kind, sample)
        if image is None:
            return None
        answers = [self._look(entry.network, image) for entry in (right, wrong)]
        if any(answer is None for answer in answers):
            return None
        (right_says, right_map), (wrong_says, wrong_map) = (answer for answer in answers if answer is not None)
        position = wrong.verdicts.position(sample)
        label = int(wrong.verdicts.label[position])
        recorded_answer = int(wrong.verdicts.predicted[position])
        if (kind == NATURAL and wrong_says != recorded_answer) or wrong_says == label:
            self._note(f"{wrong.network.name}: the weights are no longer those that were evaluated; evaluate it again")
            return None
        return Case(
            kind=kind,
            sample=sample,
            label=wrong.class_name(label),
            image=image,
            right=right.network,
            wrong=wrong.network,
            right_says=right.class_name(right_says),
            wrong_says=wrong.class_name(wrong_says),
            right_map=right_map,
            wrong_map=wrong_map,
        )

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def _natural(self, entry: Recorded, sample: int) -> Floats | None:
        images = self._test_images(entry)
        if images is None or sample >= len(images):
            return None
        position = entry.verdicts.position(sample)
        batch = images.batch(torch.tensor([sample]))
        if int(batch.y[0]) != int(entry.verdicts.label[position]):
            self._note(f"{entry.header.split}: the images are no longer those that were evaluated; evaluate again")
            return None
        return np.asarray(batch.x[0].float().cpu().numpy(), np.float32)

    def _test_images(self, entry: Recorded) -> Images | None:
        split, data = entry.header.split, entry.network.run.recipe.data
        if split not in self.images:
            self.images[split] = None
            if split not in {f"{data.name}-test", f"{data.name}-train"}:
                self._note(f"natural images are not shown: {split} is not the data set of {entry.network.run.name}")
                return None
            try:
                splits = load_splits(data.model_copy(update={"extra": None}), trust_code=self.trust_code)
            except (GeneralistError, OSError) as error:
                self._note(f"natural images are not shown: {error}")
                return None
            self.images[split] = splits.test if split.endswith("-test") else splits.train
        return self.images[split]

    def _look(self, network: Network, image: Floats) -> tuple[int, Floats | None] | None:
        """What a network predicts for an image, and where it looks."""
        model = self._model(network)
        if model is None:
            return None
        like = next(model.parameters(), torch.zeros(()))
        x = torch.from_numpy(image)[None].to(like.device, like.dtype)
        try:
            with torch.no_grad():
                answer = int(model(x).argmax(1))
        except RuntimeError as error:  # images of another size than the network's own
            self._note(f"{network.name}: images are not shown: {error!s:.200}")
            return None
        try:
            return answer, np.asarray(gradcam(model, x)[0].cpu().numpy(), np.float32)
        except GeneralistError as error:
            self._note(f"{network.name}: no Grad-CAM: {error}")
            return answer, None

    def _model(self, network: Network) -> nn.Module | None:
        if network.series not in self.models:
            self.models[network.series] = None
            try:
                source = (network.mixture, "best") if network.mixture else (network.run.path, network.row.subject)
                self.models[network.series] = api.load(
                    source[0], which=source[1], device=self.device, trust_code=self.trust_code
                )
            except GeneralistError as error:
                self._note(f"{network.name}: images are not shown: {error}")
        return self.models[network.series]


def _adversarial(entry: Recorded, threat: str, sample: int) -> Floats | None:
    kept = entry.examples
    if kept is None:
        return None
    return next((kept.adversarial[i] for i in _positions(kept, threat) if kept.index[i] == sample), None)


def _positions(examples: Examples, threat: str) -> Iterator[int]:
    yield from (i for i, name in enumerate(examples.threat) if name == threat)
