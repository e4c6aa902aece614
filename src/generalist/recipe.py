"""Recipes: everything that a run is made of, from YAML and back.

A recipe is validated as a whole before anything runs; each complaint names the field and the remedy. `style` fills in
a whole column of the table in docs/method.md for the fields that the recipe itself leaves out.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from generalist.attacks.threats import ThreatOptions
from generalist.core.errors import RecipeError
from generalist.core.options import Number, Options, foremost
from generalist.core.plain_yaml import apply_change, dump_yaml, load_yaml, merge, set_field
from generalist.core.run import RunDirectory
from generalist.core.schedule import whole_epochs
from generalist.shipped import shipped_names, shipped_text, unknown_recipe
from generalist.training.mixing_options import Name
from generalist.training.options import Job

MAX_BYTES = 1 << 20
FRESH = "fresh"
_DEEPEST = 4  # levels of fields, as in learners.0.optimizer.lr


class StageOptions(Options):
    """One stage: the recipe with some fields changed, and the weights it starts from."""

    name: Name
    """Its name; every stage but the last leaves its run in RUN/stages/NAME."""

    start: str | dict[Name, str] = FRESH
    """`fresh` weights; the name of an earlier stage; `RUN[@EPOCH]` of an earlier run; or a mapping from learners to
    such sources. `SOURCE#SUBJECT` names one network of it (a learner, or `global`); without a mapping, all start from
    that one, as learners do after a redistribution. Learners that a mapping leaves out start fresh."""

    length: Number = Field(default=1.0, gt=0, le=1000)
    """Its number of epochs as a multiple of the recipe's `train.epochs`, rounded, at least one: it follows when those
    are changed. For a fixed number, set `change.train.epochs` instead."""

    change: dict[str, Any] = Field(default_factory=dict)
    """Fields of the recipe that differ in this stage, nested as in the recipe. Lists, `mixing.shares` and
    `mixing.gammas` are replaced as a whole, and `{}` resets a section to its defaults. A stage with other learners must
    also change the shares and gammas that name them: `mixing: {shares: {}}` for a stage with one learner."""


class Recipe(Job):
    """A whole recipe. Top levels: data, model, learners, mixing, train, validation, stages, style."""

    name: str = Field(default="", max_length=200)
    """The recipe's name; runs are named after it."""

    source: str = Field(default="", max_length=2000)
    """Where its settings come from."""

    style: Literal["default", "paper", "published-code"] = "default"
    """Which column of docs/method.md fills in what the recipe leaves out: our defaults, the papers' text, or their
    published code."""

    stages: list[StageOptions] = Field(default_factory=list)
    """Runs that follow one another; none: the recipe is one run."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_style(cls, value: Any) -> Any:
        return apply_style(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError("stages: two stages share a name; rename one")
        if FRESH in names:
            raise ValueError(f"stages: {FRESH!r} means fresh weights and cannot be a stage's name; rename it")
        for stage in self.stages:
            if unknown := stage.change.keys() - Job.model_fields.keys():
                raise ValueError(f"stages: {stage.name}: `change` has no field {sorted(unknown)[0]!r}")
            train = stage.change.get("train")
            if stage.length != 1 and isinstance(train, dict) and "epochs" in train:
                raise ValueError(f"stages: {stage.name}: both `length` and `change.train.epochs`; leave one out")
        return self


# -- styles: the columns of docs/method.md ----------------------------------------------------------------------------

_EPS = {"linf": "8/255", "l2": "128/255"}
_PUBLISHED_EPS = {"linf": 0.031, "l2": "128/255"}

_PAPER: dict[str, Any] = {
    "mixing": {
        "gamma": {"fractions": [0, "1/3", "2/3", 1], "values": [1, 1, 1, 0]},
        "source": "raw",
        "warmup": False,
        "redistribution": {"reset": False},
    },
    "validation": {"split": "test", "images": 10_000, "every": 1},
}
_PAPER_SCHEDULE = {"fractions": [0, "1/3", 0.5, 1], "values": [1, 1, 0.1, 0.01]}
_PAPER_NATURAL_LR = 0.1

_PUBLISHED: dict[str, Any] = {
    "mixing": {
        "source": "averaged",
        "counters": "truncate",
        "redistribution": {"when": "every-iteration", "reset": False},
    },
    "validation": {
        "split": "test",
        "images": 10_000,
        "every": 1,
        "min_natural": 0.88,
        "steps": 10,
        "step": {"linf": 0.007},
    },
}
_PUBLISHED_STEP = 0.007


def apply_style(raw: dict[str, Any]) -> dict[str, Any]:
    """The raw recipe with its style's column filled in beneath what it says itself."""
    style = raw.get("style", "default")
    column = {"paper": _PAPER, "published-code": _PUBLISHED}.get(style, {}) if isinstance(style, str) else {}
    filled = merge(column, raw)
    learners = filled.get("learners")
    if isinstance(learners, list):
        filled["learners"] = [_style_learner(entry, style) if isinstance(entry, dict) else entry for entry in learners]
    return filled


