"""The measuring instrument: it counts what it says it counts, compares equal work, and fails in one line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from cli_helpers import run_main
from rich.console import Console
from torch import nn
from training_helpers import CLASSES, L2, NATURAL, ROBUST, TinyNet, make_trainer, tiny_recipe, tiny_splits

import generalist
from generalist.bench.evaluate import Attacked, Case, load_case, warm_up
from generalist.bench.flops import count_model, iteration_flops, why_not_counted
from generalist.bench.images import KINDS, kind_of, synthetic_splits
from generalist.bench.published import PublishedLoop, why_not_published
from generalist.bench.subjects import BATCHES, Setting, engine_subject, published_subject
from generalist.bench.table import table
from generalist.bench.timing import Timing, block_sizes, matmul_ceiling, time_blocks
from generalist.bench.train import Report, bench_train
from generalist.core.errors import DataError, GeneralistError, RecipeError
from generalist.data.options import DataOptions, load_splits
from generalist.data.sets import from_arrays, iterate
from generalist.recipe import load_recipe, parse

CPU = torch.device("cpu")
SMALL = ["model.width=4", "train.batch_size=16", "learners.0.attack.steps=2"]


@pytest.fixture(scope="module")
def report() -> Report:
    return bench_train("digits-d", overrides=SMALL, iterations=6, device="cpu")


# -- what is counted -------------------------------------------------------------------------------------------------


def test_flops_of_a_small_network_by_hand() -> None:
    """A 3x3 convolution from 1 to 3 channels on 4x4 images, then a linear layer from 48 to 3."""
    found = count_model(TinyNet(num_classes=CLASSES, in_channels=1), (1, 4, 4), CPU)
    convolution, linear = 2 * 3 * 9 * 16, 2 * 48 * 3
    assert found.forward == convolution + linear
    assert found.input_gradient == convolution + linear
    assert found.step_gradients == convolution + 2 * linear  # the first layer needs no gradient of the image


def test_flops_of_strided_convolutions_by_hand() -> None:
    """Two 3x3 convolutions of stride 2, from 3 to 4 to 8 channels, on 8x8 images: 4x4, then 2x2 outputs."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(32, 5)
    )
    first, second, linear = 2 * 3 * 4 * 9 * 16, 2 * 4 * 8 * 9 * 4, 2 * 32 * 5
    found = count_model(net, (3, 8, 8), CPU)
    assert found.forward == found.input_gradient == first + second + linear
    assert found.step_gradients == first + 2 * (second + linear)


def test_counting_leaves_the_model_as_it_was() -> None:
    model = TinyNet(num_classes=CLASSES, in_channels=1).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count_model(model, (1, 4, 4), CPU)
    assert not model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_flops_of_an_iteration() -> None:
    model = count_model(TinyNet(num_classes=CLASSES, in_channels=1), (1, 4, 4), CPU)
    step, attack = model.forward + model.step_gradients, model.forward + model.input_gradient
    recipe = tiny_recipe([ROBUST, L2, NATURAL])  # 2 steps, 1 step, none; batches of 6
    assert iteration_flops(recipe, model) == 6 * (3 * step + (2 + 1) * attack)


def test_resnet18_has_its_known_size() -> None:
    """0.56 G multiply-adds an image of 32x32: the figure that the literature gives."""
    from generalist.models import ModelOptions, build_model

    model = build_model(ModelOptions(name="resnet18"), num_classes=10, shape=(3, 32, 32), seed=0, device="meta")
    found = count_model(model, (3, 32, 32), torch.device("meta"))
    assert found.forward == pytest.approx(2 * 0.5559e9, rel=2e-3)
    assert found.step_gradients == pytest.approx(2 * found.forward, rel=0.01)


