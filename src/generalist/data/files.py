"""Where a data set's files lie below the root."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from generalist.core.errors import DataError


def find_file(root: Path, name: str, files: Sequence[str], *, own_only: bool = False) -> Path:
    """The first of these files that is in root/NAME, or else in the root itself unless `own_only`."""
    for place in [root / name] if own_only else [root / name, root]:
        for file in files:
            if (place / file).is_file():
                return place / file
    raise DataError(f"{name} is not in {root}: run `generalist data get {name} --root {root}`")
