"""A sweep's picture: what stands where, which lines there are, and what is refused."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import run_main
from sweep_helpers import write_sweep

from generalist.core.errors import SweepError
from generalist.report.drawing import Drawing, Text
from generalist.report.svg import file_text
from generalist.sweep.definition import Sweep, load_sweep
from generalist.sweep.trials import Row
from generalist.sweep_plots import check_drawable, picture, short_labels

SEEDS = {"train.seed": {"values": [0, 1]}}
GAMMAS = {"mixing.gamma.values": {"values": [[1, 1, 1, 0], [1, 1, 1, 0.5]]}}
EVERY = {"mixing.redistribution.every": {"values": [1, 2]}}


def sweep_of(folder: Path, **changes: Any) -> Sweep:
    return load_sweep(write_sweep(folder, objectives=["natural", "robust"], **changes))


def rows_of(sweep: Sweep, value: Any) -> list[Row]:
    """A complete trial for each combination; `value` makes its objectives of the trial's number."""
    combinations = 1
    for space in sweep.options.search.values():
        combinations *= len(space.choices() or [0])
    return [Row(i, "complete", sweep.choice(i), value(i)) for i in range(combinations)]


def texts(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Text)]


def tips(drawing: Drawing) -> list[str]:
    return [tip for shape in drawing.shapes if (tip := getattr(shape, "tip", ""))]


def test_every_objective_has_a_panel_and_every_trial_a_mark(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, search={**GAMMAS, **EVERY})
    drawing = picture(sweep, rows_of(sweep, lambda i: (0.9 - 0.01 * i, 0.5 + 0.01 * i)))
    assert drawing.width == 720 and {"natural", "robust"} <= set(texts(drawing))
    assert texts(drawing).count("mixing.gamma.values") == 2
    assert [text for text in texts(drawing) if text in ("0", "0.5")].count("0.5") >= 2  # of a list what differs
    assert sorted(tips(drawing)[:4]) == [
        "every 1, 0, 0.9000",
        "every 1, 0.5, 0.8800",
        "every 2, 0, 0.8900",
        "every 2, 0.5, 0.8700",
    ]
    ElementTree.fromstring(file_text(drawing).encode())  # a file that viewers read


def test_seeds_are_averaged(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, search={**EVERY, **SEEDS})
    drawing = picture(sweep, rows_of(sweep, lambda i: (0.5 + 0.1 * i, 0.0)))
    assert len(tips(drawing)) == 4  # two places in two panels
    by_place = {(row.choice["mixing.redistribution.every"]): [] for row in rows_of(sweep, lambda i: (0.0, 0.0))}
    for row in rows_of(sweep, lambda i: (0.5 + 0.1 * i, 0.0)):
        assert row.values is not None
        by_place[row.choice["mixing.redistribution.every"]].append(row.values[0])
    assert tips(drawing)[:2] == [f"{place}, {sum(found) / 2:.4f}" for place, found in by_place.items()]


def test_higher_stands_higher(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, search=EVERY)
    drawing = picture(sweep, rows_of(sweep, lambda i: (0.2 + 0.1 * i, 0.7 - 0.1 * i)))
    marks = {
        shape.tip: (min(x for x, _ in shape.points), min(y for _, y in shape.points))
        for shape in drawing.shapes
        if not isinstance(shape, Text) and shape.tip
    }
    assert marks["2, 0.3000"][1] < marks["1, 0.2000"][1] and marks["2, 0.3000"][0] > marks["1, 0.2000"][0]
    assert marks["2, 0.6000"][1] > marks["1, 0.7000"][1]


def test_trials_without_a_value_are_left_out(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, search=EVERY)
    one, other = rows_of(sweep, lambda i: (0.5, 0.5))
    failed = Row(other.number, "failed", other.choice, None)
    assert len(tips(picture(sweep, [one, failed]))) == 2
    with pytest.raises(SweepError, match="no trial is complete"):
        picture(sweep, [failed])


def test_ranges_are_points_over_a_scale(tmp_path: Path) -> None:
    search = {
        "learners.linf.optimizer.lr": {"low": 0.01, "high": 0.1},
        "learners.natural.optimizer.lr": {"low": 0.01, "high": 0.1},
    }
    sweep = sweep_of(tmp_path, search=search, method="random", trials=12)
    rows = [Row(i, "complete", sweep.choice(i), (0.5, 0.5)) for i in range(12)]
    assert len(tips(picture(sweep, rows))) == 24


STEPS: dict[str, dict[str, Any]] = {
    "mixing.redistribution.every": {"low": 1, "high": 3, "integer": True},
    "learners.linf.optimizer.lr": {"low": 0.5, "high": 1.5, "step": 0.5},
}


@pytest.mark.parametrize("field", STEPS)
def test_ranges_in_steps_are_numbers_too(tmp_path: Path, field: str) -> None:
    """The database gives them back as numbers."""
    sweep = sweep_of(tmp_path, search={field: STEPS[field]})
    values = [STEPS[field]["low"] + i * STEPS[field].get("step", 1) for i in range(3)]
    rows = [Row(i, "complete", {field: value}, (0.5, 0.5)) for i, value in enumerate(values)]
    assert [tip.split(",")[0] for tip in tips(picture(sweep, rows))[:3]] == [f"{value:.4g}" for value in values]


def test_too_many_lines_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many = {"train.batch_size": {"values": list(range(10, 19))}}
    sweep = sweep_of(tmp_path, search={**EVERY, **many})
    with pytest.raises(SweepError, match="9 lines"):
        check_drawable(sweep)
    out = tmp_path / "out"
    arguments = ["sweep", str(tmp_path / "tiny.yaml"), "--out", str(out), "--svg", str(tmp_path / "x.svg")]
    code, _, complaint = run_main(arguments, monkeypatch, capsys)
    assert code == 2 and "9 lines" in complaint and not out.exists()


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1, 2.5], ["1", "2.5"]),
        ([[1, 0], [1, 0.5]], ["0", "0.5"]),
        ([[1, 0], [2, 0.5]], ["[1, 0]", "[2, 0.5]"]),
        (["none", "linf"], ["none", "linf"]),
    ],
)
def test_labels(values: list[Any], labels: list[str]) -> None:
    assert short_labels(values) == labels
