"""Corruptions and perturbation sequences as part of an evaluation: which ones, on which images, stored where."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from generalist.core.errors import GeneralistError
from generalist.core.files import write_json
from generalist.data.cifar_c import CifarC, CifarP, load_cifar_c, load_cifar_p
from generalist.data.corruptions import COMMON, CORRUPTIONS, EXTRA, SEQUENCES, corrupt, perturb_sequence
from generalist.data.sets import Images
from generalist.evaluation.classifier import device_of
from generalist.evaluation.corruptions import STABILITY, Listener, evaluate_corruptions, evaluate_perturbations
from generalist.evaluation.counts import Counts, open_counts
from generalist.evaluation.identity import fingerprint
from generalist.evaluation.suite import Moment

FILE = "corruptions.json"
FAMILIES = {"common": COMMON, "extra": EXTRA, "all": (*COMMON, *EXTRA)}
_SHARED = ("weights", "data", "samples", "seed", "version")
"""The entries of an evaluation's identity on which counts depend as well."""


@dataclass(frozen=True)
class Shift:
    """What to measure in addition to the natural images."""

    corruptions: tuple[str, ...] = ()
    """Names of corruptions, each at severities 1 to 5."""

    perturbations: tuple[str, ...] = ()
    """Names of sequences of small perturbations."""

    official: Path | None = None
    """The folder with the official CIFAR-C and CIFAR-P files; None: generated from the images."""

    grouped: frozenset[str] = frozenset()
    """Those of the corruptions that came with a group and were not named."""

    left_out: tuple[str, ...] = ()
    """Those of a group that the images cannot have."""

    def __bool__(self) -> bool:
        return bool(self.kinds)

    @property
    def kinds(self) -> list[str]:
        """What is measured, in this order."""
        wanted = {"corruptions": self.corruptions, "perturbations": self.perturbations}
        return [kind for kind, names in wanted.items() if names]

    @property
    def notes(self) -> list[str]:
        """Remarks for readers of the result."""
        if not self.left_out:
            return []
        return [f"corruptions left out, as grey images have no colours: {', '.join(self.left_out)}"]


@dataclass(frozen=True)
class Keep:
    """Where counts are kept, and what they depend on."""

    folder: Path
    """The directory of the evaluation."""
    identity: Mapping[str, Any]
    """That of the attacks: weights, data, samples and so on."""
    resume: bool


def parse_shift(
    corruptions: str | Sequence[str] | None, perturbations: bool | Sequence[str], official: str | Path | None
) -> Shift:
    """A user's choice: `common`, `extra`, `all` or names of corruptions; the usual ten sequences, or names."""
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
    grouped = frozenset(names) - frozenset(words)
    return Shift(tuple(dict.fromkeys(names)), tuple(dict.fromkeys(sequences)), folder, grouped)


def fit_shift(images: Images, shift: Shift) -> Shift:
    """The part of the shift that fits these images. Corruptions that do not fit are left out if they came with a group,
    and refused if they were named. This is checked here because the attacks, which come first, may take hours."""
    if images.shape[0] != 3:
        left_out = tuple(name for name in shift.corruptions if name in shift.grouped and CORRUPTIONS.get(name).colour)
        kept = tuple(name for name in shift.corruptions if name not in left_out)
        shift = replace(shift, corruptions=kept, left_out=left_out)
    if shift:
        _check(images, shift)
    return shift