# -- the published code's loop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("learners", [[ROBUST, NATURAL], [NATURAL], [ROBUST, L2, NATURAL]], ids=["D", "NT", "T"])
@pytest.mark.parametrize("start", ["none", "uniform"])
def test_the_published_loop_does_what_the_published_style_does(
    learners: list[dict[str, Any]], start: str, tmp_path: Path
) -> None:
    """In float64 the baseline and the eager engine agree: losses, learners, averages, global weights, counters."""
    attacked = [
        {**entry, "attack": {**entry["attack"], "start": start}} if "attack" in entry else entry for entry in learners
    ]
    gamma = {"fractions": [0], "values": [0.7]}
    recipe = tiny_recipe(attacked, style="published-code", mixing={"gamma": gamma}, validation={"split": "held-out"})
    trainer = make_trainer(recipe, tmp_path)
    model = TinyNet(num_classes=CLASSES, in_channels=1).double()
    model.load_state_dict(trainer.learners[0].flat.state_dict())
    loop = PublishedLoop(recipe, model)
    batches = list(
        iterate(trainer.train_images, trainer._batches(1), epoch=1, seed=3, options=recipe.data.augmentation)
    )
    for number, batch in enumerate(batches):
        position = number / len(batches)
        trainer.engine.set_progress(step=number, epoch=1, position=position)
        trainer.engine.iteration(batch)
        wide = type(batch)(batch.x.double(), batch.y, batch.index)
        losses = loop.iteration(wide, position=position)
        ours = [found["loss"] for found in trainer.engine.take_means().values()]
        assert losses == pytest.approx(ours, abs=1e-9, rel=0)
    flat, mixed = trainer.learners[0].flat, trainer.global_learner
    _assert_equal(loop.mixed.state, flat.state_dict(mixed.vector, mixed.counters))
    for learner, network, average in zip(trainer.learners, loop.models, loop.averages, strict=True):
        assert learner.average is not None
        _assert_equal(network.state_dict(), learner.flat.state_dict())
        _assert_equal(average.state, flat.state_dict(learner.average.vector, learner.average.counters))
        _assert_equal(average.network.state_dict(), average.state)


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, atol=1e-9, rtol=0)


def test_the_subjects_train_on_the_same_images() -> None:
    recipe = load_recipe("digits-d", overrides=[*SMALL, "train.precision=fp32", "validation.images=1"])
    splits = synthetic_splits(recipe.data, count=BATCHES * 16 + 1)
    setting = Setting(recipe, splits, CPU, total=3)
    losses = []
    for subject in (engine_subject(setting, "eager", print), published_subject(setting)):
        for _ in range(3):
            subject.step()
        losses.append(subject.losses())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert all(0.5 < loss < 20 for loss in losses[0].values())


def test_an_engine_is_measured_after_the_warm_up_of_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    perturbed: list[float] = []

    def perturbation(weight: torch.Tensor, gradient: torch.Tensor, *, rho: float) -> torch.Tensor:
        perturbed.append(rho)
        return torch.zeros_like(weight)

    monkeypatch.setattr("generalist.objectives.awp.perturbation", perturbation)
    recipe = tiny_recipe([{**ROBUST, "objective": {"kind": "awp", "rho": 0.01, "warmup": 0.5}}])
    engine_subject(Setting(recipe, tiny_splits(), CPU, total=1), "eager", print).step()
    assert set(perturbed) == {0.01}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"objective": "trades"}, "'trades'"),
        ({"optimizer": {"kind": "adam", "lr": 1e-3}}, "'adam'"),
        ({"cutout": 2}, "augmentation"),
        ({"augmentation": {"crop": 0}}, "augmentation"),
        ({"attack": {"batchnorm": "train"}}, "eval mode"),
        ({"attack": {"scale": 0.5}}, "grows"),
        ({"trains": ["linear"]}, "train all"),
    ],
)
def test_what_the_published_code_has_no_form_for(change: dict[str, Any], words: str) -> None:
    assert why_not_published(tiny_recipe()) is None
    assert words in (why_not_published(tiny_recipe([{**ROBUST, **change}])) or "")


