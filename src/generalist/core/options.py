"""The base of every options class, and the number type that recipes use.

A field's docstring is its documentation: `docs/recipes.md` is generated from it.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer

_FRACTION = re.compile(r"\s*[-+]?\d{1,9}\s*/\s*\d{1,9}\s*")


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


def parse_number(value: Any) -> Any:
    """`8/255`, `3.5e-3` (a string to YAML 1.1) and plain numbers; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    if _FRACTION.fullmatch(value):
        numerator, denominator = value.split("/")
        if int(denominator) == 0:
            raise ValueError("the denominator of a fraction must not be 0")
        return float(Fraction(int(numerator), int(denominator)))
    try:
        number = float(value)
    except ValueError:
        return value
    return number if math.isfinite(number) else value


def format_number(value: float) -> float | str:
    """Pixel budgets read better as they are written: 8/255, not 0.03137254901960784."""
    pixels = round(value * 255)
    if 0 < pixels < 256 and pixels / 255 == value and value != round(value, 4):
        return f"{pixels}/255"
    return value


Number = Annotated[float, BeforeValidator(parse_number), PlainSerializer(format_number)]
"""A finite float that a recipe may also write as a fraction."""
