"""YAML as plain data: reading that is safe on hostile text, merging, and overrides such as `a.b.0.c=value`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import yaml

from generalist.core.errors import RecipeError

MAX_DEPTH = 40


class _Loader(yaml.SafeLoader):
    """Plain data only: no tags, no aliases (they can blow up), no repeated keys (one would be lost)."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed in a recipe; write the value out")
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError("nested too deeply")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.YAMLError(f"the key {key.value!r} is given twice (line {key.start_mark.line + 1})")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def load_yaml(text: str, where: str) -> Any:
    """The plain data that `text` contains; `where` names it in errors."""
    try:
        return yaml.load(text, Loader=_Loader)
    except Exception as error:  # a crafted scalar can fail anywhere in the constructors; none may end in a traceback
        raise RecipeError("", f"{where} is not valid YAML: {' '.join(str(error).split())[:300]}") from None


def dump_yaml(value: Any, *, ascii_only: bool = False) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=not ascii_only, width=110)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, mapping by mapping; lists, and schedules with their own breakpoints, are replaced whole."""
    return _merge(below, above, lambda key, value: _is_schedule(value))


def apply_change(below: Mapping[str, Any], above: Mapping[str, Any], *, whole: Collection[str]) -> dict[str, Any]:
    """Like `merge`, but an empty mapping clears, and mappings under the keys in `whole` replace like lists."""
    return _merge(below, above, lambda key, value: not value or key in whole or _is_schedule(value))


def _merge(
    below: Mapping[str, Any], above: Mapping[str, Any], replaces: Callable[[str, Mapping[str, Any]], bool]
) -> dict[str, Any]:
    merged = dict(copy.deepcopy(dict(below)))
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        if both and not replaces(key, value):
            merged[key] = _merge(merged[key], value, replaces)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _is_schedule(value: Any) -> bool:
    return isinstance(value, Mapping) and "values" in value and bool({"fractions", "epochs"} & value.keys())


def read_override(override: str) -> tuple[str, Any]:
    """The path and the value of `a.b.0.c=value`; the value is YAML, but a leading # does not begin a comment."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise RecipeError("", f"--set {override[:200]!r}: write it as field.path=value")
    named = text.lstrip().startswith("#")
    return path, text.strip() if named else load_yaml(text, f"--set {path[:200]}: {text[:80]!r}")


def set_field(raw: dict[str, Any], override: str, *, resolved: Callable[[], Any]) -> None:
    """Apply `a.b.0.c=value` in place.

    Only the named field is written, so that its neighbours keep their defaults. If the path leads into a short form, a
    list or a schedule (whose breakpoints and values belong together), its long form is first taken from `resolved()`.
    """
    path, value = read_override(override)
    *parents, last = path.split(".")
    node: Any = raw
    resolved = functools.cache(resolved)  # called at most once, before anything is changed
    for depth, part in enumerate(parents):
        node = _descend(node, part, parents[: depth + 1], resolved)
    if isinstance(node, list):
        node[_position(node, last, path)] = value
    else:
        node[last] = value


def _descend(node: Any, part: str, parents: list[str], resolved: Callable[[], Any]) -> Any:
    key: Any = _position(node, part, ".".join(parents)) if isinstance(node, list) else part
    child = node[key] if isinstance(node, list) else node.get(key)
    if not isinstance(child, dict | list):
        long_form = _look_up(resolved(), parents)
        needed = isinstance(long_form, list) or _is_schedule(long_form) or child is not None
        node[key] = child = copy.deepcopy(long_form) if needed and isinstance(long_form, dict | list) else {}
    return child


def _look_up(value: Any, parents: list[str]) -> Any:
    for part in parents:
        if isinstance(value, list):
            value = value[_position(value, part, ".".join(parents))]
        elif isinstance(value, dict):
            value = value.get(part)
    return value


def _position(node: list[Any], part: str, path: str) -> int:
    """The position of a list's element, given as such or by the element's name."""
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in node]
    if part in names:
        return names.index(part)
    # A long string of digits is no position, and Python refuses to convert very long ones.
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(node):
        known = f": {', '.join(str(name)[:40] for name in names[:8])}" if any(names) else ""
        raise RecipeError(path[:200], f"--set: there is no element {part[:40]!r} in a list of {len(node)}{known}")
    return int(part)
