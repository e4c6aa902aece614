"""The directory of an evaluation: which one it is, what may be resumed, and how parts are joined."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from generalist.core.errors import RunError
from generalist.core.files import write_json
from generalist.evaluation.identity import key_of, slug
from generalist.evaluation.records import SUMMARY, Header, difference, read_header, read_records, shard_files
from generalist.evaluation.summary import summarise
from generalist.evaluation.verdicts import Verdicts

SHORTEST_LINE = 40
"""Bytes of the least that records say of a sample."""
MOST_VERDICTS = 1 << 31
"""Rounds of all steps times samples: AutoAttack has some twenty rounds in a threat model."""


def choose_folder(out: Path, header: Header, *, resume: bool) -> Path:
    """The evaluation's own directory below `out`.

    Where `resume` finds no records of this evaluation but an unfinished one of the same subject and images, the user
    means that one, and has changed something.
    """
    folder = out / key_of(header.subject, header.split, header.identity)
    if resume and not shard_files(folder) and out.is_dir():
        prefix = f"{slug(header.subject)}-{slug(header.split)}-"
        for other in sorted(out.iterdir()):
            found = _any_header(other) if other.name.startswith(prefix) and not (other / SUMMARY).is_file() else None
            if found is not None:
                raise RunError(
                    f"the unfinished evaluation {other} has other settings ({difference(found, header)}): "
                    "repeat its settings to resume it, or leave --resume out"
                )
    return folder


def check_shards(folder: Path, header: Header) -> None:
    """Refuse to mix parts of different sizes in one directory."""
    for _, shards in shard_files(folder):
        if shards != header.shards:
            raise RunError(
                f"{folder} is evaluated in {shards} shards, not {header.shards}: go on with these, or choose another "
                "--out (as for corruptions, which are measured without shards)"
            )


def read_shards(folder: Path) -> tuple[Header, Verdicts]:
    """What the records of all parts in a directory say; it may be unfinished, but nothing may be missing or foreign."""
    files = shard_files(folder)
    if not files:
        raise RunError(f"{folder} has no records to merge: evaluate with --shards i/n first")
    headers = {part: _header(path) for part, path in files.items()}
    first = headers[min(headers)]
    for part, path in files.items():
        if part[1] != first.shards or headers[part].shared() != first.shared():
            raise RunError(f"{path} belongs to another evaluation ({difference(first, headers[part])}): remove it")
    if missing := set(range(1, first.shards + 1)) - {shard for shard, _ in files}:
        raise RunError(f"{folder} lacks shard {min(missing)}/{first.shards}: evaluate it, or copy its records here")
    _check_size(folder, first, files.values())
    verdicts = Verdicts(first.whole_index(), first.rounds)
    for path in files.values():
        read_records(path, verdicts)
    return first, verdicts


def _check_size(folder: Path, header: Header, files: Iterable[Path]) -> None:
    """Refuse a header that claims more than its files hold, before memory is allocated for it."""
    samples = header.images if header.indices is None else len(header.indices)
    if samples * SHORTEST_LINE > sum(path.stat().st_size for path in files):
        raise RunError(f"{folder} is unfinished or damaged: it has fewer lines than samples; evaluate with --resume")
    if samples * sum(header.rounds.values()) > MOST_VERDICTS:
        raise RunError(f"{folder} is damaged: no evaluation has so many rounds")


def merge(folder: Path) -> dict[str, Any]:
    """Join the parts in a directory into the summary that one process would have written; it is written, too."""
    header, verdicts = read_shards(folder)
    if count := verdicts.unfinished(header.plan()):
        raise RunError(f"{folder} is not finished: {count} samples are left; go on with --shards i/n --resume")
    summary = summarise(header, verdicts)
    write_json(folder / SUMMARY, summary)
    return {**summary, "directory": str(folder)}


def merge_below(path: Path) -> dict[str, Any]:
    """`merge` of the directory itself, or of the one evaluation below it that consists of shards."""
    if shard_files(path):
        return merge(path)
    places = [folder for folder in (path, path / "evaluation") if folder.is_dir()]
    found = [sub for place in places for sub in sorted(place.iterdir()) if any(n > 1 for _, n in shard_files(sub))]
    unmerged = [folder for folder in found if not (folder / SUMMARY).is_file()] or found
    if not unmerged:
        raise RunError(f"{path} has no records to merge: evaluate with --shards i/n first")
    if len(unmerged) > 1:
        raise RunError(f"{path} has several evaluations in shards: name one of {', '.join(map(str, unmerged[:5]))}")
    return merge(unmerged[0])


def _header(path: Path) -> Header:
    header = read_header(path)
    if header is None:
        raise RunError(f"{path} has no complete line: evaluate that shard again")
    return header


def _any_header(folder: Path) -> Header | None:
    found = [read_header(path) for path in shard_files(folder).values()]
    return next((header for header in found if header is not None), None)
