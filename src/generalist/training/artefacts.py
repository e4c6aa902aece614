"""Weights files: the global learner's, and snapshots of every learner that mixing and branching start from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from generalist.core.errors import GeneralistError, RecipeError, RunError
from generalist.core.files import write_bytes
from generalist.core.run import AVERAGE, GLOBAL, PART, RunDirectory
from generalist.models import ModelOptions
from generalist.tensors.flat import Flat
from generalist.training.averaging import Average
from generalist.training.global_learner import GlobalLearner, mix
from generalist.training.learner import Learner

UPDATES = "updates"
"""How often an average was updated: a branch continues this count, as a new one would soon forget the old average."""

FOREIGN = "; weights of others go into their network in Python: generalist.evaluate(model, ...) takes any module"
"""What to do with a file that this library has not written."""

SHARE = "share"
"""How much of the global learner a learner's part makes up."""

OTHER_NORMALIZE = "it differs from that of {}, whose numbers come with its weights: set it to those, or start fresh"


def save_weights(path: Path, state: dict[str, Tensor], about: dict[str, Any], *, half: bool = False) -> None:
    """A safetensors file; `about` travels in its header."""
    if half:
        state = {name: t.half() if _fits_half(t) else t for name, t in state.items()}
    write_bytes(path, to_bytes(state, metadata={"generalist": json.dumps(about)}))


def _fits_half(tensor: Tensor) -> bool:
    """Integers stay, and so do values (variances, say) that half precision would turn into inf."""
    return tensor.is_floating_point() and bool((tensor.abs() <= torch.finfo(torch.float16).max).all())


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(state dict, what its header says of it). A file of another origin has an empty header."""
    if not path.is_file():
        raise RunError(f"there is no weights file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("generalist", "{}"))
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    except Exception as error:  # a crafted header makes its reader, or torch, raise almost anything
        hint = FOREIGN if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".tar") else ""
        raise RunError(
            f"{path} is not a complete safetensors file, as runs and exports write them: {error}{hint}"
        ) from error
    if not isinstance(about, dict):
        raise RunError(f"{path} has a damaged header")
    return state, about


def save_snapshot(
    run: RunDirectory,
    epoch: int,
    learners: Sequence[Learner],
    global_learner: GlobalLearner,
    about: dict[str, Any],
    *,
    half: bool,
) -> None:
    """Every learner, its average and its part, and last the global learner: with that file a snapshot is complete."""
    folder = run.snapshots / str(epoch)
    for learner in learners:
        save_weights(folder / f"{learner.name}.safetensors", learner.flat.state_dict(), about, half=half)
        if average := learner.average:
            state = learner.flat.state_dict(average.vector, average.counters)
            counted = {**about, UPDATES: int(average.count.item())}
            save_weights(folder / f"{learner.name}{AVERAGE}.safetensors", state, counted, half=half)
        if part := learner.part:
            state = learner.flat.state_dict(part.vector, part.counters)
            save_weights(
                folder / f"{learner.name}{PART}.safetensors", state, {**about, SHARE: float(part.share)}, half=half
            )
    save_global(folder / f"{GLOBAL}.safetensors", learners, global_learner, about, half=half)


def save_global(
    path: Path,
    learners: Sequence[Learner],
    global_learner: GlobalLearner,
    about: dict[str, Any],
    *,
    half: bool = False,
) -> None:
    """The global learner, with the number of its updates, which a run that starts from it continues."""
    state = learners[0].flat.state_dict(global_learner.vector, global_learner.counters)
    save_weights(path, state, {**about, UPDATES: int(global_learner.count.item())}, half=half)


def split_run_name(text: str) -> tuple[RunDirectory, int | None]:
    """`RUN` or `RUN@EPOCH`."""
    if RunDirectory(Path(text)).exists():  # a path may have an @ of its own
        return RunDirectory(Path(text)), None
    path, at, epoch = text.rpartition("@")
    if at and path and re.fullmatch(r"\d{1,9}", epoch, re.ASCII):
        return RunDirectory(Path(path)).require(), int(epoch)
    return RunDirectory(Path(text)).require(), None


def branch_files(text: str, names: Sequence[str]) -> dict[str, Path]:
    """The weights files of `RUN[@EPOCH]` for the global learner and for `names`, as far as they are kept.

    A learner that the other run does not have starts from the global learner.
    """
    run, epoch = split_run_name(text)
    files = files_of(run, epoch, names)
    folder = files[GLOBAL].parent
    if folder != run.path and (lost := learners_of(run).intersection(names) - files.keys()):
        raise RunError(
            f"{folder / min(lost)}.safetensors is missing: put it back, or start from one network that is left, as "
            f"with {run.path}@{folder.name}#{GLOBAL}"
        )
    return files


def files_of(run: RunDirectory, epoch: int | None, names: Sequence[str]) -> dict[str, Path]:
    """Like `branch_files`, for this epoch of a run or for its last snapshot."""
    epochs = [e for e in run.snapshot_epochs() if (run.snapshots / str(e) / f"{GLOBAL}.safetensors").is_file()]
    if epoch is not None and epoch not in epochs:
        kept = ", ".join(map(str, epochs)) or "none"
        raise RunError(f"{run.path} has no snapshot of epoch {epoch}; kept: {kept} (see train.snapshots.every)")
    if not epochs:
        path = run.last if run.last.is_file() else run.model
        if not path.is_file():
            raise RunError(f"{run.path} has neither snapshots nor weights to start from")
        return {GLOBAL: path}
    folder = run.snapshots / str(epoch if epoch is not None else epochs[-1])
    wanted = [GLOBAL, *names, *(name + ending for name in names for ending in (AVERAGE, PART))]
    return {name: path for name in wanted if (path := folder / f"{name}.safetensors").is_file()}


def learners_of(run: RunDirectory) -> set[str]:
    """The names of a run's learners, according to its log."""
    records = run.read_metrics()
    gammas = records[-1].get("gamma") if records else None
    return set(gammas) if isinstance(gammas, dict) else set()


