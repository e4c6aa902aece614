"""torch.compile, and what it is to know of a function, without the compiler where nothing is compiled.

The decorators of torch.compiler import the compiler at once, which takes longer than all of this library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_waiting: list[Callable[[], None]] = []
"""What is to be done before the first compilation."""


def for_the_compiler(mark: Callable[[Callable[P, R]], Callable[P, R]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of torch.compiler, such as `disable`, that is applied when `compiled` is first called."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        current = function

        def apply() -> None:
            nonlocal current
            current = mark(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return current(*args, **kwargs)

        _waiting.append(apply)
        return call

    return decorate


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function compiled for one shape of its arguments after the other."""
    ready()
    made: Any = torch.compile(function, dynamic=False)
    return made  # type: ignore[no-any-return]


def ready() -> None:
    """Apply every decorator that waits; for whoever compiles without `compiled`."""
    while _waiting:
        _waiting.pop()()