def _style_learner(entry: dict[str, Any], style: str) -> dict[str, Any]:
    norm = _norm_of(entry.get("threat"))
    column: dict[str, Any] = {}
    budgets = _PUBLISHED_EPS if style == "published-code" else _EPS
    if norm is not None and norm in budgets:
        column["threat"] = {"eps": budgets[norm]}
    if style == "published-code" and norm == "linf":
        column["attack"] = {"step": _PUBLISHED_STEP}
    if style == "paper":
        column["schedule"] = _PAPER_SCHEDULE
        if entry.get("threat") is None:
            column["optimizer"] = {"lr": _PAPER_NATURAL_LR}
    if style == "published-code":
        column["averaging"] = {"decay": 0.999, "warmup": True}
    if "schedule" in entry:
        column.pop("schedule", None)  # breakpoints and values belong together
    return merge(column, entry)


def _norm_of(threat: Any) -> str | None:
    """The norm of a threat in any of its forms; None if it is not a valid threat, which validation will report."""
    if isinstance(threat, dict):
        norm = threat.get("norm")
        return norm if isinstance(norm, str) else None
    try:
        return ThreatOptions.model_validate(threat).norm
    except ValidationError:
        return None


# -- reading --------------------------------------------------------------------------------------------------------


def load_recipe(
    recipe: str | Path | Mapping[str, Any] | Recipe, *, overrides: Iterable[str] = (), trust_code: bool = False
) -> Recipe:
    """A recipe from a shipped name, a YAML file, a mapping or itself, with `a.b.0.c=value` overrides."""
    if isinstance(recipe, Recipe):
        raw: dict[str, Any] = recipe.model_dump(mode="json")
    elif isinstance(recipe, Mapping):
        raw = dict(recipe)
    else:
        raw = read_raw(recipe)
    raw = copy.deepcopy(raw)
    # The style first: it decides the defaults that the other overrides start from.
    for override in sorted(overrides, key=lambda text: text.partition("=")[0] != "style"):
        set_field(raw, override, resolved=lambda: _resolved(raw, trust_code=trust_code))
    return parse(raw, trust_code=trust_code)


def _resolved(raw: Mapping[str, Any], *, trust_code: bool) -> Any:
    """The recipe so far with every field filled in; None if it is not valid yet."""
    try:
        return parse(raw, trust_code=trust_code).model_dump(mode="json")
    except RecipeError:
        return None


def parse(raw: Mapping[str, Any], *, trust_code: bool = False) -> Recipe:
    """Validate a raw recipe; the first complaint is raised as a RecipeError."""
    try:
        return Recipe.model_validate(dict(raw), context={"trust_code": trust_code})
    except ValidationError as error:
        first = foremost(error)
        raise RecipeError(*_explain(first["loc"], first)) from None
    except (RecursionError, OverflowError) as error:
        raise RecipeError("", f"nested too deeply, or a number too large: {error}") from None


