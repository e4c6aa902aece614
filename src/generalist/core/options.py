"""The base of every options class, and the number type that recipes use.

A field's docstring is its documentation: `docs/recipes.md` is generated from it.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction as Ratio
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_FRACTION = re.compile(r"\s*[-+]?(\d{1,9}\.?|\d{0,9}\.\d{1,9})\s*/\s*\d{1,9}\s*")


class Options(BaseModel):
    """Immutable, strict options: unknown keys, wrong types, nan and inf are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def foremost(error: ValidationError) -> ErrorDetails:
    """The first complaint; but instead of a missing field, an unknown one beside it, which may be its misspelling."""
    first, *others = error.errors()
    if first["type"] == "missing":
        for other in others:
            if other["type"] == "extra_forbidden" and other["loc"][:-1] == first["loc"][:-1]:
                return other
    return first


def first_problem(error: ValidationError) -> str:
    """The first complaint in one line: `field.within: message`."""
    problem = foremost(error)
    place = ".".join(str(part)[:60] for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


def parse_number(value: Any) -> Any:
    """`8/255`, `6.5/255`, `3.5e-3` (a string to YAML 1.1) and plain numbers; pydantic refuses the rest."""
    if not isinstance(value, str):
        return value
    if _FRACTION.fullmatch(value):
        numerator, denominator = value.split("/")
        if int(denominator) == 0:
            raise ValueError("the denominator of a fraction must not be 0")
        return float(numerator) / int(denominator)
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def format_number(value: float) -> float | str:
    """The number as a fraction, where that reads better: 8/255 and 1/3, not 0.03137254901960784."""
    if value == round(value, 6):
        return value
    for denominator in (3, 6, 7, 9, 255):
        numerator = round(value * denominator)
        if numerator and numerator / denominator == value:
            return f"{numerator}/{denominator}"
    halves = round(value * 510) / 2
    if halves and abs(halves) < 32 and halves / 255 == value:  # an eps, as in 6.5/255
        return f"{halves}/255"
    simple = Ratio(value).limit_denominator(64)
    return str(simple) if simple and float(simple) == value else value


LARGEST = 1e18
"""Small enough that the product of two such numbers does not overflow in single precision."""


def check_size(value: float) -> float:
    if abs(value) > LARGEST:
        raise ValueError(f"numbers are at most {LARGEST:g}, not {value:g}")
    return value


Number = Annotated[float, BeforeValidator(parse_number), AfterValidator(check_size), PlainSerializer(format_number)]
"""A float, not extremely large, that a recipe may also write as a fraction."""

Positive = Annotated[Number, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
"""The share of the old value that an average keeps."""
