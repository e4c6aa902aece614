"""The report compares like with like, and says what it leaves out."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageFont
from report_helpers import Page, bare_run, edit_json, evaluation_of, small_run

import generalist
from generalist import dial
from generalist.core.run import RunDirectory
from generalist.evaluation.accuracy import Accuracy
from generalist.report import write_report
from generalist.report.axes import extent
from generalist.report.drawing import Drawing, Text
from generalist.report.drawing import Path as Line
from generalist.report.page import _named
from generalist.report.planes import Spot, Way, plane
from generalist.report.plots import Line as Curve
from generalist.report.plots import dots, lines
from generalist.report.runs import collect
from generalist.report.section import Section


def page_of(runs: list[Path], place: Path, **options: Any) -> Page:
    write_report(runs, place / "page.html", device="cpu", **options)
    return Page((place / "page.html").read_text())


def summary_of(run: Path, **more: Any) -> None:
    """More fields for the summary of a bare run."""
    edit_json(evaluation_of(run) / "summary.json", **more)


def by_class(**correct: int) -> dict[str, Any]:
    """Accuracies of a class of 10 images, by natural, threat or union."""
    return {name.replace("_", ":"): Accuracy(count, 10).as_json() for name, count in correct.items()}


def words_of(drawing: Drawing) -> list[str]:
    return [shape.text for shape in drawing.shapes if isinstance(shape, Text)]


# -- cards ------------------------------------------------------------------------------------------------------------


def test_without_autoattack_a_card_shows_what_all_attacks_leave(tmp_path: Path) -> None:
    """Each of two attacks leaves more than both together, which is what `generalist evaluate` says last."""
    run = bare_run(tmp_path / "run", natural=(9, 10), **{"pgd-20__linf:0.1": (6, 10), "apgd-ce__linf:0.1": (5, 10)})
    columns = ["pgd-20/linf:0.1", "apgd-ce/linf:0.1"]
    summary_of(run, worst_case={"linf:0.1": Accuracy(4, 10).as_json()}, identity={"columns": columns})
    page = page_of([run], tmp_path)
    low, high = Accuracy(4, 10).interval
    assert f"40.00worst of 2 attacks{100 * low:.2f} to {100 * high:.2f}" in page.prose


def test_a_card_shows_the_evaluation_that_leaves_least(tmp_path: Path) -> None:
    """Not the first with several attacks, where a single one of another is stronger than all of them."""
    run = bare_run(tmp_path / "run", natural=(9, 10), **{"fgsm__linf:0.1": (8, 10), "pgd-1__linf:0.1": (8, 10)})
    folder = evaluation_of(run)
    summary_of(
        run,
        worst_case={"linf:0.1": Accuracy(7, 10).as_json()},
        identity={"columns": ["fgsm/linf:0.1", "pgd-1/linf:0.1"]},
    )
    strong = folder.with_name("two")
    shutil.copytree(folder, strong)
    accuracy = {"natural": Accuracy(9, 10).as_json(), "apgd-t/linf:0.1": Accuracy(3, 10).as_json()}
    worst = {"linf:0.1": Accuracy(3, 10).as_json()}
    edit_json(strong / "summary.json", accuracy=accuracy, worst_case=worst, identity={"columns": ["apgd-t/linf:0.1"]})
    assert "30.00apgd-t, strongest" in page_of([run], tmp_path).prose
    edit_json(strong / "summary.json", accuracy=accuracy | {"pgd-1/linf:0.1": Accuracy(8, 10).as_json()})
    edit_json(strong / "summary.json", identity={"columns": ["apgd-t/linf:0.1", "pgd-1/linf:0.1"]})
    assert "30.00worst of 2 attacks" in page_of([run], tmp_path).prose


def test_corruptions_and_sequences_may_be_of_two_evaluations(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "run", natural=(90, 100))
    first = evaluation_of(run)
    second = first.with_name("two")
    shutil.copytree(first, second)
    edit_json(first / "summary.json", samples=100)
    edit_json(second / "summary.json", samples=50)
    sequences = {"generated": True, "samples": 100, "sequences": {"scale": {"accuracy": 0.5, "flip_rate": 0.1}}}
    fog = {"mean": 0.5, "severities": {"1": {"correct": 25, "total": 50}}}
    corruptions = {"generated": True, "corruptions": {"fog": fog}, "mean": 0.5}
    (first / "corruptions.json").write_text(json.dumps({"perturbations": sequences}))
    (second / "corruptions.json").write_text(json.dumps({"corruptions": corruptions}))
    (network,) = collect([run]).networks
    assert network.shift.corruptions is not None and network.shift.perturbations is not None
    assert list(network.shift.corruptions.corruptions) == ["fog"]


def test_a_card_says_on_how_many_images(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "run", natural=(90, 100), **{"aa__linf:0.1": (30, 100)})
    prose = page_of([run], tmp_path).prose
    assert "small · 100 images" in prose and "30.00AutoAttack" in prose


def test_unions_over_other_threats_are_columns_of_their_own(tmp_path: Path) -> None:
    runs = []
    for name, threat in (("weak", "linf:0.01"), ("strong", "linf:0.18")):
        runs.append(bare_run(tmp_path / name, natural=(9, 10), **{f"aa__{threat}": (5, 10), "aa__l2:0.7": (5, 10)}))
        worst = {key: Accuracy(5, 10).as_json() for key in (threat, "l2:0.7")}
        classes = {"cat": {"natural": Accuracy(9, 10).as_json(), **worst, "union": Accuracy(4, 10).as_json()}}
        summary_of(runs[-1], worst_case=worst, union_worst_case=Accuracy(4, 10).as_json(), classes=classes)
    page = page_of(runs, tmp_path)
    for threat in ("linf:0.01", "linf:0.18"):
        assert f"union(worst case){threat}, l2:0.7" in page.prose
        assert f"Union: right under {threat}, l2:0.7" in page.prose
    assert "Union: right under every threat" not in page.prose


# -- planes -----------------------------------------------------------------------------------------------------------


def test_networks_that_are_not_in_a_plane_are_named_with_the_remedy(tmp_path: Path) -> None:
    one = bare_run(tmp_path / "one", natural=(9, 10), **{"aa__linf:0.18": (3, 10), "aa__l2:0.7": (4, 10)})
    two = bare_run(tmp_path / "two", natural=(8, 10), **{"aa__linf:0.18": (3, 10), "aa__l2:0.7": (4, 10)})
    other = bare_run(tmp_path / "other", natural=(8, 10), **{"aa__linf:8/255": (7, 10)})
    prose = page_of([one, two, other], tmp_path).prose
    assert "Not in every plane, without aa/linf:0.18 or aa/l2:0.7: other; to add it:" in prose
    assert f"generalist evaluate {other} --model best --threats linf:0.18,l2:0.7 --attacks natural,aa" in prose
    assert "Not in every plane" not in page_of([one, two], tmp_path).prose


def test_where_no_attack_is_common_to_all_the_strongest_of_the_most_frequent_is_shown(tmp_path: Path) -> None:
    attacks = ("pgd-5", "apgd-ce", "aa")
    runs = [bare_run(tmp_path / name, **{"natural": (90, 100), f"{name}/linf:0.18": (50, 100)}) for name in attacks]
    page = page_of(runs, tmp_path, images=0)
    assert "no attack in linf:0.18 was run on all networks: aa, which 1 have, is shown" in page.prose
    page = page_of(runs[:2], tmp_path, images=0)
    assert "on all networks: pgd-5, which 1 have" in page.prose


def test_what_keeps_figures_apart_is_said_below_their_table(tmp_path: Path) -> None:
    runs = [bare_run(tmp_path / recipe, recipe, natural=(90, 100)) for recipe in ("digits-d", "baseline-digits-at")]
    said = "trained against different threats: digits-d: linf:0.18, baseline-digits-at: linf:0.1"
    assert page_of(runs, tmp_path, images=0).prose.count(said) == 1
    assert "trained against" not in page_of(runs[:1], tmp_path, images=0).prose


def test_a_scale_of_huge_values_has_ticks() -> None:
    """Where room in fixed units vanishes in rounding, high and low would be one."""
    for values in ([1e17], [3e20, 3e20], [-1e300, 1e300], [0.0, 0.0]):
        ticks = extent(values).ticks()
        assert ticks and all(math.isfinite(tick) for tick in ticks)


def test_the_second_plane_has_the_threat_of_those_in_the_first(tmp_path: Path) -> None:
    one = bare_run(tmp_path / "one", natural=(9, 10), **{"aa__linf:0.18": (3, 10), "aa__l2:0.7": (4, 10)})
    two = bare_run(tmp_path / "two", natural=(9, 10), **{"aa__linf:0.18": (3, 10)})
    others = [bare_run(tmp_path / name, natural=(8, 10), **{"aa__l2:0.5": (7, 10)}) for name in ("three", "four")]
    labels = [svg.get("aria-label") for svg in page_of([one, two, *others], tmp_path).all("svg")]
    robust = "robust accuracy (%): AutoAttack"
    assert f"{robust}, l2:0.7 against {robust}, linf:0.18" in labels


def test_a_plane_that_no_network_is_in_is_not_drawn(tmp_path: Path) -> None:
    one = bare_run(tmp_path / "one", natural=(9, 10), **{"aa__linf:0.18": (3, 10)})
    two = bare_run(tmp_path / "two", natural=(9, 10), **{"aa__l2:0.7": (3, 10)})
    titles = [svg.get("aria-label") or "" for svg in page_of([one, two], tmp_path).all("svg")]
    planes = [title for title in titles if " against " in title]
    robust = "robust accuracy (%): AutoAttack"
    assert planes == [f"{robust}, {threat} against natural accuracy (%)" for threat in ("linf:0.18", "l2:0.7")]
    l1 = bare_run(tmp_path / "l1", natural=(9, 10), **{"aa__l1:3": (3, 10)})
    assert f"{robust}, l1:3 against natural accuracy (%)" in [
        s.get("aria-label") for s in page_of([l1], tmp_path).all("svg")
    ]
    bare = bare_run(tmp_path / "bare", **{"aa__linf:0.18": (3, 10)})
    assert "No robust accuracies" in page_of([bare], tmp_path).prose


def test_networks_of_several_data_sets_are_told_apart(tmp_path: Path) -> None:
    figures = {"natural": (9, 10), "aa__linf:8/255": (3, 10)}
    digits = bare_run(tmp_path / "digits", **figures)
    cifar = bare_run(tmp_path / "cifar", "cifar10-resnet18-d", **figures)
    for run in (digits, cifar):
        summary_of(run, classes={"one": by_class(natural=9)})
    page = page_of([digits, cifar], tmp_path)
    assert "Only networks of one data set can be compared. digits: digits; cifar10: cifar." in page.prose
    titles = [svg.get("aria-label") for svg in page.all("svg")]
    assert titles.count("Natural by class") == 2, "classes of one name in two data sets are two classes"


def test_a_dial_does_not_push_its_network_out_of_the_plane() -> None:
    spot = Spot("run", "m", 3.0, 5.0, (1.0, 8.0), (2.0, 12.0), series=0)
    way = Way("run, dial", "m", 0, [(30.0, 40.0, "linf 1"), (25.0, 35.0, "linf 0")])
    assert "run" in words_of(plane("p", "t", "x", "y", [spot], [way])), "inside, and so without its figures"
    lone = plane(
        "p", "t", "x", "y", [Spot("far", "m", 90.0, 1.0, series=0), Spot("run", "m", 90.0, 50.0, series=1)], []
    )
    assert "far (90.0, 1.0)" in words_of(lone)


def test_points_of_a_dial_say_their_accuracies_and_are_hollow_outside() -> None:
    spot = Spot("run", "m", 90.0, 50.0, series=0)
    way = Way("run, dial", "m", 0, [(91.0, 45.0, "linf 1"), (99.0, 0.5, "linf 0")])
    marks = [shape for shape in plane("p", "t", "x", "y", [spot], [way]).shapes if isinstance(shape, Line)]
    inside, outside = (
        next(mark for mark in marks if mark.tip.startswith("run, dial") and word in mark.tip)
        for word in ("91.00, 45.00", "99.00, 0.50")
    )
    assert inside.fill != "paper" and outside.fill == "paper"


# -- other figures ----------------------------------------------------------------------------------------------------


def test_every_line_has_its_name_in_the_legend() -> None:
    names = ["global", "linf", "natural", "l2", "l1", "a-learner-with-a-long-name", "another-with-a-long-name"]
    few, many = (
        lines("n", "t", "%", [Curve(name, [(1, 2), (2, 3)], "c0") for name in names[:count]], []) for count in (1, 7)
    )
    assert set(names) <= set(words_of(many))
    assert many.height > few.height, "the plot keeps its room"


def test_classes_of_many_networks_and_long_names_stay_readable() -> None:
    rows = [(f"run {number}", number, {"a" * 50: 0.5, "short": 0.6}) for number in range(20)]
    drawing = dots("n", "t", ["a" * 50, "short"], rows)
    assert f"{'a' * 19}…" in words_of(drawing)
    one = dots("n", "t", ["a" * 50, "short"], rows[:1])
    first, second = (
        next(s.y for s in drawing.shapes if isinstance(s, Text) and s.text.startswith(w)) for w in ("aa", "sh")
    )
    assert second - first < 30, "a class is a line, and not a column of marks"
    assert words_of(one)[0] == "run 0"


@pytest.mark.parametrize("name", ["a" * 30, "GOLDEN RETRIEVER DOG", "mmmmwwwwWWWWMMMM", "金毛寻回犬", "ß" * 20])
def test_names_of_classes_stay_inside_of_the_picture(name: str) -> None:
    """Measured in the widest of the fonts that are asked for; it has no Chinese letters, which fill squares."""
    pytest.importorskip("matplotlib")
    from matplotlib import get_data_path

    drawing = dots("n", "t", [name, "x"], [("run", 0, {name: 0.5, "x": 0.6})])
    label = next(s for s in drawing.shapes if isinstance(s, Text) and s.text.startswith(name[:5]))
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", 100)
    ems = len(name) if ord(name[0]) > 0x2000 else font.getlength(label.text) / 100
    assert label.anchor == "end" and label.x - label.size * ems >= 0


def test_no_figure_replaces_another() -> None:
    named = ["a", "a", "a-2", "a"]
    section = Section("s", "s", drawings=[Drawing(name, "", 1, 1) for name in named])
    files = [drawing.name for drawing in _named([section])]
    assert len(set(files)) == 4 and files[0] == "a" and files[2] == "a-2"


@pytest.fixture(scope="module")
def two_learners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = small_run("digits-d", tmp_path_factory.mktemp("two") / "run")
    dial.curve(RunDirectory(run), 3, statistics="mixed", steps=1, samples=20, natural_at_least=0.0, device="cpu")
    return run


def test_a_dial_of_two_learners_has_its_answer_on_the_page(two_learners: Path, tmp_path: Path) -> None:
    text = json.loads((two_learners / "mix" / "curve.json").read_text())["suggestion"]["text"]
    page = page_of([two_learners], tmp_path, images=0)
    assert text[1:] in page.prose and "run: accuracy (%) along the dial, PGD-1" in page.prose


def test_all_attacks_of_a_strip_are_named(two_learners: Path, tmp_path: Path) -> None:
    path = evaluation_of(two_learners) / "examples.npz"
    kept = path.read_bytes()
    with np.load(path) as arrays:
        examples = dict(arrays)
    examples["attack"] = np.asarray([f"attack-{number % 2}" for number in range(len(examples["attack"]))])
    np.savez_compressed(path, **examples)
    try:
        assert re.search(r"linf:0\.18, attack-[01], attack-[01]", page_of([two_learners], tmp_path).prose)
    finally:
        path.write_bytes(kept)


def test_an_evaluated_mixture_is_shown_as_what_it_is(two_learners: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_learners, run)
    file = run / "mix" / "gamma-0.25.safetensors"
    dial.mix(RunDirectory(run), 0.25, statistics="mixed", device="cpu").save(file)
    settings: dict[str, Any] = {"threats": ["linf:0.18"], "attacks": ["natural", "pgd-3"], "samples": 60}
    generalist.evaluate(file, out=run / "evaluation", device="cpu", **settings)
    prose = page_of([run], tmp_path).prose
    assert "run (gamma-0.25)" in prose and "images are not shown" not in prose
    assert f"generalist evaluate {file} --out {run / 'evaluation'} --attacks natural,pgd-3" in prose


def test_what_is_said_of_a_training_is_what_its_last_validation_says(tmp_path: Path) -> None:
    """A warning that no epoch is good enough holds until there is one."""
    run = bare_run(tmp_path / "run", natural=(9, 10))
    validated = {"validation": {"accuracy": {"global": {"natural": 0.9}}}}
    lines = [
        {"epoch": 1, **validated, "warning": "none is good enough"},
        {"epoch": 2, **validated, "warning": "held-out images were trained on"},
        {"epoch": 3},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page_of([run], tmp_path).text
    assert "held-out images were trained on" in text and "none is good enough" not in text


def test_warnings_and_classes_of_a_smaller_evaluation_are_shown_as_well(tmp_path: Path) -> None:
    """The larger one may be of natural images alone, and the figures under attack are those of the smaller one."""
    run = bare_run(tmp_path / "run", natural=(900, 1000))
    summary_of(run, samples=1000, classes={"cat": by_class(natural=9)})
    small = {"aa/linf:0.1": Accuracy(30, 100).as_json()}
    folder = run / "evaluation" / "small"
    folder.mkdir()
    more = {"samples": 100, "warnings": ["it may mask its gradients"], "notes": ["a short search"]}
    classes = {"cat": by_class(natural=8, linf_01=3)}
    (folder / "summary.json").write_text(json.dumps({"subject": "best", "accuracy": small, "classes": classes, **more}))
    page = page_of([run], tmp_path)
    assert "run: it may mask its gradients" in page.prose and "a short search" in page.prose
    assert "90.0" in page.prose and "Under attack, linf:01" in page.prose


def test_networks_without_a_common_threat_are_told(two_learners: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    for run, threat in zip(runs, ("linf:0.1", "l2:0.5"), strict=True):
        shutil.copytree(two_learners, run)
        shutil.rmtree(run / "evaluation")
        settings: dict[str, Any] = {"threats": [threat], "attacks": ["natural", "pgd-3"], "samples": 20}
        generalist.evaluate(run, out=run / "evaluation", device="cpu", **settings)
    assert "there is no threat in which all of them were attacked" in page_of(runs, tmp_path).prose
