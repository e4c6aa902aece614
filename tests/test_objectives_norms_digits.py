"""The shipped baselines against several norms, PART and RMC: their settings, and a short training of each on digits."""

from __future__ import annotations

from pathlib import Path

import pytest

from generalist import api
from generalist.core.options import format_number
from generalist.core.run import RunDirectory
from generalist.evaluation.summary import Evaluation
from generalist.recipe import load_recipe
from generalist.shipped import shipped_names
from generalist.stage_plans import plan_runs

NORMS = {
    "at-linf-l2": ["linf:0.1", "l2:0.45"],
    "at-max": ["linf:0.1", "l2:0.45"],
    "e-at": ["linf:0.1", "l1:1.4"],
    "msd": ["linf:0.1", "l2:0.45"],
    "part": ["linf:0.1"],
    "ramp": ["linf:0.1", "l2:0.45"],
    "rmc": ["linf:0.1", "l2:0.45"],
}
THREATS = ["linf:0.1", "l2:0.45", "l1:1.4"]


def measured(run: Path, threats: list[str]) -> Evaluation:
    return api.evaluate(run, threats=threats, attacks=["natural", "pgd-20"], mode="each", device="cpu")


@pytest.fixture(scope="session")
def natural(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """Natural training for as long."""
    out = tmp_path_factory.mktemp("digits") / "nt"
    api.train("digits-nt", overrides=["train.epochs=8"], out=out, device="cpu")
    return measured(out, THREATS)


def assert_robust(name: str, run: Path, natural: Evaluation) -> None:
    found = measured(run, NORMS[name])
    assert found["natural"].value > 0.9
    for threat in NORMS[name]:
        robust = found[f"pgd-20/{threat}"].value
        assert robust >= 0.6 and robust >= natural[f"pgd-20/{threat}"].value + 0.3, threat


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_a_short_training_is_robust_in_its_own_threats(name: str, natural: Evaluation, tmp_path: Path) -> None:
    recipe = load_recipe(f"baseline-digits-{name}")
    assert [str(threat) for threat in recipe.threats()] == NORMS[name]
    api.train(recipe, out=tmp_path / "run", device="cpu")
    assert_robust(name, tmp_path / "run", natural)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NORMS)
def test_an_iteration_is_recorded_as_a_graph(name: str, natural: Evaluation, tmp_path: Path) -> None:
    """`graph` is refused where it cannot be; what is learnt is as robust."""
    api.train(f"baseline-digits-{name}", overrides=["train.engine=graph"], out=tmp_path / "run", device="cuda")
    assert_robust(name, tmp_path / "run", natural)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("model", ["resnet18", "wrn-32-10"])
@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_cifar_settings_are_the_papers(data: str, model: str, name: str) -> None:
    recipe = load_recipe(f"baseline-{data}-{model}-{name}")
    assert (recipe.data.name, recipe.model.name) == (data, model)
    assert (recipe.train.batch_size, recipe.train.precision) == (128, "bf16")
    assert recipe.mixing.decay == 0 and recipe.mixing.redistribution.every == 0, "plain training"
    (learner,) = recipe.learners
    assert learner.objective.kind == name
    others = {"e-at": ["l1:12"], "part": []}.get(name, [f"l2:{format_number(128 / 255)}"])
    assert [str(threat) for threat in learner.threats()] == ["linf:8/255", *others]
    assert learner.attack.steps == 10 and learner.attack.step is None
    wide = model != "resnet18"
    assert (learner.optimizer.lr, learner.optimizer.weight_decay) == ((0.1, 7e-4) if wide else (0.01, 3.5e-3))
    assert learner.schedule.values[-1] == (0.05 if wide else 0.01)
    runs = plan_runs(recipe, RunDirectory(Path("run")), start=None, trust_code=False)
    assert [run.recipe.train.epochs for run in runs] == ([120, 120, 60] if name == "rmc" else [120])


def test_every_baseline_of_this_family_is_shipped() -> None:
    places = ["digits", *(f"{data}-{model}" for data in ("cifar10", "cifar100") for model in ("resnet18", "wrn-32-10"))]
    assert {f"baseline-{place}-{name}" for place in places for name in NORMS} <= set(shipped_names())


def test_the_ends_of_a_curve_are_trained_in_their_own_norms() -> None:
    recipe = load_recipe("baseline-cifar10-resnet18-rmc")
    runs = plan_runs(recipe, RunDirectory(Path("run")), start=None, trust_code=False)
    assert [[str(threat) for threat in run.recipe.threats()] for run in runs[:2]] == [["linf:8/255"], ["l2:128/255"]]
    assert runs[2].sources() == ["linf", "l2"]