def _check(images: Images, shift: Shift) -> None:
    """Refuse what cannot be measured on these images: missing files, corruptions of colour on grey images."""
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
    keep: Keep | None = None,
    after: int = 0,
    listener: Callable[[Moment], None] = lambda moment: None,
) -> dict[str, Any]:
    """Accuracies under the shift; `after` is the number of attack steps before it, for the listener.

    With `keep`, every batch is recorded in its folder as it is counted, and the results are written there at the end,
    including those measured earlier if the evaluation is resumed.
    """
    if keep is not None and keep.resume:
        shift = _with_earlier(shift, keep.folder / FILE)
    asked = {
        "corruptions": list(shift.corruptions),
        "perturbations": list(shift.perturbations),
        "official": shift.official is not None,
    }
    device = device_of(model)
    here = images.to(device)
    settings: dict[str, Any] = {"index": index, "seed": seed, "batch_size": batch_size}
    found: dict[str, Any] = {"asked": asked, "notes": shift.notes}
    if names := shift.corruptions:
        corrupted = here if shift.official is None else _official_c(shift.official, images, names).to(device)
        tell = _teller(listener, shift, "corruptions", after)
        with _counts(keep, "corruptions", corrupted, batch_size) as counts:
            result = evaluate_corruptions(model, corrupted, names=names, counts=counts, listener=tell, **settings)
        found["corruptions"] = result.to_dict()
    if names := shift.perturbations:
        frames = here if shift.official is None else _official_p(shift.official, images, names).to(device)
        tell = _teller(listener, shift, "perturbations", after)
        with _counts(keep, "perturbations", frames, batch_size) as counts:
            stable = evaluate_perturbations(model, frames, names=names, counts=counts, listener=tell, **settings)
        found["perturbations"] = stable.to_dict()
    if keep is not None:
        write_json(keep.folder / FILE, found)
    return found


def _with_earlier(shift: Shift, file: Path) -> Shift:
    """The shift, extended by what was asked for before, which is counted already. Not for official files, nor if the
    earlier file is damaged, which is then written anew."""
    try:
        asked = json.loads(file.read_text())["asked"] if file.is_file() else {}
        corruptions, perturbations = list(asked.get("corruptions", [])), list(asked.get("perturbations", []))
        official = bool(asked.get("official", False))
    except (ValueError, KeyError, TypeError, AttributeError):
        return shift
    if official or shift.official is not None:
        return shift
    before = [name for name in corruptions if name in CORRUPTIONS.names()]
    sequences = [name for name in perturbations if name in SEQUENCES.names()]
    return replace(
        shift,
        corruptions=tuple(dict.fromkeys([*shift.corruptions, *before])),
        perturbations=tuple(dict.fromkeys([*shift.perturbations, *sequences])),
    )


def before_shift(listener: Callable[[Moment], None], shift: Shift) -> Callable[[Moment], None]:
    """The listener for the attacks, which come first; it adds the shift's steps to their total."""
    return lambda moment: listener(replace(moment, steps=moment.steps + len(shift.kinds)))


def _teller(listener: Callable[[Moment], None], shift: Shift, kind: str, after: int) -> Listener:
    step, steps = after + 1 + shift.kinds.index(kind), after + len(shift.kinds)

    def tell(done: int, total: int, right: int) -> None:
        # Sequences have a prediction per frame, so correct ones cannot be shown as a number of images.
        listener(Moment(kind, step, steps, done, total, right if kind == "corruptions" else None))

    return tell


def _counts(
    keep: Keep | None, kind: str, images: Images | CifarC | CifarP, batch_size: int
) -> AbstractContextManager[Counts]:
    """The counts so far, in a file for all counts with the same identity; without `keep`, empty and in memory."""
    if keep is None:
        return nullcontext(Counts())
    identity = {
        "kind": kind,
        **{name: keep.identity[name] for name in _SHARED},
        "official": images.checksum() if isinstance(images, CifarC | CifarP) else None,
        "batch_size": batch_size,
    }
    path = keep.folder / f"{kind}-{fingerprint(identity)[:12]}.jsonl"
    return open_counts(path, identity, resume=keep.resume)


def _official_c(root: Path, images: Images, names: Sequence[str]) -> CifarC:
    files = load_cifar_c(root, classes=_cifar(images), names=names)
    _check_same(files.labels, images)
    return files


def _official_p(root: Path, images: Images, names: Sequence[str]) -> CifarP:
    return load_cifar_p(root, classes=_cifar(images), names=names, labels=images.labels.cpu())


def _cifar(images: Images) -> Literal[10, 100]:
    known: dict[int, Literal[10, 100]] = {10: 10, 100: 100}
    if images.shape != (3, 32, 32) or len(images.classes) not in known:
        raise GeneralistError(f"official files exist only for the test images of CIFAR-10 and -100, not {images.name}")
    return known[len(images.classes)]


def _check_same(labels: Tensor, images: Images) -> None:
    if not torch.equal(labels.cpu(), images.labels.cpu()):
        raise GeneralistError(
            f"the official files are for other images than {images.name}: give --data its test images"
        )
