"""torch.compile and its decorators, without importing the compiler unless something is compiled.

The decorators of torch.compiler import the compiler at once, which takes longer than importing all of this library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_waiting: list[Callable[[], None]] = []
"""What has to be done before the first compilation."""


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
    """The function, compiled anew for each shape of its arguments."""
    ready()
    made: Any = torch.compile(function, dynamic=False)
    return made  # type: ignore[no-any-return]


def ready() -> None:
    """Apply every waiting decorator; call this before compiling other than by `compiled`."""
    while _waiting:
        _waiting.pop()()
