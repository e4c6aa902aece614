"""Small arithmetic over named measurements: `natural + 0.5 * min(linf, l2)`.

The text is parsed into Python's syntax tree, which is walked node by node; any node outside a short list is refused.
Nothing is ever executed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from generalist.core.errors import SweepError

MAX_LENGTH = 500
MAX_DEPTH = 30
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _or_nan(choose: Callable[[Sequence[float]], float]) -> Callable[..., float]:
    """Python's min and max ignore a nan or not, depending on its position; these return it."""
    return lambda *values: math.nan if any(map(math.isnan, values)) else choose(values)


_FUNCTIONS: dict[str, Callable[..., float]] = {"min": _or_nan(min), "max": _or_nan(max)}

Path = tuple[str, ...]


@dataclass(frozen=True)
class Expression:
    """A checked expression; `paths` are the measurements that it reads."""

    text: str
    tree: ast.expr
    paths: frozenset[Path]

    def check(self, record: Mapping[str, Any]) -> None:
        """Refuse a measurement that `record` lacks, or that is not a number there."""
        for path in sorted(self.paths):
            look_up(record, path, self.text)

    def value(self, record: Mapping[str, Any]) -> float:
        """The expression's value for these measurements; nan if it is undefined, as after a division by zero."""
        try:
            return _value(self.tree, record, self.text)
        except (ZeroDivisionError, OverflowError):
            return math.nan


def parse_expression(text: str) -> Expression:
    """Parse `text`; an error says in one line what is not allowed in it."""
    if len(text) > MAX_LENGTH:
        raise SweepError(f"an expression has at most {MAX_LENGTH} characters, not {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _refused(text, "it cannot be read") from None
    paths: set[Path] = set()
    _check(tree, text, paths, depth=0)
    if not paths:
        raise _refused(text, "it names no measurement")
    return Expression(text.strip(), tree, frozenset(paths))


def look_up(record: Mapping[str, Any], path: Path, text: str) -> float:
    """The number at `path`."""
    value: Any = record
    for depth, part in enumerate(path):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(str(name) for name in value) if isinstance(value, Mapping) else "nothing"
            inside = f" in {'.'.join(path[:depth])}" if depth else ""
            raise _refused(text, f"there is no {part!r}{inside}; there is {known}")
        value = value[part]
    if value is None:
        return math.nan  # a measurement that could not be made
    if isinstance(value, bool) or not isinstance(value, int | float):
        hint = f"; choose one of {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
        raise _refused(text, f"{'.'.join(path)} is no number{hint}")
    return float(value)


def _refused(text: str, reason: str) -> SweepError:
    return SweepError(
        f"expression {text[:80]!r}: {reason} (allowed: numbers, + - * /, min, max, names, a.b and a['b'])"
    )


def _check(node: ast.expr, text: str, paths: set[Path], *, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _refused(text, "it is nested too deeply")
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        inner = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        inner = [node.operand]
    elif isinstance(node, ast.Call):
        inner = _arguments(node, text)
    elif isinstance(node, ast.Constant):
        _number(node, text)
        inner = []
    else:
        paths.add(_path(node, text))
        inner = []
    for child in inner:
        _check(child, text, paths, depth=depth + 1)


def _arguments(node: ast.Call, text: str) -> list[ast.expr]:
    known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
    if not known or node.keywords or len(node.args) < 2 or any(isinstance(arg, ast.Starred) for arg in node.args):
        raise _refused(text, "the only calls are min(a, b, ...) and max(a, b, ...)")
    return node.args


def _number(node: ast.Constant, text: str) -> float:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(text, f"{str(value)[:20]!r} is no number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refused(text, "a number is too large")
    return number


def _path(node: ast.expr, text: str) -> Path:
    """`a.b['c']` as (a, b, c)."""
    parts: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            parts.append(str(node.slice.value))
        else:
            raise _refused(text, f"{ast.unparse(node)[:40]!r} is not allowed")
        node = node.value
    return (node.id, *reversed(parts))


def _value(node: ast.expr, record: Mapping[str, Any], text: str) -> float:
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, record, text), _value(node.right, record, text))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, record, text))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _FUNCTIONS[node.func.id](*(_value(argument, record, text) for argument in node.args))
    if isinstance(node, ast.Constant):
        return _number(node, text)
    return look_up(record, _path(node, text), text)
