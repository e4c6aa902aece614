"""The recipes that come with the package, as text."""

from __future__ import annotations

from importlib import resources

from generalist.core.errors import RecipeError
from generalist.core.registry import unknown_name


def shipped_names() -> list[str]:
    """The recipes that come with the package."""
    files = resources.files("generalist").joinpath("recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def unknown_recipe(name: str) -> str:
    """The sentence that says that no recipe has this name."""
    return unknown_name("recipe", name, shipped_names(), listing="generalist recipes list")


def shipped_text(name: str) -> str:
    """The YAML text of a shipped recipe."""
    if name not in shipped_names():
        raise RecipeError("", unknown_recipe(name))
    return resources.files("generalist").joinpath("recipes", f"{name}.yaml").read_text()
