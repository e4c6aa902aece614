"""Figures on corrupted images beside one another and beside the second paper's table IV: like with like alone."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import run_main
from compare_helpers import write_run, write_summary

from generalist import shift_figures
from generalist.compare import compare
from generalist.comparison_text import to_csv, to_latex, to_markdown
from generalist.core.errors import RunError
from generalist.data.corruptions import COMMON, EXTRA
from generalist.evaluation.accuracy import Accuracy
from generalist.evaluation.corruptions import STABILITY, CorruptionResult, PerturbationResult, Stability
from generalist.paper_figures import _table, paper_rows

LEVEL5, LEVELS, SEQUENCES = "corruptions/level 5", "corruptions/levels 1-5", "sequences/mean"
RECIPE = "baseline-cifar10-resnet18-msd"


def corrupted(
    names: Sequence[str] = COMMON, *, generated: bool = False, total: int = 1000, right: int = 900
) -> dict[str, Any]:
    """By hand: at severity s, corruption number i leaves `right` - 100 s + i of 1000 right."""
    accuracies = {
        name: {s: Accuracy((right - 100 * s + i) * total // 1000, total) for s in range(1, 6)}
        for i, name in enumerate(names)
    }
    return CorruptionResult("images", generated, 0 if generated else None, accuracies).to_dict()


def sequenced(names: Sequence[str] = STABILITY, *, generated: bool = False, samples: int = 1000) -> dict[str, Any]:
    found = {name: Stability(accuracy=0.5 + i / 100, flip_rate=0.1, frames=31) for i, name in enumerate(names)}
    return PerturbationResult("images", generated, 0 if generated else None, samples, found).to_dict()


def write_shift(run: Path, key: str = "a", **parts: Mapping[str, Any] | None) -> None:
    (run / "evaluation" / key / "corruptions.json").write_text(json.dumps({"asked": {}, **parts}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", RECIPE, a={"natural": (850, 1000)})


def ours(run: Path) -> dict[str, float]:
    (row,) = compare([run]).rows
    return {column: round(cell.value, 6) for column, cell in row.cells.items() if column != "natural"}


# -- our runs ---------------------------------------------------------------------------------------------------------


def test_means_over_the_benchmarks_corruptions_and_sequences_are_columns(run: Path) -> None:
    """By hand: at severity 5 the mean of 400 .. 414 of 1000 is 40.7%, over all severities 60.7%; sequences have 50 ..
    59%."""
    write_shift(run, corruptions=corrupted(), perturbations=sequenced())
    found = compare([run])
    assert found.columns == ["natural", f"official {LEVEL5}", f"official {LEVELS}", f"official {SEQUENCES}"]
    assert ours(run) == {f"official {LEVEL5}": 0.407, f"official {LEVELS}": 0.607, f"official {SEQUENCES}": 0.545}
    cells = found.rows[0].cells
    assert {cell.samples for cell in cells.values()} == {1000}
    assert cells[f"official {LEVEL5}"].low is None, "Wilson's interval is of independent images"


def test_more_than_the_benchmarks_fifteen_do_not_move_their_mean(run: Path) -> None:
    write_shift(run, corruptions=corrupted((*COMMON, *EXTRA)), perturbations=sequenced((*STABILITY, "shear")))
    assert ours(run) == {f"official {LEVEL5}": 0.407, f"official {LEVELS}": 0.607, f"official {SEQUENCES}": 0.545}


def test_fewer_than_the_benchmarks_are_no_mean(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shift(run, corruptions=corrupted(COMMON[1:]), perturbations=sequenced(STABILITY[1:]))
    assert ours(run) == {}
    code, out, _ = run_main(["compare", str(run)], monkeypatch, capsys)
    assert code == 0 and "--format csv has every corruption and sequence" in " ".join(out.split())
    known = {"1": Accuracy(1, 2).as_json(), "5": Accuracy(1, 2).as_json()}
    some = corrupted() | {"corruptions": {name: {"mean": 0.5, "severities": known} for name in COMMON}}
    write_shift(run, corruptions=some)
    assert ours(run) == {f"official {LEVEL5}": 0.5}, "not all severities: no mean over them"


def test_generated_images_are_never_in_one_column_with_the_official_files(run: Path, tmp_path: Path) -> None:
    write_shift(run, corruptions=corrupted(generated=True), perturbations=sequenced(generated=True))
    assert set(ours(run)) == {f"generated {LEVEL5}", f"generated {LEVELS}", f"generated {SEQUENCES}"}
    other = write_run(tmp_path / "other", RECIPE, a={"natural": (850, 1000)})
    write_shift(other, corruptions=corrupted())
    found = compare([run, other])
    assert found.columns[1:] == [
        f"official {LEVEL5}", f"official {LEVELS}", f"generated {LEVEL5}", f"generated {LEVELS}",
        f"generated {SEQUENCES}",
    ]  # fmt: skip
    assert not found.rows[0].cells.keys() & found.rows[1].cells.keys() - {"natural"}


def test_more_images_count_more_and_figures_of_equals_are_not_mixed(run: Path) -> None:
    """The worse of two draws of corruptions is no stronger attack: all figures are of one evaluation."""
    for key, total, right in (("a", 100, 900), ("b", 1000, 800), ("c", 1000, 700)):
        write_summary(run, key, {"natural": Accuracy(1, 2).as_json()})
        write_shift(run, key, corruptions=corrupted(total=total, right=right))
    assert ours(run) == {f"official {LEVEL5}": 0.307, f"official {LEVELS}": 0.507}
    (row,) = compare([run]).rows
    assert row.details["official corruptions/gaussian_noise 5"].value == 0.3


def test_csv_has_every_corruption_and_sequence(run: Path) -> None:
    write_shift(run, corruptions=corrupted((*COMMON, *EXTRA)), perturbations=sequenced())
    found = compare([run], paper=True)
    lines = {line["metric"]: line for line in csv.DictReader(io.StringIO(to_csv(found))) if line["source"] == "ours"}
    assert len(lines) == 1 + 3 + 19 * 5 + 10
    single, sequence = lines["official corruptions/gaussian_noise 1"], lines["official sequences/tilt"]
    low, high = Accuracy(800, 1000).interval
    assert (single["value"], single["samples"]) == ("80.00", "1000")
    assert (single["low"], single["high"]) == (f"{100 * low:.2f}", f"{100 * high:.2f}")
    assert (sequence["value"], sequence["low"]) == ("58.00", "")
    for text in (to_markdown(found), to_latex(found)):
        assert "compression" not in text and "tilt" not in text


def test_seeds_are_means_of_corruptions_too(tmp_path: Path) -> None:
    runs = []
    for seed, right in ((0, 900), (1, 920)):
        made = write_run(tmp_path / f"d-{seed}", "cifar10-resnet18-d", a={"natural": (9, 10)})
        text = (made / "recipe.yaml").read_text()
        (made / "recipe.yaml").write_text(text.replace("train: {", f"train: {{seed: {seed}, "))
        write_shift(made, corruptions=corrupted(right=right))
        runs.append(made)
    (row,) = compare(runs, seeds=True).rows
    mean = row.cells[f"official {LEVEL5}"]
    assert mean.value == pytest.approx(0.417) and mean.deviation == pytest.approx(0.0141421, abs=1e-6)
    assert row.details["official corruptions/fog 5"].runs == 2


# -- the papers -------------------------------------------------------------------------------------------------------


def test_table_iv_stands_beside_the_official_files(run: Path) -> None:
    write_shift(run, corruptions=corrupted(), perturbations=sequenced())
    found = compare([run], paper=True)
    assert [row.source for row in found.rows] == ["ours", "Generalist++, table I", "Generalist++, table IV"]
    theirs = found.rows[2]
    assert theirs.dataset == "cifar10" and {c: round(100 * cell.value, 2) for c, cell in theirs.cells.items()} == {
        f"official {LEVEL5}": 45.79,
        f"official {SEQUENCES}": 48.03,
    }
    assert found.lacking == []


def test_every_figure_of_table_iv_has_its_place() -> None:
    rows = [row for row in paper_rows() if row.source == "Generalist++, table IV"]
    printed = [entry for entry in _table("paper_results.csv") if entry["table"] == "IV"]
    assert sum(len(row.cells) for row in rows) == len(printed) == 120
    assert {row.dataset for row in rows} == {"cifar10", "cifar100"}
    assert {column for row in rows for column in row.cells} == {f"official {LEVEL5}", f"official {SEQUENCES}"}


def test_a_figure_of_table_iv_that_cannot_be_right_is_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "baseline-cifar10-wrn-32-10-msd", a={"natural": (850, 1000)})
    write_shift(run, perturbations=sequenced())
    found = compare([run], paper=True)
    assert found.marks() == {(2, f"official {SEQUENCES}"): 1} and "48.83" in found.footnotes()[0]


def test_nothing_of_table_iv_beside_runs_without_corruptions_or_with_generated_ones(run: Path, tmp_path: Path) -> None:
    sources = ["ours", "Generalist++, table I"]
    found = compare([run], paper=True)
    assert [row.source for row in found.rows] == sources and not any("official" in text for text in found.remarks())
    write_shift(run, corruptions=corrupted(generated=True))
    found = compare([run], paper=True)
    assert [row.source for row in found.rows] == sources
    line = found.remarks()[-1]
    assert line.startswith("Generalist++, table IV is of the official files") and line.endswith(
        "not of generated corruptions: cifar10, resnet18, msd"
    )
    assert to_markdown(found).endswith(f"\n\n{line}\n")
    assert not compare([run]).lacking
    digits = write_run(tmp_path / "digits", "digits-at", a={"natural": (850, 1000)})
    write_shift(digits, corruptions=corrupted(generated=True))
    assert not any("official" in text for text in compare([digits], paper=True).lacking), "not in table IV anyway"


def test_table_iv_is_there_where_any_of_several_runs_of_a_method_has_corruptions(run: Path, tmp_path: Path) -> None:
    write_shift(run, corruptions=corrupted())
    last = write_run(tmp_path / "last", RECIPE, a={"natural": (8, 10)})
    sources = [row.source for row in compare([run, last], paper=True).rows]
    assert sources == ["ours", "ours", "Generalist++, table I", "Generalist++, table IV"]


# -- hostile files ----------------------------------------------------------------------------------------------------


def damaged(**changes: Any) -> str:
    return json.dumps({"corruptions": corrupted(("fog",)) | changes})


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", "[" * 100_000, '{"corruptions": 3}', '{"perturbations": {"sequences": {}}}',
        damaged(generated="no"),
        damaged(corruptions={}),
        damaged(corruptions={"fog": {"mean": 0.5, "severities": {}}}),
        damaged(corruptions={"fog": {"mean": 0.5, "severities": {"9": Accuracy(1, 2).as_json()}}}),
        damaged(corruptions={"fog": {"mean": 0.5, "severities": {"5": {"correct": 3, "total": 2}}}}),
        damaged(corruptions={"fog": {"mean": 0.5, "severities": {"5": {"correct": True, "total": 2}}}}),
        damaged(corruptions={"fog": {"mean": 0.5, "severities": {"5": {"correct": 0, "total": 0}}}}),
        damaged(corruptions={
            "fog": {"mean": 0.5, "severities": {"4": Accuracy(1, 2).as_json(), "5": Accuracy(1, 3).as_json()}}
        }),
        json.dumps({"perturbations": sequenced() | {"samples": 0}}),
        json.dumps({"perturbations": sequenced(("tilt",))}).replace('"accuracy": 0.5', '"accuracy": NaN'),
        json.dumps({"perturbations": sequenced(("tilt",))}).replace('"accuracy": 0.5', '"accuracy": 1.5'),
    ],
)  # fmt: skip
def test_damaged_corruptions_are_a_clear_line(run: Path, content: str) -> None:
    (run / "evaluation" / "a" / "corruptions.json").write_text(content)
    with pytest.raises(RunError, match=r"corruptions\.json is damaged: .*; evaluate again") as caught:
        compare([run])
    assert len(str(caught.value)) < 400 + len(str(run))


def test_what_is_no_file_or_too_large_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run / "evaluation" / "a" / "corruptions.json"
    os.mkfifo(path)  # reading it would wait for ever
    with pytest.raises(RunError, match=r"corruptions\.json is not a file"):
        compare([run])
    path.unlink()
    write_shift(run, corruptions=corrupted())
    monkeypatch.setattr(shift_figures, "MAX_BYTES", 100)
    with pytest.raises(RunError, match="too large"):
        compare([run])


def test_names_of_corruptions_cannot_break_out(run: Path) -> None:
    """They are in CSV alone, and no cell of it begins like a formula."""
    write_shift(run, corruptions=corrupted(["=1+1\n|", "linf:8/255"]))
    found = compare([run])
    assert found.columns == ["natural"]
    lines = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert len(lines) == 1 + 10 and all(line["metric"][0] in "no" for line in lines)
