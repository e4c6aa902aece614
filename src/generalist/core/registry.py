"""Objects that a recipe can ask for by name, and the user's own objects by import path.

An import path in a recipe runs code, so it is refused unless the caller trusts the recipe's author.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from generalist.core.errors import GeneralistError

T = TypeVar("T")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


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
    except ImportError as error:
        raise GeneralistError(f"cannot import {module_name!r} of {path!r}: {error}") from error
    if not hasattr(module, attribute):
        raise GeneralistError(f"module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)


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