# -- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 3, 5, 7, 100])
def test_blocks_hold_every_iteration(iterations: int) -> None:
    sizes = block_sizes(iterations)
    assert sum(sizes) == iterations and len(sizes) == min(5, iterations)
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_the_warm_up_is_not_timed() -> None:
    clock: list[int] = []
    timing = time_blocks(lambda: clock.append(1), device=CPU, iterations=7, warm_up=2)
    assert len(clock) == 9 and len(timing.blocks) == 5 and all(block > 0 for block in timing.blocks)


def test_median_and_spread() -> None:
    timing = Timing((10.0, 12.0, 11.0, 30.0, 9.0))
    assert timing.median == 11.0
    assert timing.spread == pytest.approx(21 / 11)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_the_ceiling_is_the_best_size(precision: str) -> None:
    ceiling = matmul_ceiling(precision, CPU, sizes=(16, 64))
    assert ceiling.precision == precision and set(ceiling.by_size) == {16, 64}
    assert ceiling.tflops == max(ceiling.by_size.values()) > 0


# -- images ----------------------------------------------------------------------------------------------------------


def test_synthetic_digits_have_the_shape_of_the_digits() -> None:
    real, made = load_splits(DataOptions()).train, synthetic_splits(DataOptions(), count=300).train
    assert (made.shape, len(made.classes)) == (real.shape, len(real.classes))
    assert len(made) == 300 and made.labels.unique().tolist() == list(range(10))
    batch = made.batch(torch.arange(300))
    assert batch.x.min() == 0 and batch.x.max() == 1 and 0.45 < batch.x.mean() < 0.55


def test_a_folder_is_taken_for_imagenet() -> None:
    kind = kind_of(DataOptions(name="folder", root="imagenet", resolution=64))
    assert (kind.shape, kind.classes) == ((3, 64, 64), 1000)


def test_every_named_data_set_has_a_shape() -> None:
    from generalist.data.sets import DATASETS

    assert set(DATASETS.names()) <= set(KINDS)
    with pytest.raises(DataError, match="--real"):
        kind_of(DataOptions(name="arrays"))


# -- the whole -------------------------------------------------------------------------------------------------------


def test_the_record_is_complete_and_consistent(report: Report) -> None:
    record = json.loads(json.dumps(report.record(), allow_nan=False))
    assert record["recipe"] == "digits-d" and record["overrides"] == SMALL
    assert [entry["attack_steps"] for entry in record["learners"]] == [2, 0]
    assert record["data"] == {"name": "digits", "synthetic": True, "shape": [1, 8, 8], "classes": 10}
    assert {"torch", "device", "generalist", "threads"} <= record["environment"].keys()
    results = {entry["name"]: entry for entry in record["results"]}
    assert list(results) == ["published", "eager"]
    for entry in results.values():
        assert len(entry["blocks_ms"]) == 5 and entry["peak_memory_bytes"] is None
        assert entry["images_per_second"] == pytest.approx(16 / entry["ms_per_iteration"] * 1000)
        seconds = entry["ms_per_iteration"] / 1000
        assert entry["tflops"] == pytest.approx(record["flops"]["iteration"] / seconds / 1e12)
        assert entry["share_of_ceiling"] == pytest.approx(entry["tflops"] / record["ceiling"]["tflops"])
        assert 0 < entry["share_of_ceiling"] < 1.5 and entry["startup_seconds"] > 0
        assert entry["compile_seconds"] == 0  # nothing is compiled for a CPU unless the recipe says so
    ratio = results["published"]["ms_per_iteration"] / results["eager"]["ms_per_iteration"]
    assert record["ratios"] == {"published/eager": pytest.approx(ratio)}
    assert any("graph engine not measured" in note and "CUDA" in note for note in record["notes"])
    assert any("random pixels" in note for note in record["notes"])


def test_the_table_has_a_row_for_each_subject(report: Report) -> None:
    shown = table(report)
    assert shown.row_count == 2
    assert list(shown.columns[4].cells)[:1] == ["1.00x"]
    assert list(shown.columns[7].cells) == ["n/a", "n/a"]