def _explain(location: tuple[int | str, ...], error: Mapping[str, Any]) -> tuple[str, str]:
    # pydantic appends the branch of a union to the path (`float`, `literal['lead']`): not words of the recipe.
    words = [str(part) for part in location if isinstance(part, int) or re.fullmatch(r"[A-Za-z_][\w-]*", part)]
    while words and words[-1] in {"float", "str", "int", "bool", "constrained-float", "constrained-str"}:
        words.pop()
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        name = str(location[-1])
        near = get_close_matches(name, _fields_at(location[:-1]), n=1) or _places_of(name)
        hint = f"did you mean {near[0]!r}? " if near else ""
        message = f"unknown field{'' if name in words else f' {name[:80]!r}'}; {hint}docs/recipes.md lists the fields"
    elif error["type"] == "model_type" and words:
        path = ".".join(words)
        message = f"its fields are {', '.join(_fields_at(location))}: write {path}.FIELD=VALUE"
    elif error["type"] == "missing":
        message = "required, but missing; add it"
    elif error["type"] != "value_error" and not isinstance(error.get("input"), dict | list):
        message = f"{message} (got {str(error.get('input'))[:80]!r})"
    return ".".join(words), message


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """The fields that can stand at a place of the recipe."""
    models: list[type[BaseModel]] = [Recipe]
    for part in location:
        found = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        if found:  # else a list's position or a name of the user's own: what is inside it has the same type
            models = [inner for annotation in found for inner in _models_in(annotation)]
    return sorted({name for model in models for name in model.model_fields})


def _places_of(field: str) -> list[str]:
    """The full paths of fields with this name, shallowest first: a hint for whoever writes `epochs` or `train.lr`."""
    found: list[str] = []
    level: list[tuple[str, type[BaseModel]]] = [("", Recipe)]
    for _ in range(_DEEPEST):
        found += [f"{path}{field}" for path, model in level if field in model.model_fields]
        level = [
            (f"{path}{name}.{'0.' if 'list[' in str(info.annotation) else ''}", inner)
            for path, model in level
            for name, info in model.model_fields.items()
            for inner in _models_in(info.annotation)
        ]
    return found


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The options classes in a field's type, and their subclasses."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation, *(inner for extended in annotation.__subclasses__() for inner in _models_in(extended))]
    return [inner for argument in get_args(annotation) for inner in _models_in(argument)]


def read_raw(where: str | Path) -> dict[str, Any]:
    """The contents of a shipped recipe or a file, not validated yet; a missing `name` is filled in."""
    path = Path(where)
    if str(where) in shipped_names():
        raw = parse_yaml(shipped_text(str(where)), str(where))
        return {"name": str(where), **raw}
    if RunDirectory(path).exists():
        raise RecipeError("", f"{path} is a run; go on with --resume, or branch with --from {path}")
    if path.is_dir():
        raise RecipeError("", f"{path} is a directory without recipe.yaml: neither a run nor a recipe")
    if not path.is_file():
        if len(path.parts) > 1 or path.suffix:  # no recipe has such a name
            raise RecipeError("", f"there is no file or run {str(where)[:200]!r}")
        raise RecipeError("", f"{unknown_recipe(str(where))}, and there is no file of that name")
    if path.stat().st_size > MAX_BYTES:
        raise RecipeError("", f"{path} is larger than {MAX_BYTES} bytes: that is too much for a recipe")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError("", f"{path} cannot be read as text: {error}") from None
    return {"name": path.stem[:200], **parse_yaml(text, str(path))}


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """`text` as a raw recipe; `where` names it in errors."""
    raw = load_yaml(text, where)
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise RecipeError("", f"{where} must be a mapping with the top levels data, model, learners, ...")
    return raw


# -- writing --------------------------------------------------------------------------------------------------------


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe: every field, in the order of the documentation."""
    return dump_yaml(recipe.model_dump(mode="json"))


_BY_LEARNER = frozenset({"shares", "gammas"})  # a stage with other learners cannot keep names that are gone


def stage_recipes(recipe: Recipe, *, trust_code: bool) -> list[Recipe]:
    """The recipe of each stage, or just the recipe itself if it has none. The last one makes the run's networks."""
    return [stage_recipe(recipe, stage, trust_code=trust_code) for stage in recipe.stages] or [recipe]


def stage_recipe(recipe: Recipe, stage: StageOptions, *, trust_code: bool) -> Recipe:
    """The recipe of one stage."""
    raw = recipe.model_dump(mode="json")
    raw["train"]["epochs"] = max(1, whole_epochs(stage.length * recipe.train.epochs))
    raw = apply_change(raw, stage.change, whole=_BY_LEARNER)
    try:
        return parse({**raw, "stages": []}, trust_code=trust_code)
    except RecipeError as error:
        raise RecipeError(f"stages.{stage.name}.change.{error.path}".rstrip("."), error.problem) from None
