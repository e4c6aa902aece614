"""Piecewise-linear schedules: against numpy.interp, at jumps, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from generalist.core.schedule import Schedule

PAPER = Schedule.model_validate({"fractions": [0, "1/3", "2/3", 1], "values": [1, 1, 1, 0]})


@pytest.mark.parametrize(("written", "value"), [(0.25, 0.25), (3, 3.0), ("1/4", 0.25), ("1e-3", 1e-3), (0, 0.0)])
def test_a_bare_number_is_a_constant(written: object, value: float) -> None:
    schedule = Schedule.model_validate(written)
    assert [schedule.at(epoch, 7) for epoch in (0, 0.01, 3.5, 7, 100)] == [value] * 5


def test_fractions_scale_with_the_number_of_epochs() -> None:
    for epochs in (3, 120, 200):
        assert PAPER.at(0, epochs) == 1
        assert PAPER.at(epochs / 2, epochs) == 1
        assert PAPER.at(epochs * 5 / 6, epochs) == pytest.approx(0.5, abs=1e-12)
        assert PAPER.at(epochs, epochs) == 0
    assert PAPER.breakpoints(120) == pytest.approx([0, 40, 80, 120])


def test_epochs_do_not_scale() -> None:
    schedule = Schedule.model_validate({"epochs": [2, 4], "values": [1, 3]})
    for epochs in (4, 400):
        assert [schedule.at(epoch, epochs) for epoch in (0, 2, 2.5, 3, 4, 50)] == [1, 1, 1.5, 2, 3, 3]
    assert schedule.breakpoints(400) == [2, 4]


def test_two_equal_positions_are_a_jump_to_the_later_value() -> None:
    schedule = Schedule.model_validate({"epochs": [0, 5, 5, 10], "values": [1, 1, 0.1, 0.1]})
    assert schedule.at(np.nextafter(5, 0), 10) == pytest.approx(1)
    assert schedule.at(5, 10) == 0.1
    assert schedule.at(9, 10) == 0.1


def test_a_jump_at_either_end() -> None:
    schedule = Schedule.model_validate({"epochs": [0, 0, 4, 4], "values": [9, 1, 1, 5]})
    assert [schedule.at(epoch, 4) for epoch in (0, 2, 4, 6)] == [1, 1, 5, 5]


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        ({"values": [1]}, "one of the two"),
        ({"fractions": [0], "epochs": [0], "values": [1]}, "one of the two"),
        ({"fractions": [0, 1], "values": [1]}, "one value per breakpoint"),
        ({"fractions": [], "values": []}, "one value per breakpoint"),
        ({"fractions": [0, 0.6, 0.5], "values": [1, 1, 1]}, "must not decrease"),
        ({"epochs": [-1, 2], "values": [1, 1]}, "start at 0"),
        ({"fractions": [0, 1.5], "values": [1, 1]}, "end at 1"),
        ({"fractions": [0, float("nan")], "values": [1, 1]}, "finite"),
        ({"fractions": [0], "values": [float("inf")]}, "finite"),
        ({"fractions": [0], "values": ["1/0"]}, "denominator"),
        ({"fractions": [0], "values": ["high"]}, "valid number"),
        ({"fractions": [0], "values": [1], "shape": "cosine"}, "shape"),
        (True, "Schedule"),
        (None, "Schedule"),
        ([0, 1], "Schedule"),
    ],
)
def test_what_is_no_schedule_is_refused(raw: object, word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        Schedule.model_validate(raw)


@st.composite
def breakpoints(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    numbers = st.integers(0, 1000).map(lambda n: n / 1000)
    positions = sorted(draw(st.lists(numbers, min_size=1, max_size=6, unique=True)))
    values = draw(st.lists(st.floats(-10, 10), min_size=len(positions), max_size=len(positions)))
    return positions, values


@given(points=breakpoints(), epoch=st.floats(0, 50), epochs=st.integers(1, 50))
def test_it_is_numpys_interpolation(points: tuple[list[float], list[float]], epoch: float, epochs: int) -> None:
    positions, values = points
    by_fraction = Schedule(fractions=positions, values=values)
    assert by_fraction.at(epoch, epochs) == pytest.approx(np.interp(epoch / epochs, positions, values), abs=1e-9)
    by_epoch = Schedule(epochs=positions, values=values)
    assert by_epoch.at(epoch / 50, epochs) == pytest.approx(np.interp(epoch / 50, positions, values), abs=1e-9)


@given(points=breakpoints(), epoch=st.floats(0, 50))
def test_it_never_leaves_the_range_of_its_values(points: tuple[list[float], list[float]], epoch: float) -> None:
    positions, values = points
    value = Schedule(fractions=positions, values=values).at(epoch, 50)
    assert min(values) - 1e-12 <= value <= max(values) + 1e-12
