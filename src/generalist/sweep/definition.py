"""From the text of a sweep to the recipes of its trials: everything is checked here, before a database is opened."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from generalist.core.errors import GeneralistError, RecipeError, SweepError
from generalist.core.options import foremost
from generalist.core.plain_yaml import dump_yaml, load_yaml, read_override
from generalist.core.random import uniform
from generalist.core.registry import unknown_name
from generalist.recipe import MAX_BYTES, Recipe, load_recipe, read_raw
from generalist.shipped import shipped_names
from generalist.sweep.expression import Expression, parse_expression
from generalist.sweep.measurements import example_record
from generalist.sweep.options import SearchOptions, SweepOptions, as_text

CHECKED_COMBINATIONS = 1000
"""A grid up to this size is checked point by point; in a larger one, every value is checked on its own."""

Choice = dict[str, str | float | int]
"""A trial's parameters: for each key of `search`, the text of a choice or a number from a range."""


@dataclass(frozen=True)
class Sweep:
    """A sweep that was read: its options and the recipe that it varies."""

    options: SweepOptions
    raw: dict[str, Any]
    """The recipe as in its file, read only once, so that later changes of the file do not affect trials."""
    trust_code: bool = False

    @property
    def name(self) -> str:
        return self.options.name

    @cached_property
    def objectives(self) -> list[Expression]:
        return [parse_expression(objective.value) for objective in self.options.objectives]

    @cached_property
    def measures(self) -> dict[str, Expression]:
        return {name: parse_expression(text) for name, text in self.options.measures.items()}

    def recipe(self, choice: Mapping[str, Any]) -> Recipe:
        """The recipe of a trial with these parameters."""
        overrides = [f"{field}={as_text(value)}" for field, value in self.options.set.items()]
        for key, space in self.options.search.items():
            value = choice[key]
            overrides += space.changes(key, value if isinstance(value, str) else as_text(value))
        return load_recipe(self.raw, overrides=overrides, trust_code=self.trust_code)

    def choice(self, number: int) -> Choice:
        """The parameters of trial `number`, if they do not depend on other trials (`grid` and `random`)."""
        spaces = self.options.search
        if self.options.method == "grid":
            found: Choice = {}
            for key, space in reversed(spaces.items()):  # the last field changes fastest, as in a table
                choices = space.choices() or []
                number, position = divmod(number, len(choices))
                found[key] = choices[position]
            return {key: found[key] for key in spaces}
        draws = [float(uniform(self.options.seed, f"sweep/{key}", number)) for key in spaces]
        return {key: _drawn(space, draw) for (key, space), draw in zip(spaces.items(), draws, strict=True)}

    def fingerprint(self) -> str:
        """A hash of what identifies the sweep; the number of trials and the heartbeat are not part of it."""
        first = self.recipe(next(checked_choices(self.options)))
        content = {
            "options": self.options.model_dump(mode="json", exclude={"trials", "heartbeat", "source"}),
            "recipe": first.model_dump(mode="json", exclude={"name", "source"}),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        return dump_yaml(self.options.model_dump(mode="json", exclude_unset=True) | {"name": self.name})


def _drawn(space: SearchOptions, draw: float) -> str | float | int:
    """The point of a space at `draw`, a uniform number in [0, 1)."""
    choices = space.choices()
    if choices is not None:
        return choices[int(draw * len(choices))]
    assert space.low is not None and space.high is not None, "whoever has no choices is a range"
    low, high = space.low, space.high
    if space.step is not None:  # too many points to list
        value = low + int(draw * space.points(space.step)) * space.step
        return round(value) if space.integer else value
    value = low * math.pow(high / low, draw) if space.log else low + (high - low) * draw
    return round(value) if space.integer else value


# -- reading ----------------------------------------------------------------------------------------------------------


def load_sweep(where: str | Path, *, overrides: Iterable[str] = (), trust_code: bool = False) -> Sweep:
    """A shipped sweep by name, or a YAML file, with `field=value` added to its `set`; checked as a whole."""
    if str(where) in shipped_sweeps():
        text, folder, name = shipped_sweep_text(str(where)), None, str(where)
    else:
        path = Path(where)
        text, folder, name = _read(path), path.parent, path.stem
    try:
        raw = load_yaml(text, str(where))
    except RecipeError as error:
        raise SweepError(error.problem) from None
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise SweepError(f"{where} must be a mapping with the fields recipe, search, method, ...")
    changes = dict(read_override(text) for text in overrides)
    shared = raw.get("set", {})
    if changes and isinstance(shared, dict):
        raw["set"] = {field: shared[field] for field in shared if field not in changes} | changes
    try:
        options = SweepOptions.model_validate({"name": name, **raw})
    except ValidationError as error:
        raise _explained(error) from None
    except (RecursionError, OverflowError) as error:
        raise SweepError(f"sweep: nested too deeply, or a number too large: {error}") from None
    sweep = Sweep(options, read_raw(_recipe_named(options.recipe, folder)), trust_code)
    check(sweep)
    return sweep


def check(sweep: Sweep) -> None:
    """Every combination of a grid, or every value with the first ones of the other fields, must give a valid recipe."""
    for choice in checked_choices(sweep.options):
        try:
            recipe = sweep.recipe(choice)
        except RecipeError as error:
            raise SweepError(f"sweep: with {describe(choice)}: {error}") from None
        example = example_record(recipe, trust_code=sweep.trust_code)
        for expression in [*sweep.objectives, *sweep.measures.values()]:
            expression.check(example)
        _check_pruning(sweep, recipe)


def _check_pruning(sweep: Sweep, recipe: Recipe) -> None:
    if sweep.options.pruning.kind == "none":
        return
    if recipe.stages:
        raise SweepError("sweep: pruning compares epochs, and each stage counts them from the start: leave it out")
    if recipe.validation.every >= recipe.train.epochs:
        raise SweepError(
            f"sweep: pruning looks at validations, and the first comes after the last epoch: set validation.every "
            f"below {recipe.train.epochs}"
        )


def checked_choices(options: SweepOptions) -> Iterator[Choice]:
    """The parameters whose recipes are checked before anything runs."""
    ends = {key: space.ends() for key, space in options.search.items()}
    if options.method == "grid" and options.combinations() <= CHECKED_COMBINATIONS:
        for values in itertools.product(*ends.values()):
            point: Choice = dict(zip(ends, values, strict=True))
            yield point
        return
    first: Choice = {key: texts[0] for key, texts in ends.items()}
    for key, texts in ends.items():
        yield from ({**first, key: text} for text in texts)


def describe(choice: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in choice.items()
    )


def _recipe_named(recipe: str, folder: Path | None) -> str | Path:
    beside = folder / recipe if folder is not None and recipe not in shipped_names() else None
    return beside if beside is not None and beside.is_file() else recipe


def _read(path: Path) -> str:
    if not path.is_file():
        unknown = unknown_name("sweep", str(path), shipped_sweeps(), listing="generalist sweep --list")
        raise SweepError(f"{unknown}, and there is no file of that name")
    if path.stat().st_size > MAX_BYTES:
        raise SweepError(f"{path} is larger than {MAX_BYTES} bytes: that is too much for a sweep")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"{path} cannot be read as text: {error}") from None


def _explained(error: ValidationError) -> GeneralistError:
    first = foremost(error)
    place = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"unknown field; the fields are {', '.join(_fields(first['loc'][:-1]))}"
    elif first["type"] == "missing":
        message = "required, but missing; add it"
    elif first["type"] != "value_error" and not isinstance(first.get("input"), dict | list):
        message = f"{message} (got {str(first.get('input'))[:80]!r})"
    return SweepError(f"sweep: {place}: {message}" if place else f"sweep: {message}")


def _fields(location: Iterable[int | str]) -> list[str]:
    model: Any = SweepOptions
    for part in location:
        if part in model.model_fields:
            annotation = model.model_fields[part].annotation
            arguments = [a for a in getattr(annotation, "__args__", ()) if hasattr(a, "model_fields")]
            model = annotation if hasattr(annotation, "model_fields") else (arguments or [model])[0]
    return sorted(model.model_fields)


def shipped_sweeps() -> list[str]:
    """The sweeps that come with the package."""
    files = resources.files("generalist").joinpath("sweeps").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def shipped_sweep_text(name: str) -> str:
    """The YAML text of a shipped sweep."""
    return resources.files("generalist").joinpath("sweeps", f"{name}.yaml").read_text()
