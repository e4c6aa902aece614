"""Runs beside one another and beside the papers: what is read, what is marked, and every form of output."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from cli_helpers import run_main
from compare_helpers import write_run, write_summary

from generalist import evaluate, train
from generalist.compare import Comparison, compare, rows_of
from generalist.comparison_rows import UNION_MEAN, UNION_WORST, Cell, Row
from generalist.comparison_text import to_csv, to_latex, to_markdown
from generalist.console import console
from generalist.core.errors import GeneralistError, RunError
from generalist.evaluation.accuracy import Accuracy
from generalist.method_names import method_of
from generalist.paper_figures import _table, paper_column, paper_rows
from generalist.recipe import load_recipe


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A run of the msd recipe, evaluated in two parts."""
    figures = {"natural": (850, 1000), "pgd-20/linf:8/255": (500, 1000), "aa/linf:8/255": (450, 1000)}
    run = write_run(tmp_path / "mine", "baseline-cifar10-resnet18-msd", a=figures)
    union = {"union_worst_case": Accuracy(440, 1000).as_json(), "mean_over_threats": {"value": 0.52, "of": "aa"}}
    write_summary(run, "b", {"aa/l2:128/255": Accuracy(590, 1000).as_json()}, **union)
    return run


def cell(comparison: Comparison, row: int, column: str) -> float:
    return round(100 * comparison.rows[row].cells[column].value, 2)


# -- our runs ---------------------------------------------------------------------------------------------------------


def test_evaluations_of_a_run_are_one_row(mine: Path) -> None:
    found = compare([mine])
    assert len(found.rows) == 1
    row = found.rows[0]
    assert (row.name, row.source, row.dataset, row.model, row.method) == ("mine", "ours", "cifar10", "resnet18", "msd")
    assert found.columns == [
        "natural", "pgd-20/linf:8/255", "aa/linf:8/255", "aa/l2:128/255", UNION_MEAN, UNION_WORST,
    ]  # fmt: skip
    assert [cell(found, 0, column) for column in found.columns] == [85, 50, 45, 59, 52, 44]


def test_a_mean_of_other_attacks_than_autoattack_is_not_the_papers_union(mine: Path) -> None:
    write_summary(
        mine, "b", {"natural": Accuracy(1, 2).as_json()}, mean_over_threats={"value": 0.5, "of": "worst_case"}
    )
    assert UNION_MEAN not in compare([mine]).columns


def test_figures_of_two_draws_of_images_stay_together(tmp_path: Path) -> None:
    """The lower of two natural accuracies is no stronger attack, and goes with the other's robust accuracy."""
    run, figure = write_run(tmp_path / "run", "cifar10-resnet18-d"), lambda right: Accuracy(right, 1000).as_json()
    threat = "linf:8/255"
    for key, samples, figures in (
        ("best-a", "one", {"natural": 900, f"aa/{threat}": 470, f"apgd-ce/{threat}": 490}),
        ("best-b", "two", {"natural": 880, f"apgd-ce/{threat}": 480, f"pgd-20/{threat}": 500}),
        ("best-c", "one", {"natural": 900, f"apgd-ce/{threat}": 485}),
    ):
        accuracy = {name: figure(right) for name, right in figures.items()}
        write_summary(run, key, accuracy, identity={"samples": samples})
    (row,) = rows_of(run)
    found = {column: round(1000 * cell.value) for column, cell in row.cells.items()}
    wanted = {"natural": 900, f"aa/{threat}": 470, f"apgd-ce/{threat}": 485, f"pgd-20/{threat}": 500}
    assert found == wanted


def test_more_images_count_more_and_of_equals_the_lower_accuracy(tmp_path: Path) -> None:
    evaluations = {"a": {"natural": (9, 10)}, "b": {"natural": (70, 100)}, "c": {"natural": (60, 100)}}
    run = write_run(tmp_path / "run", "digits-at", **evaluations)
    assert cell(compare([run]), 0, "natural") == 60


def test_networks_of_one_run_are_rows_of_their_own(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "digits-at", a={"natural": (9, 10)})
    write_summary(run, "b", {"natural": Accuracy(8, 10).as_json()}, subject="last")
    assert [row.name for row in compare([run]).rows] == ["run", "run (last)"]


def test_figures_of_other_images_or_weights_are_rows_of_their_own(tmp_path: Path) -> None:
    """However many images there are of another set, and however much lower the figures of earlier weights."""
    run = write_run(tmp_path / "run", "baseline-cifar10-resnet18-msd")
    now, before = {"weights": "1" * 64, "data": "a" * 64}, {"weights": "2" * 64, "data": "a" * 64}
    write_summary(run, "a", {"natural": Accuracy(90, 100).as_json()}, split="cifar10-test", identity=now)
    write_summary(run, "b", {"natural": Accuracy(80, 100).as_json()}, split="cifar10-test", identity=before)
    elsewhere = {"weights": "1" * 64, "data": "b" * 64}
    write_summary(run, "Z", {"natural": Accuracy(200, 1000).as_json()}, split="svhn-test", identity=elsewhere)
    found = compare([run], paper=True)
    ours = [(row.name, row.dataset, row.cells["natural"].value) for row in found.rows if row.source == "ours"]
    assert ours == [
        ("run (weights 11111111)", "cifar10", 0.9),
        ("run (weights 22222222)", "cifar10", 0.8),
        ("run (on svhn-test)", "svhn-test", 0.2),
    ]
    assert [row.source for row in found.rows].count("ours") < len(found.rows)
    assert found.rows[-1].name == "run (on svhn-test)"  # the papers' rows are of the run's own images


