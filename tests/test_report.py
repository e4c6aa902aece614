"""The report: what it reads, what it shows, what it refuses; hostile text runs nothing and the page stays small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import run_main
from report_helpers import (
    HOSTILE,
    THREATS,
    Page,
    assert_harmless,
    bare_run,
    edit_json,
    evaluation_of,
    hostile_copy,
    small_runs,
)

from generalist.compare import ranked, run_names
from generalist.core import random
from generalist.core.errors import GeneralistError, RunError
from generalist.data.corruptions import COMMON
from generalist.dial.curves import grid
from generalist.evaluation.accuracy import Accuracy
from generalist.evaluation.corruptions import CorruptionResult
from generalist.report import write_report
from generalist.report.runs import collect
from generalist.report.samples import disagreements, recorded
from generalist.report.section_setup import _edge, _flat

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return small_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = tmp_path_factory.mktemp("page") / "report.html"
    write_report(runs, out, device="cpu")
    return Page(out.read_text())


# -- what is read -----------------------------------------------------------------------------------------------------


def test_runs_of_one_name_are_told_apart() -> None:
    assert run_names([Path("/a/run"), Path("/b/run")]) == ["a/run", "b/run"]
    assert run_names([Path("/a/one"), Path("/a/two")]) == ["one", "two"]


def test_columns_go_by_norm_with_autoattack_last() -> None:
    found = ranked(["aa/l2:0.7", "union (mean)", "aa/linf:8/255", "pgd-20/l2:0.7", "natural", "pgd-20/linf:8/255"])
    assert found == ["natural", "pgd-20/linf:8/255", "aa/linf:8/255", "pgd-20/l2:0.7", "aa/l2:0.7", "union (mean)"]
    assert ranked(["union", "l2:128/255", "linf:8/255", "natural"]) == ["natural", "linf:8/255", "l2:128/255", "union"]


def test_an_evaluation_on_other_images_is_a_network_of_its_own(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "run", natural=(90, 100))
    (run / "evaluation" / "another").mkdir()
    other = {
        "subject": "best",
        "split": "svhn-test",
        "samples": 500,
        "accuracy": {"natural": Accuracy(1, 500).as_json()},
    }
    (run / "evaluation" / "another" / "summary.json").write_text(json.dumps(other))
    found = collect([run])
    shown = {network.name: network.row.cells["natural"].value for network in found.networks}
    assert shown == {"run": 0.9, "run (on svhn-test)": 0.002}
    assert [len(network.evaluations) for network in found.networks] == [1, 1]
    write_report([run], tmp_path / "page.html", images=0, device="cpu")
    assert (
        f"evaluate {run} --model best --attacks natural --data svhn" in Page((tmp_path / "page.html").read_text()).prose
    )


@pytest.mark.parametrize(("learners", "points"), [(2, 11), (3, 6), (3, 11), (4, 5), (5, 3)])
def test_the_command_of_a_curve_is_found_from_its_points(learners: int, points: int) -> None:
    assert _edge(learners, len(grid(learners, points))) == points


def break_recipe(run: Path) -> None:
    (run / "recipe.yaml").unlink()


def break_metrics(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"epoch": "one"}\n')


def count_beyond_numbers(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"epoch": 1' + "0" * 400 + "}\n")


def drift_beyond_numbers(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"epoch": 1, "validation": {"drift": -1.7e308}}\n')


def corrupt_beyond_numbers(run: Path) -> None:
    right, images = 10**399, 10**400
    fog = {"mean": 0.5, "severities": {"1": {"correct": right, "total": images}}}
    found = {"corruptions": {"generated": True, "mean": 0.5, "corruptions": {"fog": fog}}}
    (evaluation_of(run) / "corruptions.json").write_text(json.dumps(found))


def nest_metrics(run: Path) -> None:
    (run / "metrics.jsonl").write_text("[" * 100_000 + "\n")


def break_environment(run: Path) -> None:
    (run / "environment.json").write_text("[1]")


def break_summary(run: Path) -> None:
    edit_json(evaluation_of(run) / "summary.json", accuracy={"natural": {"correct": 2, "total": 1}})


def break_classes(run: Path) -> None:
    edit_json(evaluation_of(run) / "summary.json", classes={"a": {"natural": 0.5}})


def break_corruptions(run: Path) -> None:
    (evaluation_of(run) / "corruptions.json").write_text('{"corruptions": {"corruptions": {"fog": 1}, "mean": 7}}')


def break_curve(run: Path) -> None:
    edit_json(run / "mix" / "curve.json", points=[])


def break_examples(run: Path) -> None:
    (evaluation_of(run) / "examples.npz").write_bytes(b"PK\x03\x04 no archive")


def pickle_examples(run: Path) -> None:
    bad = {name: np.asarray([{}], dtype=object) for name in ("index", "label", "clean", "adversarial")}
    np.savez(evaluation_of(run) / "examples.npz", **bad)  # type: ignore[arg-type]


def break_records(run: Path) -> None:
    (records,) = evaluation_of(run).glob("records-*.jsonl")
    records.write_text('{"no": "header"}\n')


def claim_too_much(run: Path) -> None:
    (records,) = evaluation_of(run).glob("records-*.jsonl")
    head, _, rest = records.read_text().partition("\n")
    records.write_text(json.dumps(json.loads(head) | {"images": 10**9, "indices": None}) + "\n" + rest)


BREAKS: list[tuple[Callable[[Path], None], str]] = [
    (break_recipe, "is not a run directory"),
    (break_metrics, "metrics.jsonl is damaged: line 1: epoch"),
    (nest_metrics, "metrics.jsonl is damaged"),
    (count_beyond_numbers, "metrics.jsonl is damaged: line 1: epoch"),
    (drift_beyond_numbers, "metrics.jsonl is damaged: line 1: validation.drift"),
    (corrupt_beyond_numbers, "corruptions.json is damaged"),
    (break_environment, "environment.json is damaged"),
    (break_summary, "is not an accuracy"),
    (break_classes, "summary.json is damaged: classes.a.natural"),
    (break_corruptions, "corruptions.json is damaged"),
    (break_curve, "curve.json is damaged"),
    (break_examples, "examples.npz is damaged"),
    (pickle_examples, "examples.npz is damaged"),
    (break_records, "does not begin like the records"),
    (claim_too_much, "it has fewer lines than samples"),
]


@pytest.mark.parametrize(("spoil", "message"), BREAKS, ids=[spoil.__name__ for spoil, _ in BREAKS])
def test_a_broken_run_is_refused_and_nothing_written(
    spoil: Callable[[Path], None],
    message: str,
    runs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(runs[0], broken)
    spoil(broken)
    out = tmp_path / "report.html"
    code, shown, error = run_main(["report", str(runs[1]), str(broken), "--out", str(out)], monkeypatch, capsys)
    assert code == 2 and shown == "" and not out.exists()
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "RUN"], "is named twice"),
        (["RUN", "--images", "25"], "--images is a number from 0 to 24"),
        (["RUN", "--images", "-1"], "--images is a number from 0 to 24"),
        (["RUN", "--figures", "f", "--formats", "gif"], "--formats are svg, pdf, png, not 'gif'"),
        (["RUN", "--out", "."], "is a directory"),
        (["RUN", "--device", "tpu"], "unknown device"),
        (["nowhere"], "is not a run directory"),
    ],
)
def test_mistakes_cost_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    bare_run(tmp_path / "RUN")
    code, _, error = run_main(["report", *arguments], monkeypatch, capsys)
    assert code == 2 and message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*.html")) and not (tmp_path / "f").exists()


def test_without_matplotlib_svg_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bare_run(tmp_path / "run", natural=(9, 10), **{"aa__linf:0.18": (5, 10)})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(GeneralistError, match=r"generalist-at\[report\]"):
        write_report([run], tmp_path / "page.html", figures=tmp_path / "figures")
    assert not (tmp_path / "page.html").exists()
    written = write_report([run], tmp_path / "page.html", figures=tmp_path / "figures", formats=["svg"])
    assert [file.name for file in written.figures] == ["tradeoff-natural-linf.svg"]


# -- what is shown ----------------------------------------------------------------------------------------------------


def test_the_page_has_every_section_and_runs_nothing_else(page: Page) -> None:
    assert [section["id"] for section in page.all("section")] == [
        "summary", "tradeoff", "dial", "attacks", "classes", "corruptions", "gallery", "disagreements", "training",
        "recipes", "environment",
    ]  # fmt: skip
    assert_harmless(page)
    assert not re.search(r"https?://", page.text), "nothing leads out of the file"


def test_the_policy_allows_this_script_and_this_style_alone(page: Page) -> None:
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; img-src data:;")
    for name, element in (("script-src", "script"), ("style-src", "style")):
        (body,) = re.findall(rf"<{element}>(.*?)</{element}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy


def test_the_same_runs_give_the_same_page(runs: list[Path], page: Page, tmp_path: Path) -> None:
    write_report(runs, tmp_path / "report.html", device="cpu")
    again = (tmp_path / "report.html").read_text()
    assert re.sub(r"--out \S*report.html", "", again) == re.sub(r"--out \S*report.html", "", page.text)


def test_cards_and_tables_show_the_evaluation(runs: list[Path], page: Page) -> None:
    summary = json.loads((evaluation_of(runs[0]) / "summary.json").read_text())
    for name in ("natural", "apgd-ce/linf:0.18", "apgd-ce/l2:0.7"):
        entry = summary["accuracy"][name]
        low, high = entry["interval"]
        assert f"{100 * entry['value']:.2f}" in page.prose
        assert f"{100 * low:.2f} to {100 * high:.2f}" in page.prose
    assert "apgd-ce is the strongest attack that all these networks have in linf:0.18" in page.prose
    assert "AutoAttack was not run on digits-t, digits-d, digits-at" in page.prose


def test_every_figure_has_words_and_a_table(page: Page) -> None:
    figures = [svg for svg in page.all("svg") if svg.get("role") == "img"]
    assert len(figures) > 20 and all(svg["aria-label"] for svg in figures)
    assert all(image["alt"] for image in page.all("img")) and len(page.all("img")) > 20
    assert page.prose.count("Show the numbers") >= 15
    assert page.prose.count("drift") >= 2 and page.prose.count("mixing gap") >= 2 and "gamma" in page.prose


def test_methods_can_be_chosen(page: Page) -> None:
    boxes = {box["data-filter"] for box in page.all("input")}
    assert boxes == {"generalist-t", "generalist-d-nt-linf", "at"}
    hidden = {attributes["data-method"] for _, attributes in page.elements if "data-method" in attributes}
    assert hidden == boxes


def test_the_recipes_differences_are_told_once(page: Page) -> None:
    differences = page.prose.split("every field")[0]
    assert "linf, natural, l2" in differences and "learners.l2.threat.eps" not in differences
    assert "Our own settings" not in differences, "what a recipe says of itself is no setting"


def test_a_list_without_names_is_one_field() -> None:
    found = _flat({"threats": [{"norm": "linf", "eps": 0.18}, {"norm": "l2", "eps": 0.7}], "shares": {}, "none": []})
    assert found == {"threats": "linf 0.18; l2 0.7", "none": "–"}


def test_commands_make_the_page_again(runs: list[Path], page: Page) -> None:
    assert f"generalist train {runs[0]}/recipe.yaml --out {runs[0]}-again" in page.prose
    assert f"generalist mix {runs[0]} --curve 3" in page.prose
    assert "--statistics mixed --steps 1 --samples 20" in page.prose
    assert "--attacks natural,pgd-3,apgd-ce --threats linf:0.18,l2:0.7 --mode each" in page.prose
    assert "--samples 60 --corruptions brightness,contrast" in page.prose


def test_missing_parts_are_left_out_with_the_command_that_adds_them(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "my run", recipe="digits-t")
    written = write_report([run], tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert written.networks == 0 and not page.all("img")
    quoted = f"'{run}'"
    for command in ("evaluate", "mix", "train"):
        assert f"generalist {command} {quoted}" in page.prose
    assert f"generalist evaluate {quoted} --preset quick --corruptions common" in page.prose
    assert "my run: no snapshots, which a dial curve needs." in page.prose


@pytest.mark.parametrize("split", ["held-out", "test"])
def test_the_page_says_on_which_images_a_dial_was_measured(split: str, runs: list[Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs[0], run)
    edit_json(run / "mix" / "curve.json", split=split)
    write_report([run], tmp_path / "page.html", images=0, device="cpu")
    prose = Page((tmp_path / "page.html").read_text()).prose
    assert f"PGD of 1 steps on {split} images" in prose and f"along the dial, PGD-1 on {split} images" in prose


def test_images_can_be_left_out(runs: list[Path], tmp_path: Path) -> None:
    write_report(runs, tmp_path / "page.html", images=0)
    page = Page((tmp_path / "page.html").read_text())
    assert not page.all("img") and "gallery" not in [section["id"] for section in page.all("section")]


def test_the_papers_points_are_shown_for_the_same_data_and_network(tmp_path: Path) -> None:
    figures = {"natural": (850, 1000), "aa__linf:8/255": (450, 1000), "aa__l2:128/255": (590, 1000)}
    run = bare_run(tmp_path / "mine", "baseline-cifar10-resnet18-msd", **figures)
    write_report([run], tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    tips = [shape["data-tip"] or "" for shape in page.all("polygon") if "data-tip" in shape]
    ours = [tip for tip in tips if tip.startswith("mine\n")]
    papers = [tip for tip in tips if "Generalist++, table I\n" in tip]
    assert len(ours) >= 2 and len(papers) > 20
    assert "AutoAttack was not run" not in page.prose
    assert {"trades-6", "generalist-t", "msd"} <= {box["data-filter"] for box in page.all("input")}


def test_means_over_corruptions_stand_beside_the_papers_in_their_own_section(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "mine", "baseline-cifar10-resnet18-msd", natural=(850, 1000))
    accuracies = {name: {severity: Accuracy(434, 1000) for severity in range(1, 6)} for name in COMMON}
    found = CorruptionResult("cifar10-c", generated=False, seed=None, accuracies=accuracies)
    (evaluation_of(run) / "corruptions.json").write_text(json.dumps({"corruptions": found.to_dict()}))
    write_report([run], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    parts = [text.partition(f'id="{name}"')[2].partition("<section")[0] for name in ("attacks", "corruptions")]
    attacks, corruptions = (Page(part).prose for part in parts)
    assert "table I" in attacks and "level 5" not in attacks and "table IV" not in attacks
    assert "level 5" in corruptions and "43.40" in corruptions
    assert "table IV" in corruptions and "45.79" in corruptions


def test_where_attacks_differ_the_strongest_common_one_is_taken(tmp_path: Path) -> None:
    one = bare_run(tmp_path / "one", natural=(9, 10), **{"aa__linf:0.1": (3, 10), "pgd-20__linf:0.1": (5, 10)})
    two = bare_run(tmp_path / "two", natural=(8, 10), **{"fgsm__linf:0.1": (7, 10), "pgd-20__linf:0.1": (4, 10)})
    write_report([one, two], tmp_path / "page.html")
    prose = Page((tmp_path / "page.html").read_text()).prose
    assert "AutoAttack was not run on two. pgd-20 is the strongest attack that all these networks have" in prose
    assert "AutoAttack3" not in prose


# -- disagreements ----------------------------------------------------------------------------------------------------


def test_disagreements_are_those_of_the_records(runs: list[Path]) -> None:
    records = [entry for network in collect(runs).networks if (entry := recorded(network)) is not None]
    found = disagreements(records, most=4, device="cpu", trust_code=False)
    assert found is not None and list(found.kinds) == ["natural", *THREATS] and not found.notes
    first, second = (entry.verdicts for entry in records[:2])
    assert first.index.tolist() == second.index.tolist()
    assert found.counts["natural", 0, 1] == int((first.right & ~second.right).sum()) > 0
    assert any(case.kind == "natural" for case in found.cases) and any(case.kind in THREATS for case in found.cases)
    for case in found.cases:
        assert case.wrong_says != case.label and case.right_map is not None
        assert case.image.shape == (1, 8, 8) and case.right_map.shape == (8, 8)
        if case.kind == "natural":
            assert case.right_says == case.label


def test_other_weights_than_those_evaluated_are_noticed(runs: list[Path], tmp_path: Path) -> None:
    copies = [tmp_path / run.name for run in runs]
    for run, copy in zip(runs, copies, strict=True):
        shutil.copytree(run, copy)
    shutil.copy(copies[0] / "snapshots" / "2" / "l2.safetensors", copies[0] / "model.safetensors")
    shutil.copy(copies[2] / "model.safetensors", copies[1] / "model.safetensors")
    records = [entry for network in collect(copies).networks if (entry := recorded(network)) is not None]
    found = disagreements(records, most=24, device="cpu", trust_code=False)
    assert found is not None and any("no longer those that were evaluated" in text for text in found.notes)


def test_missing_weights_and_images_are_told(runs: list[Path], tmp_path: Path) -> None:
    copies = [tmp_path / run.name for run in runs[:2]]
    for run, copy in zip(runs, copies, strict=False):
        shutil.copytree(run, copy)
        (copy / "model.safetensors").unlink()
    write_report(copies, tmp_path / "page.html", device="cpu")
    prose = Page((tmp_path / "page.html").read_text()).prose
    assert "digits-t: images are not shown: there is no weights file" in prose


# -- hostile and large ------------------------------------------------------------------------------------------------


def test_hostile_text_runs_nothing(runs: list[Path], tmp_path: Path) -> None:
    hostile = hostile_copy(runs[0], tmp_path)
    write_report([hostile, *runs[1:]], tmp_path / "page.html", figures=tmp_path / "figures", formats=["svg"])
    page = Page((tmp_path / "page.html").read_text())
    assert_harmless(page)
    for text in HOSTILE:
        assert text in page.prose, "shown as the text that it is"
    for file in (tmp_path / "figures").iterdir():
        root = ET.parse(file).getroot()
        names = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert names <= {"svg", "title", "rect", "polygon", "polyline", "text"}
        assert not [key for element in root.iter() for key in element.attrib if key.startswith("on")]


@pytest.mark.slow
def test_twenty_runs_of_large_images_stay_below_five_megabytes(runs: list[Path], tmp_path: Path) -> None:
    pairs, shape = 12, (3, 224, 224)
    noise = random.uniform(0, "noise", shape=(2 * pairs, *shape)).numpy().astype(np.float16)
    numbers = {name: np.arange(pairs) for name in ("index", "label", "clean_prediction", "adversarial_prediction")}
    words = {"threat": np.asarray(THREATS * (pairs // 2)), "attack": np.asarray(["pgd-3"] * pairs)}
    np.savez(tmp_path / "examples.npz", clean=noise[:pairs], adversarial=noise[pairs:], **numbers, **words)  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    epochs = "".join(json.dumps(lines[number % 2] | {"epoch": number + 1}) + "\n" for number in range(240))
    many = []
    for number in range(20):
        run = tmp_path / f"run-{number}"
        shutil.copytree(runs[0], run)
        (run / "metrics.jsonl").write_text(epochs)
        target = evaluation_of(run) / "examples.npz"
        target.unlink()
        target.hardlink_to(tmp_path / "examples.npz")
        many.append(run)
    written = write_report(many, tmp_path / "page.html", device="cpu")
    assert written.runs == 20 and MEGABYTE / 2 < written.size < 5 * MEGABYTE
    assert written.size == (tmp_path / "page.html").stat().st_size


def test_too_many_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GeneralistError, match="at most 100 runs"):
        write_report([tmp_path / str(number) for number in range(101)], tmp_path / "page.html")
    with pytest.raises(RunError, match="not a run directory"):
        write_report([tmp_path / "0"], tmp_path / "page.html")