def split_subject(text: str) -> tuple[str, str | None]:
    """`SOURCE[#SUBJECT]` as its two parts; a path may have a # of its own."""
    parts = re.fullmatch(r"(.*)#([\w-]*(?:\.\w*)?)", text, re.DOTALL)
    if parts is None or RunDirectory(Path(text)).exists():
        return text, None
    return parts[1], parts[2]


def artefact_file(text: str, subject: str) -> Path:
    """The weights file of `RUN[@EPOCH][#SUBJECT]`; without `#`, of the learner `subject` or else the global one."""
    source, wanted = split_subject(text)
    if not source:
        raise RunError(f"{text!r} names no run: write it as RUN[@EPOCH][#SUBJECT]")
    files = branch_files(source, [subject if wanted is None else wanted])
    if wanted is None:
        return files.get(subject, files[GLOBAL])
    if wanted not in files:
        raise RunError(f"{source} keeps no {wanted!r}; say global or the name of one of its learners")
    return trained(files[wanted])


def trained(path: Path) -> Path:
    """The file of a network, unless it is the part of a learner that has given nothing yet: that is a fresh network."""
    if path.stem.endswith(PART) and share_of(load_weights(path)[1], path) == 0:
        raise RunError(f"{path}: by then the learner had given nothing to the global one, so there is no part of it")
    return path


def weights_of(source: str, learners: Sequence[Learner], locate: Callable[[str], str]) -> dict[str, Tensor]:
    """The weights that an objective asks for: those of another learner of this run (`#NAME`) as they are now, to be
    copied at once, or those of an earlier stage or run."""
    for learner in learners:
        if source == f"#{learner.name}":
            return learner.flat.views()
        if source == f"#{learner.name}{AVERAGE}" and learner.average:
            return learner.flat.views(learner.average.vector, learner.average.counters)
    return load_weights(artefact_file(locate(source), GLOBAL))[0]