def test_figures_of_weights_that_the_run_no_longer_has_say_so(tmp_path: Path) -> None:
    """A run that was measured before its end, and went on."""
    overrides = ["model.width=4", "train.epochs=1", "validation.steps=1"]
    run = train("digits-at", out=tmp_path / "run", overrides=overrides, device="cpu")
    evaluate(run, attacks="natural", out=run.path / "evaluation", device="cpu")
    assert [row.name for row in compare([run.path]).rows] == ["run"]
    other = train("digits-at", out=tmp_path / "other", overrides=[*overrides, "train.seed=1"], device="cpu")
    shutil.copy(other.model, run.model)
    (row,) = compare([run.path]).rows
    assert re.fullmatch(r"run \(earlier weights [0-9a-f]{8}\)", row.name)
    evaluate(run, attacks="natural", out=run.path / "evaluation", device="cpu")
    assert sorted(each.name for each in compare([run.path]).rows) == ["run", row.name]


def with_union(run: Path, key: str, threats: list[str], worst: int, mean: float) -> None:
    """An evaluation of AutoAttack in these threats, with both unions."""
    accuracy = {name: Accuracy(50, 100).as_json() for name in ("natural", *(f"aa/{threat}" for threat in threats))}
    union = {
        "worst_case": {threat: Accuracy(50, 100).as_json() for threat in threats},
        "union_worst_case": Accuracy(worst, 100).as_json(),
        "mean_over_threats": {"value": mean, "of": "aa"},
    }
    write_summary(run, key, accuracy, **union)


def test_unions_over_other_threats_are_never_in_one_column(tmp_path: Path) -> None:
    """A weak threat lifts a union: side by side they would say that natural training is the best of all."""
    runs = [write_run(tmp_path / name, "digits-at") for name in ("weak", "strong", "too")]
    with_union(runs[0], "a", ["l2:128/255", "linf:8/255"], 60, 0.7)
    for run in runs[1:]:
        with_union(run, "a", ["l2:0.7", "linf:0.18"], 20, 0.3)
    assert {UNION_MEAN, UNION_WORST} <= set(compare(runs[1:]).columns), "alike, they need no more words"
    found = compare(runs)
    weak, strong = f"{UNION_WORST} of linf:8/255, l2:128/255", f"{UNION_WORST} of linf:0.18, l2:0.7"
    assert not {UNION_MEAN, UNION_WORST} & set(found.columns) and {weak, strong} <= set(found.columns)
    assert [row.cells.keys() & {weak, strong} for row in found.rows] == [{weak}, {strong}, {strong}]
    with_union(runs[1], "b", ["l2:128/255", "linf:8/255"], 60, 0.7)
    both = compare(runs[1:])  # one run has both sets of threats, the other one of them
    assert [row.cells.keys() & {weak, strong} for row in both.rows] == [{weak, strong}, {strong}]
    assert UNION_WORST not in both.columns


def test_a_run_keeps_the_unions_of_all_its_evaluations(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "digits-at")
    with_union(run, "a", ["l2:128/255", "linf:8/255"], 60, 0.7)
    with_union(run, "b", ["l2:0.7", "linf:0.18"], 20, 0.3)
    cells = compare([run]).rows[0].cells
    assert cells[f"{UNION_MEAN} of linf:8/255, l2:128/255"].value == 0.7
    assert cells[f"{UNION_MEAN} of linf:0.18, l2:0.7"].value == 0.3


def test_a_union_of_autoattack_comes_before_a_larger_one_of_weaker_attacks(tmp_path: Path) -> None:
    """Else the worst case over all threats would lie above AutoAttack in one of them, in the same row."""
    run = write_run(tmp_path / "run", "digits-at")
    for key in ("a", "c"):  # read before and after it
        tried = {"l2:0.7": Accuracy(300, 500).as_json(), "linf:0.18": Accuracy(320, 500).as_json()}
        more = {"worst_case": tried, "union_worst_case": Accuracy(290, 500).as_json()}
        write_summary(run, key, {"natural": Accuracy(490, 500).as_json()}, **more)
    with_union(run, "b", ["l2:0.7", "linf:0.18"], 20, 0.3)
    found = compare([run])
    assert [cell(found, 0, column) for column in ("natural", UNION_WORST)] == [98, 20]


