"""What `generalist sweep` prints at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_helpers import work, write_sweep

from generalist.console import console
from generalist.console_sweep import show_sweep
from generalist.sweep import trials
from generalist.sweep.definition import Sweep, load_sweep, shipped_sweeps
from generalist.sweep.trials import Row


def rows_of(sweep: Sweep) -> list[Row]:
    """Trials of which the last is the best."""
    options = sweep.options
    return [
        Row(
            number=number,
            state="complete",
            choice=dict(sweep.choice(number)),
            values=tuple(number / 16 * (1 if each.direction == "maximize" else -1) for each in options.objectives),
            measures=dict.fromkeys(options.measures, 123.456789),
            epoch=120,
        )
        for number in range(4)
    ]


def shown(sweep: Sweep, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    monkeypatch.setattr(console, "width", width)
    show_sweep(sweep, rows_of(sweep), Path("out"))
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", shipped_sweeps())
def test_a_table_fits_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every trial with its choice and its objectives; of the measures as many as there is room for."""
    sweep = load_sweep(name)
    lines = shown(sweep, 80, monkeypatch, capsys)
    assert max(map(len, lines)) <= 80
    (best,) = (line for line in lines if line.startswith("    3 complete *"))
    assert best.count("0.1875") == len(sweep.options.objectives)
    (left,) = (line for line in lines if line.startswith("no room for ")) if "no room" in "".join(lines) else ("",)
    here = [measure for measure in sweep.options.measures if measure not in left]
    assert best.count("123.5") == len(here)


def test_a_table_with_room_has_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(load_sweep("digits-gamma-end"), 140, monkeypatch, capsys)
    assert "\u2503 mixing.gamma.values \u2503" in lines[2] and "seconds" in lines[2]
    assert "no room" not in "".join(lines)


def test_an_objective_that_is_not_finite_is_named(tmp_path: Path) -> None:
    objectives = ["natural", "1 / (robust - robust)"]
    search = {"mixing.redistribution.every": {"values": [1]}}
    (row,) = trials.rows(work(write_sweep(tmp_path, objectives=objectives, search=search), tmp_path / "out"))
    assert (row.state, row.error) == ("failed", "the objective 1 / (robust - robust) is not finite")