@torch.no_grad()
def start_from(
    files: dict[str, Path],
    learners: Sequence[Learner],
    global_learner: GlobalLearner,
    gammas: Sequence[float],
    model: ModelOptions,
) -> list[dict[str, Any]]:
    """Load weights into learners and global learner; momenta stay zero. Returns what each file says of itself.

    A learner without a file starts from the global one's; where that has none either, it stays as it is. A global
    learner without a file becomes the mix of the learners, by `gammas`. `model` is the recipe's.
    """
    abouts = []
    for learner in learners:
        if path := files.get(learner.name, files.get(GLOBAL)):
            vector, counters, about = _read(path, learner.flat, model)
            abouts.append(about)
            learner.flat.load(vector, counters)
        if learner.average:
            learner.average.restart(learner.flat)
            if average := files.get(learner.name + AVERAGE):
                _fill(learner.average, *_read(average, learner.flat, model))
    if GLOBAL in files:
        vector, counters, about = _read(files[GLOBAL], learners[0].flat, model)
        abouts.append(about)
        _fill(global_learner, vector, counters, about)
    else:
        mixed = mix([learner.flat.vector for learner in learners], gammas)
        _fill(global_learner, mixed, learners[global_learner.lead].flat.counters, {})
    _start_parts(files, learners, global_learner, gammas)
    return abouts


def read_weights(path: Path, flat: Flat) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Vector, counters and header of a weights file of this architecture."""
    state, about = load_weights(path)
    try:
        return *flat.read(state), about
    except GeneralistError as error:
        raise RunError(f"{path}: {error}") from None


def _read(path: Path, flat: Flat, model: ModelOptions) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The same of weights that are trained further, which must be of this `model`'s normalization, too."""
    vector, counters, about = read_weights(path, flat)
    before = about.get("model")
    if isinstance(before, dict) and before.get("normalize") != model.model_dump(mode="json")["normalize"]:
        raise RecipeError("model.normalize", OTHER_NORMALIZE.format(path))
    return vector, counters, about


def _start_parts(
    files: dict[str, Path], learners: Sequence[Learner], global_learner: GlobalLearner, gammas: Sequence[float]
) -> None:
    """Start from the parts that were kept, if they add up to the global learner. Else every part starts as the global
    learner, or if that has just been mixed from the learners, as the learner's own weights."""
    kept = _kept_parts(files, learners) if GLOBAL in files else {}
    for learner, gamma in zip(learners, gammas, strict=True):
        if learner.part is None:
            continue
        if kept:
            state, share = kept[learner.name]
            learner.part.fill(*learner.flat.read(state), share)
        elif GLOBAL in files:
            learner.part.fill(global_learner.vector, global_learner.counters, gamma)
        else:
            learner.part.fill(learner.flat.vector, learner.flat.counters, gamma)


def _kept_parts(files: dict[str, Path], learners: Sequence[Learner]) -> dict[str, tuple[dict[str, Tensor], float]]:
    """Each learner's part and its share; empty unless these are all the parts of the global learner."""
    found = {}
    for learner in learners:
        if (path := files.get(learner.name + PART)) is None:
            return {}
        state, about = load_weights(path)
        found[learner.name] = state, share_of(about, path)
    return found if abs(sum(share for _, share in found.values()) - 1) < 1e-6 else {}


def share_of(about: dict[str, Any], path: Path) -> float:
    """The share of the global learner that a part makes up, according to its header."""
    share = about.get(SHARE)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1 + 1e-6:
        raise RunError(f"{path} is damaged: its header says no share")
    return float(share)


def unseen(about: dict[str, Any], data: str, held_out: set[int]) -> set[int]:
    """The held-out images that neither these weights nor their ancestors were trained on; all, if on other data."""
    if about.get("data") != data:
        return held_out
    kept = about.get("unseen")
    return {i for i in kept if isinstance(i, int)} if isinstance(kept, list) else set()


def _fill(average: GlobalLearner | Average, vector: Tensor, counters: Tensor, about: dict[str, Any]) -> None:
    average.vector.copy_(vector)
    average.counters.copy_(counters)
    updates = about.get(UPDATES, 0)
    average.count.fill_(updates if isinstance(updates, int) and 0 <= updates < 2**53 else 0)