def test_unions_of_weaker_attacks_beside_autoattacks_are_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, "digits-at") for name in ("strong", "weak")]
    with_union(runs[0], "a", ["l2:0.7", "linf:0.18"], 20, 0.3)
    tried = {"l2:0.7": Accuracy(30, 100).as_json(), "linf:0.18": Accuracy(32, 100).as_json()}
    more = {"worst_case": tried, "union_worst_case": Accuracy(29, 100).as_json()}
    write_summary(runs[1], "a", {"natural": Accuracy(98, 100).as_json()}, **more)
    said = f"{UNION_WORST}: under attacks weaker than AutoAttack, and so too high next to it: weak"
    assert said in compare(runs).remarks()
    assert not any("weaker" in text for run in runs for text in compare([run]).remarks())


def test_the_papers_unions_stand_beside_ours_over_the_same_threats_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "baseline-cifar10-resnet18-msd")
    with_union(run, "a", ["l2:128/255", "linf:8/255"], 40, 0.5)
    assert [UNION_MEAN in row.cells for row in compare([run], paper=True).rows] == [True, True]
    with_union(run, "a", ["l2:0.5", "linf:8/255"], 40, 0.5)
    ours = f"{UNION_MEAN} of linf:8/255, l2:0.5"
    assert [ours in row.cells for row in compare([run], paper=True).rows] == [True, False]


def test_runs_are_told_apart_and_have_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(tmp_path / place / "run", "digits-at", a={"natural": (9, 10)}) for place in ("one", "two")]
    assert [row.name for row in compare(runs).rows] == ["one/run", "two/run"]
    monkeypatch.chdir(runs[0])
    assert [row.name for row in compare(["."]).rows] == ["run"]
    with pytest.raises(GeneralistError, match="named twice"):
        compare([runs[0], "."])


def test_the_number_of_images_is_shown_and_how_far_intervals_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"a": {"natural": (450, 500)}, "b": {"aa/linf:0.18": (10, 100)}}
    run = write_run(tmp_path / "run", "digits-at", **figures)
    low, high = Accuracy(10, 100).interval
    assert high - 0.1 > 0.1 - low, "farther up than down"
    code, out, _ = run_main(["compare", str(run)], monkeypatch, capsys)
    assert code == 0 and "100 to 500" in out and f"reach up to {100 * (high - 0.1):.1f} points up or down" in out


@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        ("cifar10-resnet18-d", "generalist-d-nt-linf"),
        ("cifar10-resnet18-d-linf-l2", "generalist-d-linf-l2"),
        ("cifar10-resnet18-t", "generalist-t"),
        ("cifar10-resnet18-t-plain", "generalist-t"),
        ("digits-nt", "nt"),
        ("digits-at", "at"),
        ("baseline-cifar10-resnet18-e-at", "e-at"),
    ],
)
def test_methods_have_the_papers_names(recipe: str, method: str) -> None:
    assert method_of(load_recipe(recipe).learners) == method


def test_trades_is_named_by_its_beta_and_other_norms_by_theirs() -> None:
    changes = ["learners.0.objective={kind: trades, beta: 1}"]
    assert method_of(load_recipe("digits-at", overrides=changes).learners) == "trades-1"
    assert method_of(load_recipe("digits-at", overrides=["learners.0.threat=l2:0.5"]).learners) == "at (l2)"
    for around, method in (("at", "generalist-d-nt-linf"), ("trades", "hat+nt")):
        helped = [f"learners.linf.objective={{kind: hat, teacher: '#natural', around: {around}}}"]
        assert method_of(load_recipe("digits-d", overrides=helped).learners) == method
    mixed = load_recipe("digits-d", overrides=["learners.0.objective=trades"])
    assert method_of(mixed.learners) == "trades-6+nt"


@pytest.mark.parametrize(
    ("objective", "method"),
    [
        ("{kind: at-linf-l2, beside: ['l2:0.5']}", "at-linf-l2"),
        ("{kind: at-linf-l2, beside: ['l1:1']}", "at-linf-l2 (linf, l1)"),
        ("{kind: msd, beside: ['l2:0.5', 'l1:1']}", "msd (linf, l2, l1)"),
        ("{kind: e-at, beside: ['l1:1']}", "e-at"),
        ("{kind: e-at, beside: ['l2:1']}", "e-at (linf, l2)"),
        ("score", "score"),
        ("{kind: score, form: at}", "score-at"),
        ("awp", "awp"),
        ("{kind: awp, around: trades}", "awp around trades-6"),
        (
            "{kind: awp, around: {kind: rmc, ends: [a, b], around: {kind: msd, beside: ['l1:1']}}}",
            "awp around rmc (linf, l1)",
        ),
        ("{kind: rmc, ends: [a, b]}", "rmc"),
        ("{kind: rmc, ends: [a, b], around: at}", "rmc around at"),
    ],
)
def test_other_norms_and_what_is_wrapped_are_other_methods(objective: str, method: str) -> None:
    """Else the papers' figures for something else would stand beside them."""
    assert method_of(load_recipe("digits-at", overrides=[f"learners.0.objective={objective}"]).learners) == method


# -- the papers -------------------------------------------------------------------------------------------------------