def test_state_outside_is_left_as_it_was() -> None:
    threads, benchmark, random_state = torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.get_rng_state()
    torch.set_num_threads(threads + 1)
    try:
        overrides = [*SMALL, "train.threads=1"]
        found = bench_train("digits-d", overrides=overrides, iterations=1, device="cpu", published=False)
        assert found.environment["threads"] == 1
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.backends.cudnn.benchmark == benchmark
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [result.name for result in found.results] == ["eager"] and found.ratios() == {}


def test_real_images() -> None:
    found = bench_train("digits-d", overrides=SMALL, iterations=1, device="cpu", synthetic=False)
    assert found.data["synthetic"] is False and len(found.results) == 2
    assert not any("random pixels" in note for note in found.notes)


def test_another_objective_has_neither_baseline_nor_flops() -> None:
    raw = load_recipe("digits-at", overrides=SMALL).model_dump(mode="json")
    raw["learners"][0]["objective"] = "trades"
    assert "'trades'" in (why_not_counted(parse(raw)) or "")
    found = bench_train("digits-at", overrides=[*SMALL, "learners.0.objective=trades"], iterations=1, device="cpu")
    assert found.flops is None and [result.name for result in found.results] == ["eager"]
    assert found.record()["results"][0]["tflops"] is None
    assert sum("trades" in note for note in found.notes) == 2
    assert table(found).row_count == 1


def test_iterations_must_be_sensible() -> None:
    with pytest.raises(GeneralistError, match="1 to 100000"):
        bench_train("digits-d", iterations=0, device="cpu")


def test_a_recipe_with_stages_is_refused() -> None:
    stages = 'stages=[{"name": "one"}, {"name": "two"}]'
    with pytest.raises(RecipeError, match=r"stages=\[\]"):
        bench_train("digits-d", overrides=[stages], iterations=1, device="cpu")


# -- the command -----------------------------------------------------------------------------------------------------


