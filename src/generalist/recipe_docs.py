"""The reference of recipes, made from the options themselves: `python -m generalist.recipe_docs > docs/recipes.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from generalist.core.options import format_number
from generalist.core.plain_yaml import dump_yaml
from generalist.data import download
from generalist.models.registry import MODELS
from generalist.objectives import OBJECTIVES
from generalist.objectives.base import ObjectiveOptions
from generalist.recipe import Recipe, load_recipe
from generalist.shipped import shipped_names

INTRODUCTION = """\
# Recipes

A recipe is a YAML file that says everything a run is made of. `generalist recipes show NAME` prints one that comes
with the package, `--resolved` with every field; `--set field.path=value` changes a field for one run:

    generalist train digits-t --set train.epochs=20 --set learners.linf.threat.eps=0.2

Elements of a list are named by position, learners by name as well. Numbers may be fractions (`8/255`, `6.5/255`).
Unknown fields, wrong types, nan and inf are refused. This page is made from the program: `make docs-recipes`.
"""


def document() -> str:
    """The whole page."""
    parts = [INTRODUCTION, *_sections(Recipe, "", set()), _objectives(), _models(), _data_sets(), _shipped()]
    return "\n".join(parts)


def _sections(model: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    """A section for the fields of `model`, then one for each options class inside it; every class only once."""
    seen.add(model)
    yield f"## {f'`{path}`' if path else 'Top levels'}\n\n{_prose(model)}\n"
    yield "\n".join(_field(name, field) for name, field in model.model_fields.items()) + "\n"
    for name, field in model.model_fields.items():
        for inner in _options_in(field.annotation):
            if inner not in seen:
                element = ".N" if get_origin(field.annotation) is list else ""
                yield from _sections(inner, f"{path}.{name}{element}".removeprefix("."), seen)


def _field(name: str, field: FieldInfo) -> str:
    return (
        f"- **{name}** ({_kind(field.annotation)}{_limits(field)}; {_default(field)}): {_one_line(field.description)}"
    )


def _options_in(annotation: Any) -> list[type[BaseModel]]:
    """The options classes within a field's type; those of objectives have a chapter of their own."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [] if annotation is ObjectiveOptions else [annotation]
    return [inner for argument in get_args(annotation) for inner in _options_in(argument)]


_WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "none", Any: "anything"}


def _kind(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(argument) for argument in arguments))
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"mapping from {_kind(arguments[0])} to {_kind(arguments[1])}"
    if arguments:  # Annotated
        return _kind(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.__name__.removesuffix("Options").lower()
    return _WORDS.get(annotation, str(annotation))


def _limits(field: FieldInfo) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{words} {getattr(bound, sign):,}"
        for bound in field.metadata
        for sign, words in signs.items()
        if getattr(bound, sign, None) is not None
    ]
    return f", {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None or value is PydanticUndefined:
        return "default: none"
    if isinstance(value, BaseModel):
        set_fields = {key: value for key, value in value.model_dump(mode="json").items() if value is not None}
        return f"default: `{_flow(set_fields)}`" if len(set_fields) <= 2 else "default: see below"
    return f"default: `{_flow(value)}`"


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, BaseModel):
        return _flow(value.model_dump(mode="json"))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(inner) for inner in value) + "]"
    if isinstance(value, float):
        value = format_number(value)
    return dump_yaml(value).removesuffix("...\n").strip()


def _prose(thing: Any) -> str:
    return _one_line(inspect.getdoc(thing))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _objectives() -> str:
    lines = ["## Objectives\n"]
    for name in OBJECTIVES:
        objective = OBJECTIVES.get(name)
        lines.append(f"### `{name}`\n\n{_prose(objective)}\n")
        fields = [_field(key, field) for key, field in objective.Options.model_fields.items() if key != "kind"]
        lines.append("\n".join(fields or ["No options of its own."]) + "\n")
    return "\n".join(lines)


def _models() -> str:
    lines = [f"- `{name}`: {_prose(MODELS.get(name))}".removesuffix(": ") for name in MODELS]
    return "## Models\n\n" + "\n".join([*lines, "- `timm/NAME`: any network of timm, where it is installed."]) + "\n"


def _data_sets() -> str:
    lines = [f"- `{entry.name}`: {entry.summary}." for entry in download.describe()]
    return "## Data sets\n\n" + "\n".join(lines) + "\n"


def _shipped() -> str:
    lines = [f"- `{name}`: {_one_line(load_recipe(name).source)}" for name in shipped_names()]
    return "## Recipes that come with the package\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(document() + "\n")