def test_ours_beside_the_published_figures(mine: Path) -> None:
    found = compare([mine], paper=True)
    assert [row.source for row in found.rows] == ["ours", "Generalist++, table I"]
    printed = [
        r for r in _table("paper_results.csv") if (r["table"], r["model"], r["method"]) == ("I", "resnet18", "msd")
    ]
    values = {row["metric"]: float(row["value"]) for row in printed}
    assert cell(found, 1, "natural") == values["natural"]
    assert cell(found, 1, "aa/linf:8/255") == values["aa-linf"]
    assert cell(found, 1, UNION_MEAN) == values["union-mean"]
    assert UNION_WORST not in found.rows[1].cells, "the papers have no worst case over threats"
    epochs = load_recipe(mine / "recipe.yaml").train.epochs
    assert f"epochs of training: {found.rows[0].name}: {epochs}; the papers, on CIFAR-10: 120" in found.remarks()
    assert not any("epochs" in said for said in compare([mine]).remarks())


def test_what_keeps_runs_from_being_compared_is_said(tmp_path: Path) -> None:
    accuracy = {"natural": (90, 100)}
    runs = [
        write_run(tmp_path / name, recipe, best=accuracy)
        for name, recipe in (("one", "digits-d"), ("two", "baseline-digits-at"), ("three", "cifar10-resnet18-d"))
    ]
    said = compare(runs).remarks()
    assert "the data sets differ: figures on one say nothing about those on another" in said
    assert "trained against different threats: one: linf:0.18, two: linf:0.1, three: linf:8/255" in said
    alike = compare([runs[0], write_run(tmp_path / "four", "digits-t", best=accuracy)]).remarks()
    assert not any("differ" in line for line in alike), "an l2 learner beside is the method's, not the comparison's"


def test_the_papers_deviations_are_shown_where_they_print_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "svhn-d", a={"natural": (9, 10), "aa/linf:8/255": (4, 10)})
    found = compare([run], paper=True)
    assert "94.11 \N{PLUS-MINUS SIGN} 0.27" in to_markdown(found) and "94.11,,,,,0.27" in to_csv(found)
    assert any("standard deviation" in text for text in found.remarks())


def test_trades_without_a_beta_stands_beside_any(tmp_path: Path) -> None:
    """Table 2 does not say which it is."""
    run = write_run(tmp_path / "run", "svhn-d", a={"natural": (9, 10)})
    trades = "learners: [{name: linf, objective: trades, threat: 'linf:8/255', optimizer: {lr: 0.01}}]"
    (run / "recipe.yaml").write_text(f"data: {{name: svhn}}\nmodel: {{name: resnet18}}\n{trades}\n")
    found = compare([run], paper=True)
    assert [(row.source, row.method) for row in found.rows] == [("ours", "trades-6"), ("CVPR 2023, table 2", "trades")]
    assert found.lacking == []


