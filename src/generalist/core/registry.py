"""Objects that a recipe can ask for by name, and the user's own objects by import path.

An import path in a recipe runs code, so it is refused unless the caller trusts the recipe's author.
"""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar

from generalist.core.errors import GeneralistError, with_place

T = TypeVar("T")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

IMPORTED_FROM: set[Path] = set()
"""Folders of what import paths have named: code of the user's own, whose errors are not ours."""
_PACKAGE = Path(__file__).resolve().parents[1]


def is_import_path(name: str) -> bool:
    """Whether `name` has the form `package.module:thing`."""
    return _IMPORT_PATH.fullmatch(name) is not None


def import_object(path: str, *, trust_code: bool) -> Any:
    """The object at `package.module:thing`. Importing runs that module's code."""
    if not trust_code:
        raise GeneralistError(
            f"{path!r} is an import path, and importing it runs its code; "
            "if you trust it, pass --trust-code (API: trust_code=True)"
        )
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        not_found = error.name == module_name.partition(".")[0]  # itself, and not what it imports
        hint = "; a module in the current folder is found with PYTHONPATH=. before the command" if not_found else ""
        raise GeneralistError(f"cannot import {module_name!r} of {path!r}: {error}{hint}") from error
    except Exception as error:  # it is a program, and may fail in any way
        raise GeneralistError(f"cannot import {module_name!r} of {path!r}: {with_place(error)}") from error
    if (file := getattr(sys.modules[module_name.partition(".")[0]], "__file__", None)) is not None:
        top = Path(file).resolve()
        IMPORTED_FROM.add(top.parents[1] if top.name == "__init__.py" else top.parent)
    if not hasattr(module, attribute):
        raise GeneralistError(f"module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)


def place_in_own_code(error: BaseException) -> str | None:
    """The innermost line of an error's traceback in code that came by import path; None where none of that ran."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        library = file.is_relative_to(_PACKAGE) or "site-packages" in file.parts
        if not library and any(file.is_relative_to(folder) for folder in IMPORTED_FROM):
            return f"{frame.filename}, line {frame.lineno}"
    return None


def unknown_name(kind: str, name: str, known: list[str], *, listing: str | None = None) -> str:
    """The message that a name is unknown, with the most similar known name and a list of all of them.

    If there are too many for a line, pass `listing`, the command that lists them, to be named instead.
    """
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    rest = f"known: {', '.join(known)}" if listing is None else f"`{listing}` names them all"
    return f"unknown {kind} {name[:200]!r}; {hint}{rest}"


class Registry(Generic[T]):
    """A table of named objects of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._things: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: register the object as `name`."""

        def add(thing: T) -> T:
            if name in self._things:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._things[name] = thing
            return thing

        return add

    def get(self, name: str, *, trust_code: bool = False) -> T:
        """The object registered as `name`, or imported if `name` is an import path."""
        if name in self._things:
            return self._things[name]
        if is_import_path(name):
            thing: T = import_object(name, trust_code=trust_code)
            return thing
        raise GeneralistError(unknown_name(self.kind, name, self.names()))

    def names(self) -> list[str]:
        return sorted(self._things)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
