"""The demonstration keeps its promises at its fixed seed, and they come from mixing and redistribution."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from generalist import demo, train
from generalist.demo import GENERALIST, MARKER, RECIPES, accuracies, run_demo, summary
from generalist.recipe import load_recipe

LINF, L2 = "pgd-20/linf:0.18", "pgd-20/l2:0.7"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return run_demo(tmp_path_factory.mktemp("demo"))


def variant(path: Path, *overrides: str) -> dict[str, float]:
    """The global learner of digits-t with something changed."""
    threats = [str(threat) for threat in load_recipe("digits-t").threats()]
    return accuracies(train("digits-t", overrides=overrides, out=path, device="cpu"), "last", threats)


@pytest.mark.slow
def test_the_natural_model_is_not_robust(rows: dict[str, dict[str, float]]) -> None:
    assert rows["digits-nt"]["natural"] > 0.95
    assert rows["digits-nt"][LINF] < 0.30
    assert rows["digits-nt"][L2] < 0.30


@pytest.mark.slow
def test_the_global_learner_is_the_generalist(rows: dict[str, dict[str, float]]) -> None:
    ours, natural, robust = rows[GENERALIST], rows["digits-nt"], rows["digits-at"]
    assert ours["natural"] >= natural["natural"] - 0.02
    assert ours[LINF] >= robust[LINF] - 0.08
    assert ours[L2] >= robust[L2] - 0.03


def test_runs_of_others_are_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generalist train digits-t` leaves its run in runs/digits-t: `--out runs` must not cost it."""
    (tmp_path / "digits-t").mkdir()
    (tmp_path / "digits-t" / "recipe.yaml").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ending:
        demo.main()
    complaint = capsys.readouterr().err
    assert ending.value.code == 2 and complaint.count("\n") == 1
    assert "digits-t was not made by the demonstration" in complaint and "choose another --out" in complaint
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "digits-t",
        "digits-t/recipe.yaml",
    ]


def test_its_own_runs_are_replaced_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    demo.clear(out)
    assert [path.name for path in out.iterdir()] == [MARKER]
    for name in (*RECIPES, "mine"):
        (out / name).mkdir()
        (out / name / "file").touch()
    demo.clear(out)
    assert {path.name for path in out.iterdir()} == {MARKER, "mine"}


def test_equal_budget() -> None:
    budgets = {(r.train.epochs, r.train.batch_size) for r in map(load_recipe, ("digits-nt", "digits-at", "digits-t"))}
    assert len(budgets) == 1


@pytest.mark.slow
def test_every_learner_has_a_row_and_the_summary_compares(rows: dict[str, dict[str, float]]) -> None:
    assert [name.split()[1] for name in rows if name.startswith("  its")] == ["linf", "natural", "l2"]
    points = 100 * (rows[GENERALIST]["natural"] - rows["digits-nt"]["natural"])
    assert f"natural {points:+.1f}" in summary(rows)


@pytest.mark.slow
def test_gamma_one_throughout_is_another_model(rows: dict[str, dict[str, float]], tmp_path: Path) -> None:
    """With gamma = 1 the global learner is an average of the linf learner alone."""
    only_linf = variant(tmp_path / "run", "mixing.gamma=1")
    assert max(abs(only_linf[name] - rows[GENERALIST][name]) for name in only_linf) >= 0.006  # 3 of 500 images


@pytest.mark.slow
def test_without_redistribution_mixing_fails(rows: dict[str, dict[str, float]], tmp_path: Path) -> None:
    """Learners that never meet drift apart, and the mix of their weights loses accuracy."""
    apart = variant(tmp_path / "run", "mixing.redistribution.every=0")
    assert apart[LINF] < rows[GENERALIST][LINF] - 0.05