def test_papers_follow_the_last_of_several_runs_of_a_method(mine: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", "baseline-cifar10-resnet18-msd", a={"natural": (8, 10)})
    generalist = write_run(tmp_path / "d", "cifar10-resnet18-d", a={"natural": (9, 10)})
    found = compare([mine, other, generalist], paper=True)
    assert [row.source for row in found.rows] == [
        "ours", "ours", "Generalist++, table I", "ours", "CVPR 2023, table 1a", "Generalist++, table I",
    ]  # fmt: skip


def test_what_the_papers_have_no_figures_of_is_said(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = [write_run(tmp_path / name, "digits-at", a={"natural": (9, 10)}) for name in ("one", "two")]
    mart = write_run(tmp_path / "mart", "baseline-cifar10-resnet18-mart", a={"natural": (8, 10)})
    model = load_recipe("digits-at").model.name
    line = f"no comparable figures in the papers: digits, {model}, at; cifar10, resnet18, mart"
    found = compare([*digits, mine, mart], paper=True)
    assert found.remarks()[-1] == line and to_markdown(found).endswith(f"\n\n{line}\n")
    assert f"% {line}" in to_latex(found).splitlines() and "comparable" not in to_csv(found)
    code, out, _ = run_main(["compare", *map(str, digits), "--paper"], monkeypatch, capsys)
    assert code == 0 and f"no comparable figures in the papers: digits, {model}, at" in out.splitlines()
    assert "comparable" not in to_markdown(compare([mine], paper=True))
    assert "comparable" not in to_markdown(compare([*digits, mine, mart]))


def test_figures_that_cannot_be_are_marked_and_explained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", "cifar100-resnet18-d-linf-l2", a={"natural": (6, 10), "aa/linf:8/255": (2, 10)})
    write_summary(run, "b", {"aa/l2:128/255": Accuracy(4, 10).as_json()}, mean_over_threats={"value": 0.3, "of": "aa"})
    found = compare([run], paper=True)
    assert found.marks() == {(1, UNION_MEAN): 1}
    (note,) = found.footnotes()
    assert "impossible" in note and "31.24" in note
    assert "33.84 [1]" in to_markdown(found) and "1. Generalist++" in to_markdown(found)


def test_every_inconsistency_is_about_a_figure_that_is_there() -> None:
    flagged = [cell for row in paper_rows() for cell in row.cells.values() if cell.flag]
    entries = _table("inconsistencies.csv")
    assert len(flagged) == len(entries) > 30
    assert Counter(cell.flag for cell in flagged) == Counter(entry["kind"] for entry in entries)
    assert all(cell.note for cell in flagged)


def test_an_impossible_union_is_not_the_mean_and_every_other_is() -> None:
    for row in paper_rows():
        if UNION_MEAN not in row.cells:
            continue
        parts = [100 * cell.value for column, cell in row.cells.items() if column.startswith("aa/")]
        union = row.cells[UNION_MEAN]
        wrong = abs(100 * union.value - sum(parts) / 2) > 0.0101
        assert wrong == (union.flag == "impossible" and "is" in union.note and "mean" in union.note), row


def test_autoattack_above_one_of_its_parts_is_marked_and_nothing_else() -> None:
    parts = [f"{attack}/linf:8/255" for attack in ("apgd-ce", "apgd-t", "fab-t", "square")]
    for row in paper_rows():
        found = [row.cells[part].value for part in parts if part in row.cells]
        if found:
            whole = row.cells["aa/linf:8/255"]
            assert (whole.value > min(found) + 1e-9) == (whole.flag == "impossible"), row


def test_accuracies_on_corrupted_images_far_below_the_natural_one_are_marked() -> None:
    """Against the same method's natural accuracy and the median of that ratio over all methods."""
    second = [row for row in paper_rows() if "Generalist++" in row.source]
    natural = {row.setup: row.cells["natural"].value for row in second if "natural" in row.cells}
    shifted = [row for row in second if row.source.endswith("table IV")]
    for dataset, column in {(row.dataset, column) for row in shifted for column in row.cells}:
        found = [(row.cells[column], natural[row.setup]) for row in shifted if row.dataset == dataset]
        usual = median(cell.value / own for cell, own in found)
        low = [cell for cell, own in found if cell.value / own < 0.85 * usual]
        assert len(low) >= 4 and all(cell.flag == "outlier" for cell in low), (dataset, column)


@pytest.mark.parametrize(
    ("metric", "eps", "column"),
    [
        ("natural", "", "natural"),
        ("pgd20-linf", "8/255", "pgd-20/linf:8/255"),
        ("apgd-ce-linf", "8/255", "apgd-ce/linf:8/255"),
        ("aa-l2", "128/255", "aa/l2:128/255"),
        ("aa-linf", "0.3", "aa/linf:0.3"),
        ("union-mean", "8/255;128/255", UNION_MEAN),
    ],
)
def test_metrics_of_the_papers_have_our_names(metric: str, eps: str, column: str) -> None:
    assert paper_column(metric, eps) == column


# -- output -----------------------------------------------------------------------------------------------------------


def test_csv_has_a_line_a_figure(mine: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(compare([mine], paper=True)))))
    ours = [line for line in lines if line["source"] == "ours"]
    assert len(ours) == 6 and len(lines) == 6 + 5
    low, high = Accuracy(850, 1000).interval
    assert ours[0]["metric"] == "natural" and ours[0]["value"] == "85.00" and ours[0]["samples"] == "1000"
    assert (ours[0]["low"], ours[0]["high"]) == (f"{100 * low:.2f}", f"{100 * high:.2f}")


def test_names_cannot_break_out_of_a_table(tmp_path: Path) -> None:
    run = write_run(tmp_path / "=a|b_c&d{x}", "digits-at", a={"natural": (9, 10)})
    found = compare([run])
    markdown = to_markdown(found).splitlines()
    assert len({line.replace("\\|", "").count("|") for line in markdown}) == 1
    assert r"=a|b\_c\&d\{x\}" in to_latex(found)
    assert "'=a|b_c&d{x}" in to_csv(found)


def test_latex_is_a_tabular(mine: Path) -> None:
    text = to_latex(compare([mine], paper=True))
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 3 and len({row.count(" & ") for row in rows}) == 1
    assert text.startswith(r"\begin{tabular}{lllllrrrrrrr}")


def test_footnotes_of_latex_are_text_below_the_tabular(tmp_path: Path) -> None:
    """A comment is not in the compiled document, where the mark is."""
    recipe = "baseline-cifar100-resnet18-at"
    run = write_run(tmp_path / "run", recipe, a={"natural": (6, 10), "aa/linf:8/255": (2, 10)})
    found = compare([run], paper=True)
    table, _, below = to_latex(found).partition("\\end{tabular}\n")
    assert "[1]" in table and "[2]" in table and "%" not in table
    lines = below.splitlines()
    assert lines[:2] == [r"\par\smallskip", r"{\footnotesize\raggedright"]
    assert lines[-2] == "}" and lines[-1].startswith("% epochs of training: run: ")
    assert [line[:4] for line in lines[2:-2]] == ["[1] ", "[2] "]
    assert all("impossible" in line and line.endswith(r"\par") for line in lines[2:-2])
    without = to_latex(compare([run]))
    assert without.endswith("\\end{tabular}\n")