def run_bench(
    args: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    return run_main(["bench", "train", *args], monkeypatch, capsys)


QUICK = ["--device", "cpu", "--iterations", "1", *(word for change in SMALL for word in ("--set", change))]


def test_a_narrow_terminal_loses_no_digit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("generalist.cli_bench.console", Console(width=80))
    code, out, _ = run_bench(QUICK, monkeypatch, capsys)
    assert code == 0 and max(map(len, out.splitlines()[-14:-2])) <= 80
    assert "eager engine" in out and "peak memory" in out and "\N{HORIZONTAL ELLIPSIS}" not in out


def test_json_on_standard_output_is_nothing_but_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_bench([*QUICK, "--engines", "eager", "--json", "-"], monkeypatch, capsys)
    assert code == 0
    record = json.loads(out)
    assert record["recipe"] == "digits-d" and record["iterations"] == 1
    assert not any("graph" in note for note in record["notes"])


def test_json_in_a_file_beside_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep" / "bench.json"
    code, out, _ = run_bench([*QUICK, "--no-published", "--json", str(file)], monkeypatch, capsys)
    assert code == 0 and json.loads(file.read_text())["ratios"] == {}
    for words in ("eager engine", "needs a CUDA device", "random pixels", "TFLOP/s", "torch"):
        assert words in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--recipe", "digits-x"], "unknown recipe"),
        (["--engines", "warp"], "unknown engine 'warp'"),
        (["--engines", ""], "unknown engine"),
        (["--engines", "graph"], "needs a CUDA device"),
        (["--iterations", "0"], "1 to 100000"),
        (["--iterations", "-3"], "1 to 100000"),
        (["--device", "tpu"], "unknown device"),
        (["--set", "train.batch_sise=3"], "batch_sise"),
        (["--set", "train.batch_size=4000", "--real"], "do not fill one batch"),
        (["--set", "data.name=arrays"], "--real"),
        (["--set", "data.name=cifar10", "--set", "data.root=nowhere", "--real"], "cifar10"),
        (["--set", "data.augmentation.crop=8"], "crop"),
        (["--json", "/dev/null/x/bench.json"], "cannot write"),
        (["--json", ""], "--json"),
        (["--json", "."], "--json"),
    ],
)
def test_mistakes_end_in_one_line(
    args: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_bench([*QUICK, "--no-published", *args], monkeypatch, capsys)
    assert code == 2
    assert words in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.gpu
def test_on_a_gpu_both_engines_are_measured() -> None:
    found = bench_train("digits-d", iterations=20, device="cuda")
    assert [result.name for result in found.results] == ["published", "eager", "graph"]
    assert set(found.ratios()) == {"published/eager", "published/graph", "eager/graph"}
    assert all(result.peak_bytes for result in found.results)
    losses = [result.losses for result in found.results]
    assert losses[0] == pytest.approx(losses[2], rel=0.05)


# -- evaluation ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small network that has learnt a little."""
    out = tmp_path_factory.mktemp("bench") / "run"
    generalist.train("digits-at", overrides=["model.width=4", "train.epochs=2", "validation.threats=[]"], out=out)
    return out / "model.safetensors"


def test_evaluation_is_timed_by_attack(
    weights: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "evaluate", str(weights), "--samples", "40", "--attacks", "apgd-ce,fab-t", "--device", "cpu"]
    code, output, told = run_main([*arguments, "--json", "-"], monkeypatch, capsys)
    assert code == 0
    report = json.loads(output)
    own = report["ours"]
    assert report["samples"] == 40 and report["attacks"] == ["apgd-ce", "fab-t"]
    assert 0 < own["robust_accuracy"] <= report["natural_accuracy"] <= 1
    assert own["by_attack"].keys() == {"natural", "apgd-ce", "fab-t", "total"}
    assert sum(seconds for name, seconds in own["by_attack"].items() if name != "total") <= own["seconds"]
    assert own["share_of_ceiling"] == pytest.approx(own["tflops"] / own["ceiling_tflops"])
    assert "40 samples of digits, linf:0.12, apgd-ce+fab-t" in told


def test_the_work_of_an_evaluation_by_hand(weights: Path) -> None:
    """A pass of an image for each that an attack makes in a round, and a round a target."""
    case = load_case(str(weights), samples=10, attacks=["apgd-t"], device="cpu")
    cost = count_model(case.model, (1, 8, 8), CPU)
    rounds = Counter({"apgd-t": 7, "square": 2})
    found = Attacked(torch.ones(10, dtype=torch.bool), rounds, {})
    expected = 7 * (103 * cost.forward + 101 * cost.input_gradient) + 2 * 5002 * cost.forward
    assert found.work(case) == expected


def test_on_a_gpu_every_kernel_is_compiled_when_the_clock_starts(weights: Path) -> None:
    case = load_case(str(weights), samples=10, attacks=["apgd-ce", "fab-t"], device="cpu")
    assert warm_up(case) == ["apgd-ce"]
    on_gpu = SimpleNamespace(device=torch.device("cuda"), attacks=case.attacks)
    assert warm_up(cast(Case, on_gpu)) == ["apgd-ce", "fab-t"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attacks", "pgd-20"], "--attacks knows apgd-ce, apgd-t, fab-t, square, not pgd-20"),
        (["--samples", "0"], "at least one"),
        (["--precision", "half"], "--precision is default or fast, not 'half'"),
        (["--threat", "linf"], "threat 'linf'"),
        (["--data", "digit"], "unknown data set 'digit'; did you mean 'digits'"),
    ],
)
def test_mistakes_in_the_benchmark_of_evaluation(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, told = run_main(["bench", "evaluate", *arguments], monkeypatch, capsys)
    assert (code, output) == (2, "") and words in told


def test_images_that_do_not_fit_the_network_are_refused(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = from_arrays(np.zeros((4, 3, 8, 8), np.uint8), np.arange(4))
    monkeypatch.setattr("generalist.bench.evaluate.images_named", lambda name: coloured)
    with pytest.raises(GeneralistError, match=r"the model fails on images \[2, 3, 8, 8\]"):
        load_case(str(weights), data="cifar10", device="cpu")
