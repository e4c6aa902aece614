"""The directory with the data, and where a data set's files are below it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from generalist.core.errors import DataError

ROOT_VARIABLE = "GENERALIST_DATA"


def data_root(root: str | Path | None) -> Path:
    """The directory with the data: as given, else from the environment, else the user's cache."""
    chosen = root or os.environ.get(ROOT_VARIABLE) or "~/.cache/generalist"
    return expanded(chosen)


def expanded(path: str | Path) -> Path:
    """The path with `~` and `~user` expanded."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"cannot find the home directory of {path}: write it out") from error


def find_file(root: Path, name: str, layouts: Sequence[Sequence[str]], *, own_only: bool = False) -> Path:
    """The first file of the first layout whose files are all in root/NAME, or else in the root itself.

    Not in the root if `own_only`. An incomplete layout must not hide another one that is complete.
    """
    half = ""
    for place in [root / name] if own_only else [root / name, root]:
        for files in layouts:
            missing = [place / file for file in files if not (place / file).is_file()]
            if not missing:
                return place / files[0]
            if len(missing) < len(files):
                half = half or f" ({missing[0]} is missing)"
    raise DataError(f"{name} is not in {root}{half}: run `generalist data get {name} --root {shlex.quote(str(root))}`")