def test_footnotes_of_latex_are_escaped() -> None:
    cell = Cell(0.5, flag="outlier", note="50% & {all} of a_b")
    found = Comparison([Row("x", "A & B", "d", "m", "at", {"natural": cell})], ["natural"])
    assert r"[1] A \& B, at, natural: outlier; 50\% \& \{all\} of a\_b\par" in to_latex(found).splitlines()


def test_a_name_in_brackets_is_no_option_of_the_line_before(tmp_path: Path) -> None:
    """`\\\\` and booktabs' rules take what stands in brackets behind them for a length."""
    runs = [write_run(tmp_path / name, "digits-at", a={"natural": (9, 10)}) for name in ("[3pt]", "*")]
    rows = [line for line in to_latex(compare(runs)).splitlines() if "ours" in line]
    assert [row.partition(" & ")[0] for row in rows] == ["{}[3pt]", "{}*"]


def test_a_subject_cannot_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", "digits-at", a={"natural": (9, 10)})
    write_summary(run, "b", {"natural": Accuracy(5, 10).as_json()}, subject="\x1b]0;title\x07\x1b[2J")
    code, out, _ = run_main(["compare", str(run)], monkeypatch, capsys)
    assert code == 0 and "title" in out and not {"\x1b", "\x07"} & set(out)


def test_what_a_cascade_leaves_is_no_figure_of_its_last_attack(tmp_path: Path) -> None:
    columns = ["aa/linf:0.1", "pgd-20/linf:0.1", "apgd-ce/l2:1"]
    low = {"natural": (9, 10), columns[0]: (2, 10), columns[1]: (1, 10), columns[2]: (3, 10)}
    run = write_run(tmp_path / "run", "digits-at", a={"natural": (9, 10), "pgd-20/linf:0.1": (6, 10)})
    found = {name: Accuracy(*pair).as_json() for name, pair in low.items()}
    write_summary(run, "b", found, identity={"columns": columns, "mode": "cascade"})
    (row,) = compare([run]).rows
    values = {name: cell.value for name, cell in row.cells.items()}
    assert values["pgd-20/linf:0.1"] == 0.6 and values["aa + pgd-20/linf:0.1"] == 0.1
    assert (values["aa/linf:0.1"], values["apgd-ce/l2:1"]) == (0.2, 0.3), "the first of each threat"
    write_summary(run, "b", found, identity={"columns": columns, "mode": "each"})
    assert compare([run]).rows[0].cells["pgd-20/linf:0.1"].value == 0.1


