"""Corruptions and perturbation sequences as part of an evaluation: which, of which images, kept where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from generalist.core.errors import GeneralistError
from generalist.core.files import write_json
from generalist.data.cifar_c import CifarC, CifarP, load_cifar_c, load_cifar_p
from generalist.data.corruptions import COMMON, CORRUPTIONS, EXTRA, SEQUENCES, corrupt, perturb_sequence
from generalist.data.sets import Images
from generalist.evaluation.corruptions import STABILITY, evaluate_corruptions, evaluate_perturbations

FILE = "corruptions.json"
FAMILIES = {"common": COMMON, "extra": EXTRA, "all": (*COMMON, *EXTRA)}


@dataclass(frozen=True)
class Shift:
    """What to measure beside the images as they are."""

    corruptions: tuple[str, ...] = ()
    """Names of corruptions, each at severities 1 to 5."""

    perturbations: tuple[str, ...] = ()
    """Names of sequences of small perturbations."""

    official: Path | None = None
    """The folder with the official CIFAR-C and CIFAR-P files; None: generated from the images."""

    def __bool__(self) -> bool:
        return bool(self.corruptions or self.perturbations)


def parse_shift(
    corruptions: str | Sequence[str] | None, perturbations: bool | Sequence[str], official: str | Path | None
) -> Shift:
    """A user's wish: `common`, `extra`, `all` or names; all sequences of the usual mean, or names."""
    words = [corruptions] if isinstance(corruptions, str) else list(corruptions or ())
    names = [name for word in words for name in FAMILIES.get(word, (word,))]
    sequences = list(STABILITY if perturbations is True else perturbations or ())
    for name in names:
        CORRUPTIONS.get(name)
    for name in sequences:
        SEQUENCES.get(name)
    if official is not None and not (names or sequences):
        raise GeneralistError("official files need --corruptions or --perturbations to say what is read from them")
    folder = None if official is None else Path(official)
    return Shift(tuple(dict.fromkeys(names)), tuple(dict.fromkeys(sequences)), folder)


def check_shift(images: Images, shift: Shift) -> None:
    """Refuse what cannot be measured on these images (files that are not there, colours of grey images) beforehand:
    the attacks that come first may take hours."""
    if shift.official is not None:
        if shift.corruptions:
            _official_c(shift.official, images, shift.corruptions)
        if shift.perturbations:
            _official_p(shift.official, images, shift.perturbations)
        return
    first = images.batch(torch.zeros(1, dtype=torch.int64))
    for name in shift.corruptions:
        corrupt(first.x, name=name, severity=1, index=first.index, seed=0)
    for name in shift.perturbations:
        perturb_sequence(first.x, name=name, index=first.index, seed=0)


def measure_shift(
    model: nn.Module,
    images: Images,
    shift: Shift,
    *,
    index: Tensor | None,
    seed: int,
    batch_size: int,
    folder: Path | None,
    resume: bool,
) -> dict[str, Any]:
    """Accuracies under the shift; written to `folder`, and read from there where `resume` finds the same request."""
    asked = {
        "corruptions": list(shift.corruptions),
        "perturbations": list(shift.perturbations),
        "official": shift.official is not None,
    }
    if folder is not None and resume and (kept := _kept(folder / FILE, asked)) is not None:
        return kept
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    here = images.to(device)
    settings: dict[str, Any] = {"index": index, "seed": seed, "batch_size": batch_size}
    found: dict[str, Any] = {"asked": asked}
    if names := shift.corruptions:
        corrupted = here if shift.official is None else _official_c(shift.official, images, names).to(device)
        found["corruptions"] = evaluate_corruptions(model, corrupted, names=names, **settings).to_dict()
    if names := shift.perturbations:
        frames = here if shift.official is None else _official_p(shift.official, images, names).to(device)
        found["perturbations"] = evaluate_perturbations(model, frames, names=names, **settings).to_dict()
    if folder is not None:
        write_json(folder / FILE, found)
    return found


def _official_c(root: Path, images: Images, names: Sequence[str]) -> CifarC:
    files = load_cifar_c(root, classes=_cifar(images), names=names)
    _check_same(files.labels, images)
    return files


def _official_p(root: Path, images: Images, names: Sequence[str]) -> CifarP:
    return load_cifar_p(root, classes=_cifar(images), names=names, labels=images.labels.cpu())


def _cifar(images: Images) -> Literal[10, 100]:
    known: dict[int, Literal[10, 100]] = {10: 10, 100: 100}
    if images.shape != (3, 32, 32) or len(images.classes) not in known:
        raise GeneralistError(f"official files are there for the test images of CIFAR-10 and -100, not {images.name}")
    return known[len(images.classes)]


def _check_same(labels: Tensor, images: Images) -> None:
    if not torch.equal(labels.cpu(), images.labels.cpu()):
        raise GeneralistError(f"the official files are of other images than {images.name}: give --data its test images")


def _kept(path: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier evaluation left, if it was asked for the same."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # not there yet, or cut off: measured again
        return None
    return found if isinstance(found, dict) and found.get("asked") == asked else None
