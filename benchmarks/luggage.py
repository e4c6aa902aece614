"""What experiments have made so far, in files small enough to carry off a machine that may be lost, and back.

        python benchmarks/luggage.py pack runs/headline --into parcels        # as often as you like: packs what is new
        python benchmarks/luggage.py unpack parcels --into runs/headline      # elsewhere: experiments.py can continue

Small files (records, logs, recipes, metrics, summaries of evaluations) are packed each time. The networks that a run
ends with, and the global learners of its earlier snapshots, which branches start from, are packed once, in half
precision and as many as `--mib` allows, the oldest first; the rest follows the next time (`--again` starts over).
Unpacked, they are in single precision again, but their weights are rounded, and environment.json says so (`rounded`).
Checkpoints stay behind: a training that has not ended cannot be continued, but branches from its snapshots can.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from generalist.console import clear_endings
from generalist.core.errors import GeneralistError
from generalist.core.files import write_bytes, write_json
from generalist.core.run import GLOBAL
from generalist.training.artefacts import load_weights, save_weights

MIB = 1 << 20
SMALL = ("*.json", "steps.jsonl", "logs/*.log", "runs/*/recipe.yaml", "runs/*/environment.json", "runs/*/metrics.jsonl")
RESULTS = ("runs/*/evaluation/*/summary.json", "runs/*/evaluation/*/corruptions.json")
SNAPSHOT = f"snapshots/*/{GLOBAL}.safetensors"
NETWORKS = ("runs/*/model.safetensors", "runs/*/last.safetensors", f"runs/*/{SNAPSHOT}")
MEMORY = ".luggage.json"
"""In the experiments' directory: which networks are packed already, by path and modification time."""
DIGEST = hashlib.sha256().digest_size
PARCEL = re.compile(r"luggage-(\d{4})-(\d+)-of-(\d+)\.part")


def pack(source: Path, into: Path, *, mib: float = 48, piece_mib: float = 15, again: bool = False) -> list[Path]:
    """Write the next parcel; returns its pieces."""
    if not (source / "steps.jsonl").is_file() and not (source / "runs").is_dir():
        raise GeneralistError(f"{source} holds no experiments: neither steps.jsonl nor runs")
    if min(mib, piece_mib) <= 0:
        raise GeneralistError(f"--mib and --piece-mib are above 0, not {mib:g} and {piece_mib:g}")
    memory = source / MEMORY
    known: dict[str, Any] = json.loads(memory.read_text()) if memory.is_file() else {"parcels": 0, "networks": {}}
    packed: dict[str, int] = {} if again else known["networks"]
    buffer, inside, room = io.BytesIO(), dict[bytes, str](), mib * MIB
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as parcel:
        for path in found(source, SMALL + RESULTS):
            parcel.add(path, arcname=path.relative_to(source).as_posix(), recursive=False)
        for path in sorted(found(source, NETWORKS), key=lambda path: path.stat().st_mtime_ns):  # the oldest first
            name, changed = path.relative_to(source).as_posix(), path.stat().st_mtime_ns
            if packed.get(name) == changed:
                continue
            content = rounded(path)
            if len(content) > mib * MIB:
                raise GeneralistError(f"--mib {mib:g}: {name} alone has {len(content) / MIB:.1f} MiB; allow more")
            member = tarfile.TarInfo(name)
            member.mtime = changed / 1e9
            if content in inside:  # the best epoch was the last, which has a snapshot as well
                member.type, member.linkname = tarfile.LNKTYPE, inside[content]
                parcel.addfile(member)
            elif len(content) <= room:
                member.size = len(content)
                room -= len(content)
                parcel.addfile(member, io.BytesIO(content))
                inside[content] = name
            else:
                continue
            packed[name] = changed
    number = known["parcels"] + 1
    content = buffer.getvalue()
    pieces = cut(hashlib.sha256(content).digest() + content, max(1, int(piece_mib * MIB)))
    paths = [into / f"luggage-{number:04d}-{i}-of-{len(pieces)}.part" for i in range(1, len(pieces) + 1)]
    for path, piece in zip(paths, pieces, strict=True):
        write_bytes(path, piece)
    write_json(memory, {"parcels": number, "networks": packed})
    return paths