@pytest.mark.parametrize("form", ["table", "csv", "markdown", "latex"])
def test_a_column_s_name_cannot_steer_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Half a letter, which no terminal can print, is no fault of ours either."""
    run = write_run(tmp_path / "run", "digits-at", a={"natural": (9, 10), "\x1b[2J\ud800pgd/linf:0.1": (5, 10)})
    code, out, err = run_main(["compare", str(run), "--format", form], monkeypatch, capsys)
    assert (code, err) == (0, "") and "\x1b" not in out and out.encode()


def test_natural_accuracy_comes_first(mine: Path) -> None:
    assert compare([mine]).columns == [
        "natural",
        "pgd-20/linf:8/255",
        "aa/linf:8/255",
        "aa/l2:128/255",
        UNION_MEAN,
        UNION_WORST,
    ]


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_a_narrow_terminal_gets_a_column_a_run(
    runs: int, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "width", 80)
    named = [shutil.copytree(mine, mine.parent / f"a-run-with-a-name-{number}") for number in range(runs)]
    code, out, _ = run_main(["compare", *map(str, named)], monkeypatch, capsys)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    for line, figure in (("natural", "85.00"), ("aa l2:128/255", "59.00"), (UNION_WORST, "44.00")):
        (found,) = [text for text in out.splitlines() if text.startswith(f"│ {line} ")]
        assert found.count(figure) == runs


def test_the_command(mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(["compare", str(mine), "--paper"], monkeypatch, capsys)
    assert code == 0 and "85.00" in out and "Generalist++" in out
    code, out, _ = run_main(["compare", str(mine), "--format", "markdown"], monkeypatch, capsys)
    assert code == 0 and out == to_markdown(compare([mine]))
    code, _, err = run_main(["compare", str(mine), "--format", "html"], monkeypatch, capsys)
    assert code == 2 and "--format is table, csv, markdown, latex" in err
    code, _, err = run_main(["compare", str(mine.parent / "none")], monkeypatch, capsys)
    assert code == 2 and "not a run directory" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{", '{"accuracy": 3}', '{"accuracy": {"natural": 0.5}}', "[" * 100_000,
        '{"accuracy": {"natural": {"correct": 3, "total": 2}}}',
        '{"accuracy": {"natural": {"correct": true, "total": 2}}}',
        '{"accuracy": {}, "mean_over_threats": {"of": "aa", "value": NaN}}',
    ],
)  # fmt: skip
def test_a_damaged_summary_is_a_clear_line(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run", "digits-at", a={"natural": (9, 10)})
    (run / "evaluation" / "a" / "summary.json").write_text(content)
    with pytest.raises(RunError, match="is damaged"):
        compare([run])


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GeneralistError, match="at least one run"):
        compare([])
    run = write_run(tmp_path / "run", "digits-at")
    with pytest.raises(RunError, match="has no evaluation: run `generalist evaluate"):
        compare([run])
    spaced = run.rename(tmp_path / "my run")  # what is told to be run can be copied
    with pytest.raises(RunError, match=re.escape(f"`generalist evaluate '{spaced}'`")):
        compare([spaced])
    run = spaced.rename(run)


@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        ("baseline-imagenet-resnet50-fast-at", "fast-at"),
        ("baseline-imagenet-wrn-50-2-at", "at"),
        ("imagenet-resnet50-t", "generalist-t"),
        ("imagenet-wrn-50-2-d-linf-l2", "generalist-d-linf-l2"),
    ],
)
def test_runs_on_imagenet_stand_beside_the_papers_though_their_images_lie_in_a_folder(
    tmp_path: Path, recipe: str, method: str
) -> None:
    run = write_run(tmp_path / "run", recipe, a={"natural": (3000, 5000)})
    ours, theirs = compare([run], paper=True).rows
    assert (ours.dataset, ours.method) == ("imagenet", method)
    assert theirs.source == "Generalist++, table III" and theirs.cells["natural"].value > 0.5


# -- seeds ------------------------------------------------------------------------------------------------------------


def seeded(folder: Path, seed: int, natural: int, **more: tuple[int, int]) -> Path:
    run = write_run(folder / f"d-{seed}", "cifar10-resnet18-d", a={"natural": (natural, 1000), **more})
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("train: {", f"train: {{seed: {seed}, "))
    return run


def test_seeds_are_one_row_of_means(tmp_path: Path) -> None:
    """By hand: 88, 89 and 91 have the mean 89.33 and the deviation sqrt((1.78 + 0.11 + 2.78) / 2) = 1.53."""
    runs = [seeded(tmp_path, 7, 880, pgd=(1, 2)), seeded(tmp_path, 2, 890), seeded(tmp_path, 3, 910, pgd=(1, 2))]
    other = write_run(tmp_path / "at", "baseline-cifar10-resnet18-at", a={"natural": (820, 1000)})
    found = compare([runs[0], other, *runs[1:]], seeds=True)
    assert [row.name for row in found.rows] == ["d-7, seeds 2, 3, 7", "at"]
    mean = found.rows[0].cells["natural"]
    assert mean.value == pytest.approx(0.893333, abs=1e-6) and mean.deviation == pytest.approx(0.0152753, abs=1e-6)
    assert (mean.runs, mean.samples, mean.low, mean.high) == (3, 1000, None, None)
    assert "pgd" not in found.rows[0].cells  # seed 2 has none
    assert found.rows[1].cells["natural"].deviation is None and len(found.rows[0].files) == 3
    assert [row.name for row in compare([runs[0], other]).rows] == ["d-7", "at"]


def test_seeds_in_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [seeded(tmp_path, 0, 880), seeded(tmp_path, 1, 890)]
    found = compare(runs, seeds=True)
    assert "88.50 ± 0.71" in to_markdown(found) and r"88.50 $\pm$ 0.71" in to_latex(found)
    (line,) = csv.DictReader(io.StringIO(to_csv(found)))
    assert (line["value"], line["low"], line["runs"], line["deviation"]) == ("88.50", "", "2", "0.71")
    code, out, _ = run_main(["compare", *map(str, runs), "--seeds", "--paper"], monkeypatch, capsys)
    assert code == 0 and "88.50 ± 0.71" in out and "standard deviation over seeds" in out


def test_one_seed_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [seeded(tmp_path / name, 1, 880) for name in ("a", "b")]
    code, _, err = run_main(["compare", *map(str, runs), "--seeds"], monkeypatch, capsys)
    assert code == 2 and "a/d-1 and b/d-1 have the same recipe and seed" in " ".join(err.split())


def test_other_settings_are_not_other_seeds(tmp_path: Path) -> None:
    runs = [seeded(tmp_path, 0, 880), seeded(tmp_path, 1, 890)]
    text = (runs[1] / "recipe.yaml").read_text()
    (runs[1] / "recipe.yaml").write_text(text.replace("batch_size: 256", "batch_size: 64"))
    assert [row.name for row in compare(runs, seeds=True).rows] == ["d-0", "d-1"]


def with_pgd_union(run: Path, key: str, worst: int, total: int = 100) -> None:
    """An evaluation of a weak attack in two threats, with the union that it has."""
    tried = {threat: Accuracy(total // 2, total).as_json() for threat in ("l2:0.7", "linf:0.18")}
    more = {"worst_case": tried, "union_worst_case": Accuracy(worst, total).as_json()}
    write_summary(run, key, {"natural": Accuracy(total // 2, total).as_json()}, **more)


def test_a_mean_over_seeds_is_of_one_figure(tmp_path: Path) -> None:
    """Of a worst case under AutoAttack and one under a weaker attack there is none."""
    runs = [seeded(tmp_path, seed, 880) for seed in (0, 1)]
    with_union(runs[0], "b", ["l2:0.7", "linf:0.18"], 20, 0.3)
    with_pgd_union(runs[1], "b", 40)
    assert UNION_WORST not in compare(runs, seeds=True).rows[0].cells
    with_union(runs[1], "c", ["l2:0.7", "linf:0.18"], 30, 0.4)
    mean = compare(runs, seeds=True).rows[0].cells[UNION_WORST]
    assert (mean.value, mean.runs) == (0.25, 2)
    weak = [seeded(tmp_path / "weak", seed, 880) for seed in (0, 1)]
    for run, worst in zip(weak, (40, 50), strict=True):
        with_pgd_union(run, "b", worst)
    assert compare(weak, seeds=True).rows[0].cells[UNION_WORST].value == pytest.approx(0.45)


def test_a_mean_over_seeds_of_different_images_is_told(tmp_path: Path) -> None:
    runs = [seeded(tmp_path, 0, 880, pgd=(1, 2)), seeded(tmp_path, 1, 890, pgd=(2, 4))]
    said = "means of figures on different numbers of images: d-0, seeds 0, 1"
    found = compare(runs, seeds=True)
    assert said in found.remarks() and said in to_markdown(found) and f"% {said}" in to_latex(found)
    alike = [seeded(tmp_path / "alike", seed, 880, pgd=(1, 2)) for seed in (0, 1)]
    assert not any("different numbers" in text for text in compare(alike, seeds=True).remarks())


def test_a_run_that_goes_on_from_another_is_no_seed_of_it(tmp_path: Path) -> None:
    """Branches of several seeds, each from the run of its own, are."""
    first, branch = seeded(tmp_path, 0, 880), seeded(tmp_path, 7, 890)
    (branch / "environment.json").write_text(json.dumps({"from": str(first)}))
    assert [row.name for row in compare([first, branch], seeds=True).rows] == ["d-0", "d-7"]
    branches = [seeded(tmp_path / "from", seed, 880) for seed in (0, 1, 2)]
    for branch, place in zip(branches, ("@120#global", "@120#global", "@75"), strict=True):
        (branch / "environment.json").write_text(json.dumps({"from": f"{tmp_path}/{branch.name}{place}"}))
    names = [row.name for row in compare(branches, seeds=True).rows]
    assert names == ["d-0, seeds 0, 1", "d-2"]


def test_a_staged_run_is_what_its_last_stage_makes_of_it(tmp_path: Path) -> None:
    learner = "{name: linf, objective: at, threat: 'linf:0.05', optimizer: {lr: 0.1}}"
    stages = f"stages: [{{name: warm}}, {{name: main, start: warm, change: {{learners: [{learner}]}}}}]"
    staged = write_run(tmp_path / "staged", "digits-d", a={"natural": (9, 10)})
    with (staged / "recipe.yaml").open("a") as stream:
        stream.write(f"\n{stages}\n")
    plain = write_run(tmp_path / "plain", "digits-d", a={"natural": (9, 10)})
    found = compare([plain, staged])
    assert [(row.method, row.against) for row in found.rows] == [
        ("generalist-d-nt-linf", "linf:0.18"),
        ("at", "linf:0.05"),
    ]
    assert "trained against different threats: plain: linf:0.18, staged: linf:0.05" in found.remarks()


def test_weaker_attacks_are_told_also_beside_unions_over_other_threats(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, "digits-at") for name in ("strong", "weak")]
    with_union(runs[0], "a", ["l2:0.7", "linf:0.18"], 20, 0.3)
    tried = {threat: Accuracy(30, 100).as_json() for threat in ("l1:4", "l2:0.7", "linf:0.18")}
    more = {"worst_case": tried, "union_worst_case": Accuracy(10, 100).as_json()}
    write_summary(runs[0], "b", {"natural": Accuracy(98, 100).as_json()}, **more)
    with_pgd_union(runs[1], "a", 29)
    (said,) = (text for text in compare(runs).remarks() if "weaker" in text)
    assert said.startswith(f"{UNION_WORST} of linf:0.18, l2:0.7: ") and said.endswith(": weak")


def test_what_keeps_figures_apart_goes_where_they_go(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one", "digits-d", a={"natural": (9, 10)})]
    runs.append(write_run(tmp_path / "two", "baseline-digits-at", a={"natural": (9, 10)}))
    said = "trained against different threats: one: linf:0.18, two: linf:0.1"
    found = compare(runs)
    assert said in to_markdown(found).splitlines() and f"% {said}" in to_latex(found).splitlines()


def test_names_in_markdown_are_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "[click](evil) \x1b[31m &amp;", "digits-d", a={"natural": (9, 10)})
    text = to_markdown(compare([run]))
    assert (
        r"| [click\](evil) \N{REPLACEMENT CHARACTER}[31m \&amp; |".replace(r"\N{REPLACEMENT CHARACTER}", "\ufffd")
        in text
    )
    assert "\x1b" not in text
