"""benchmarks/results_table.py: what it makes of records, and that the pages are up to date."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from generalist.core.errors import GeneralistError

ROOT = Path(__file__).parents[1]
LINF = "linf:8/255"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("results_table")


def record(group: str, seed: int, *, shifted: dict[str, Any] | None = None, **right: int) -> dict[str, Any]:
    """Right answers of 1,000 images by attack; `_` stands for `-`."""
    names = {
        name: name.replace("_", "-") if name == "natural" else f"{name.replace('_', '-')}/{LINF}" for name in right
    }
    evaluation = {
        "subject": "best",
        "images": "all 1000",
        "right": {names[name]: [value, 1000] for name, value in right.items()},
        "shifted": shifted or {},
    }
    train = {"command": "generalist train somewhat", "seconds": 90.0, "commit": "abc", "jobs": 2}
    return {
        "name": f"{group}-{seed}",
        "group": group,
        "environment": {"seed": seed},
        "steps": [train],
        "evaluations": [evaluation] if right else [],
    }


def rows(made: str) -> dict[str, list[str]]:
    """The cells behind the first, by the first, of all tables."""
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in made.splitlines() if line[:1] == "|"]
    return {first: rest for first, *rest in split}


def test_means_over_seeds_beside_the_papers_figures(program: ModuleType) -> None:
    page = program.PAGES[0]
    records = [
        record("d", 0, natural=900, pgd_20=480, aa=460),
        record("d", 1, natural=910, pgd_20=490, aa=462),
        record("alone-5.75", 0, natural=890, pgd_20=470, apgd_ce=465, apgd_t=455),
        record("alone-5.75", 1, natural=896, pgd_20=470),
    ]
    records[2]["environment"]["from"] = "runs/headline/runs/at-0@120#global"
    made = program.written(page, records)
    found = rows(made)
    assert found["[alone-5.75-0](runs/headline/alone-5.75-0.json)"][-2:] == ["1.5 after at-0@120", "2"]
    assert found[page.groups["d"]] == ["2", "90.50 ± 0.71", "48.50 ± 0.71", "46.10 ± 0.14", "-", "-"]
    assert found[page.groups["alone-5.75"]] == ["2", "89.30 ± 0.42", "47.00 ± 0.00", "at most 45.50", "-", "-"]
    assert found["published: Generalist-D (natural + linf)"][1:4] == ["89.09", "50.01", "46.07"]
    assert found["[d-1](runs/headline/d-1.json)"] == ["91.00", "49.00", "46.20", "-", "-", "1.5", "2"]
    assert page.groups["t"] not in found, "nothing of it is there"
    assert f"`d` less `alone-5.75`, seed by seed, in points: natural 1.20 ± 0.28, pgd-20/{LINF} 1.50 ± 0.71." in made
    assert "corruptions" not in made


def test_corruptions_have_a_table_of_their_own(program: ModuleType) -> None:
    means = {"generated corruptions/level 5": [0.7, 1000], "generated corruptions/levels 1-5": [0.8, 1000]}
    made = program.written(program.PAGES[0], [record("d", 0, natural=900, shifted=means)])
    own, theirs = made.split("official ones")[1].split("Each run:")[0], "published: Generalist-D (natural + linf)"
    assert rows(own)[program.PAGES[0].groups["d"]] == ["1", "70.00", "80.00", "-"]
    assert rows(own)[theirs] == ["", "-", "-", "77.67"]


def test_a_run_without_figures_is_named(program: ModuleType) -> None:
    lost = {**record("d", 3), "unfinished": {"command": "generalist train somewhat", "epochs": 52}}
    noted = {**record("at", 4), "note": "Its machine was lost."}
    made = program.written(program.PAGES[0], [lost, noted, record("t", 5)])
    assert "d-3 has no figures on test images: its training ended after epoch 52." in made
    assert "at-4 has no figures on test images: its machine was lost." in made
    assert "t-5 has no figures on test images: not evaluated yet." in made
    assert "Nothing is measured yet." in made


def test_records_are_read_in_the_order_of_the_table(program: ModuleType, tmp_path: Path) -> None:
    for one in (record("d", 10), record("d", 9), record("at", 0), record("else", 1)):
        (tmp_path / f"{one['name']}.json").write_text(json.dumps(one))
    assert [one["name"] for one in program.records_of(tmp_path, ["at", "d"])] == ["at-0", "d-9", "d-10"]


def test_only_what_is_between_the_comments_changes(program: ModuleType) -> None:
    page = f"before\n{program.FIRST}\nold\n{program.LAST}\nafter {program.FIRST[:4]}\n"
    assert program.put_in(page, r"new \1", Path("x.md")) == (
        f"before\n{program.FIRST}\n\nnew \\1\n\n{program.LAST}\nafter {program.FIRST[:4]}\n"
    )
    with pytest.raises(GeneralistError, match=r"x\.md must have one line"):
        program.put_in(page + program.LAST, "new", Path("x.md"))


def test_the_pages_are_up_to_date(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    program.main([str(ROOT / "docs" / "results"), "--check"])
    assert capsys.readouterr().out == ""


def test_a_stale_page_is_found_and_made_anew(program: ModuleType, tmp_path: Path) -> None:
    for page in program.PAGES:
        (tmp_path / page.records).mkdir(parents=True)
        (tmp_path / page.path).write_text(f"# Title\n{program.FIRST}\n{program.LAST}\n")
    (tmp_path / "runs" / "mnist" / "d-0.json").write_text(json.dumps(record("d", 0, natural=900)))
    with pytest.raises(SystemExit, match=r"not up to date: cifar10\.md, mnist\.md"):
        program.main([str(tmp_path), "--check"])
    program.main([str(tmp_path)])
    assert "| [d-0](runs/mnist/d-0.json) | 90.00 |" in (tmp_path / "mnist.md").read_text()
    program.main([str(tmp_path), "--check"])


def test_the_picture_has_every_variant_and_says_where_an_attack_is_missing(program: ModuleType, tmp_path: Path) -> None:
    plane = importlib.import_module("plane")
    group = "d-linf-l2"
    bounded = [record(group, 0, natural=890, apgd_ce=480, apgd_t=467), record(group, 1, natural=880, aa=460)]
    label = program.PAGES[0].groups[group]
    two, one = (
        next(each for each in program.lines_of(program.PAGES[0], records) if each.label == label)
        for records in (bounded, bounded[:1])
    )
    assert plane.place(two, LINF) == ([88.0], [46.0]) and plane.whole(two, LINF), "as the table has it"
    assert plane.place(one, LINF) == ([89.0], [46.7]) and not plane.whole(one, LINF)
    assert plane.place(one, "l2:128/255") is None
    (tmp_path / "runs/headline").mkdir(parents=True)
    (tmp_path / "runs/headline/a.json").write_text(json.dumps(bounded[0]))
    plane.main([str(tmp_path), "--out", str(tmp_path / "plane.svg")])
    picture = (tmp_path / "plane.svg").read_text()
    assert "Generalist-D (linf + l2)" in picture and "one learner" not in picture
    for name, natural in (("at", 880), ("alone-5.75", 890)):
        (tmp_path / f"runs/headline/{name}.json").write_text(json.dumps(record(name, 0, natural=natural, aa=460)))
    plane.main([str(tmp_path), "--out", str(tmp_path / "plane.svg")])
    picture = (tmp_path / "plane.svg").read_text()
    assert "one learner, 8/255" in picture and "5.75/255" in picture and "5.25/255" not in picture
