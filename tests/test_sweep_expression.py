"""Expressions of measurements: the arithmetic, the names, and everything that must not get through."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generalist.core.errors import SweepError
from generalist.sweep.expression import parse_expression

RECORD = {
    "natural": 0.9,
    "linf": 0.5,
    "l2": 0.6,
    "zero": 0.0,
    "gone": None,
    "flag": True,
    "validation": {"accuracy": {"global": {"natural": 0.9, "linf:0.18": 0.5}}, "drift": 2},
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("natural", 0.9),
        ("natural + linf", 1.4),
        ("2 * natural - l2 / 3", 1.6),
        ("-natural + +l2", -0.3),
        ("min(linf, l2)", 0.5),
        ("max(linf, l2, natural)", 0.9),
        ("natural + 0.5 * min(linf, l2)", 1.15),
        ("(natural - linf) * (natural - l2)", 0.12),
        ("validation.drift / 4", 0.5),
        ("validation['accuracy']['global']['linf:0.18']", 0.5),
        ("validation.accuracy['global'].natural", 0.9),
        (" natural ", 0.9),
    ],
)
def test_what_is_written_is_what_is_computed(text: str, value: float) -> None:
    assert parse_expression(text).value(RECORD) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["natural / zero", "1 / (linf - linf)", "gone", "gone + natural", "min(gone, l2)", "max(l2, gone)"]
)
def test_what_cannot_be_computed_is_nan(text: str) -> None:
    assert math.isnan(parse_expression(text).value(RECORD))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 + 2",
        "natural +",
        "natural ** 2",
        "natural if linf else l2",
        "natural < linf",
        "[natural]",
        "lambda: natural",
        "(natural := 1)",
        "natural and linf",
        "not natural",
        "natural; linf",
        "open('x')",
        "__import__('os').system('true')",
        "min(natural)",
        "min(*natural, linf)",
        "min(natural, linf, key=abs)",
        "abs(natural)",
        "min.__class__(natural, linf)",
        "().__class__",
        "'natural' + linf",
        "True + natural",
        "1j * natural",
        "1e999 * natural",
        "natural[linf]",
        "natural[0:1]",
        "f'{natural}'",
        "natural\x00",
        "-" * 40 + "natural",
        "natural + " * 60 + "natural",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(SweepError):
        parse_expression(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("naturl", "there is no 'naturl'; there is natural, linf"),
        ("validation.drifts", "there is no 'drifts' in validation"),
        ("validation", "validation is no number; choose one of accuracy, drift"),
        ("validation.drift.more", "there is no 'more'"),
        ("flag", "flag is no number"),
        ("natural.__class__", "there is no '__class__'"),
    ],
)
def test_names_are_checked_before_anything_runs(text: str, says: str) -> None:
    with pytest.raises(SweepError, match="expression") as caught:
        parse_expression(text).check(RECORD)
    assert says in str(caught.value)


@given(st.text(max_size=60))
def test_any_text_is_an_expression_or_one_clear_line(text: str) -> None:
    complaint, paths = "", frozenset[tuple[str, ...]]()
    try:
        paths = parse_expression(text).paths
    except SweepError as error:
        complaint = str(error)
    assert bool(paths) != bool(complaint) and "\n" not in complaint
