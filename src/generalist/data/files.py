"""Where a data set's files lie below the root."""

from __future__ import annotations

from pathlib import Path

from generalist.core.errors import DataError


def data_directory(root: Path, name: str, markers: list[str], *, own_only: bool = False) -> Path:
    """The directory that holds one of the marker files: root/NAME, or the root itself unless `own_only`."""
    places = [root / name] if own_only else [root / name, root]
    for place in places:
        if any((place / marker).is_file() for marker in markers):
            return place
    raise DataError(f"{name} is not in {root}: run `generalist data get {name} --root {root}`")