def found(source: Path, patterns: Sequence[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(path for path in source.glob(pattern) if path.is_file() and path.name != MEMORY)


def rounded(path: Path) -> bytes:
    """The file of weights in half precision; its `about` is unchanged."""
    state, about = load_weights(path)
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / path.name
        save_weights(small, state, about, half=True)
        return small.read_bytes()


def cut(content: bytes, size: int) -> list[bytes]:
    return [content[start : start + size] for start in range(0, len(content), size)]


def unpack(source: Path, into: Path) -> list[str]:
    """Unpack all parcels, later ones over earlier ones; returns the networks among their files."""
    unpacked = []
    for number, pieces in parcels(source).items():
        whole = b"".join(piece.read_bytes() for piece in pieces)
        digest, content = whole[:DIGEST], whole[DIGEST:]
        if hashlib.sha256(content).digest() != digest:
            raise GeneralistError(
                f"parcel {number} in {source} is damaged: delete {pieces[0].name} and its others, and pack --again"
            )
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as parcel:
            for member in parcel:
                lay_out(parcel, member, into)
                if member.name.endswith(".safetensors"):
                    unpacked.append(member.name)
    for run in sorted({into.joinpath(*PurePosixPath(name).parts[:2]) for name in unpacked}):
        environment = run / "environment.json"
        write_json(environment, json.loads(environment.read_text()) | {"rounded": "float16"})
    return unpacked


def parcels(source: Path) -> dict[int, list[Path]]:
    """The pieces of each parcel, in order; an error if one is missing."""
    known = dict[int, dict[int, Path]]()
    lengths = dict[int, int]()
    for path in sorted(source.glob("luggage-*.part")):
        if match := PARCEL.fullmatch(path.name):
            number, piece, length = map(int, match.groups())
            known.setdefault(number, {})[piece] = path
            lengths[number] = length
    if not known:
        raise GeneralistError(f"{source} holds no parcels (luggage-0001-1-of-2.part and so on)")
    for number, length in lengths.items():
        if missing := [str(i) for i in range(1, length + 1) if i not in known[number]]:
            raise GeneralistError(
                f"{source}: of parcel {number} piece {', '.join(missing)} is missing; without it delete the others, "
                "and pack --again"
            )
    return {number: [pieces[i] for i in sorted(pieces)] for number, pieces in sorted(known.items())}


def lay_out(parcel: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    """Unpack one file, if it is one that `pack` packs."""
    if not (member.isfile() or member.islnk()) or not is_ours(member.name):
        raise GeneralistError(f"a parcel holds {member.name!r}, which is none of the files that are packed")
    path, stream = into / member.name, parcel.extractfile(member)
    assert stream is not None, "it is a file, or has the content of one"
    write_bytes(path, stream.read())
    if path.suffix == ".safetensors":
        state, about = load_weights(path)
        save_weights(path, {key: t.float() if t.dtype == torch.half else t for key, t in state.items()}, about)
    os.utime(path, (member.mtime, member.mtime))  # measurements count if they are younger than the weights


def is_ours(name: str) -> bool:
    parts = PurePosixPath(name).parts
    patterns = (pattern.split("/") for pattern in SMALL + RESULTS + NETWORKS)
    return ".." not in parts and any(
        len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern)) for pattern in patterns
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="what is new, into a folder")
    packing.add_argument("source", type=Path, help="the --out of experiments.py")
    packing.add_argument("--mib", type=float, default=48, help="of networks in a parcel, at most [%(default)s]")
    packing.add_argument("--piece-mib", type=float, default=15, help="of each of its files, at most [%(default)s]")
    packing.add_argument("--again", action="store_true", help="also what was packed before")
    unpacking = commands.add_parser("unpack", help="lay out all parcels of a folder")
    unpacking.add_argument("source", type=Path, help="the folder with the parcels")
    for each in (packing, unpacking):
        each.add_argument("--into", type=Path, required=True)
    options = parser.parse_args(arguments)
    with clear_endings():
        if options.command == "pack":
            limits = {"mib": options.mib, "piece_mib": options.piece_mib}
            for path in pack(options.source, options.into, **limits, again=options.again):
                print(f"{path}  {path.stat().st_size / MIB:.1f} MiB")
        else:
            for name in unpack(options.source, options.into):
                print(name)


if __name__ == "__main__":
    main()
