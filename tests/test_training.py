"""One learner's step against a plain PyTorch loop, the columns of the method's table, and the loop's own promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training_helpers import (
    NATURAL,
    ROBUST,
    TinyNet,
    batches_of,
    fresh_model,
    make_trainer,
    reference_uniform,
    spy_on,
    tiny_recipe,
    tiny_splits,
    train,
)

from generalist.core import random
from generalist.core.errors import DataError, DivergedError, GeneralistError, RecipeError
from generalist.core.run import RunDirectory
from generalist.data.sets import Batch
from generalist.models.registry import MODELS
from generalist.objectives.base import Progress
from generalist.objectives.trades import divergence
from generalist.recipe import Recipe
from generalist.training.artefacts import load_weights
from generalist.training.loop import Trainer
from generalist.training.selection import TEST_SELECTION

SEED, STEPS, EPS = 3, 3, 0.1


# -- a learner by hand ------------------------------------------------------------------------------------------------


def log_softmax(logits: Tensor) -> Tensor:
    shifted = logits - logits.max(1, keepdim=True).values.detach()
    return shifted - shifted.exp().sum(1, keepdim=True).log()


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    logp = log_softmax(logits)
    hard = -logp[torch.arange(len(y)), y]
    return ((1 - smoothing) * hard + smoothing * -logp.mean(1)).mean()


def kl(target: Tensor, logits: Tensor) -> Tensor:
    """KL(p_target || p_logits) per sample."""
    p, q = log_softmax(target), log_softmax(logits)
    return (p.exp() * (p - q)).sum(1)


def uniform_start(norm: str, batch: Batch, step: int) -> Tensor:
    shape, count, purpose = batch.x.shape, batch.x[0].numel(), f"attack/one/{norm}:{EPS}"
    if norm == "linf":
        rows = [reference_uniform(SEED, purpose, int(i), step, count=count) for i in batch.index]
        return EPS * (2 * torch.from_numpy(np.stack(rows)).reshape(shape) - 1)
    draw = random.normal(SEED, f"{purpose}/direction", batch.index, step, shape=shape[1:]).double().flatten(1)
    radius = np.stack([reference_uniform(SEED, f"{purpose}/radius", int(i), step) for i in batch.index])
    return (EPS * torch.from_numpy(radius) ** (1 / count) * draw / draw.norm(dim=1, keepdim=True)).reshape(shape)


def hand_pgd(model: nn.Module, batch: Batch, *, norm: str, start: Tensor, divergence_attack: bool) -> Tensor:
    """PGD in eval mode with steps of eps / 4, inside the ball and inside [0, 1]."""
    model.eval()
    x = batch.x
    with torch.no_grad():
        clean = model(x)
    adversarial = (x + start).clamp(0, 1)
    for _ in range(STEPS):
        adversarial = adversarial.detach().requires_grad_()
        logits = model(adversarial)
        loss = kl(clean, logits).sum() if divergence_attack else cross_entropy(logits, batch.y) * len(x)
        grad = torch.autograd.grad(loss, adversarial)[0]
        if norm == "linf":
            delta = (adversarial - x + EPS / 4 * grad.sign()).clamp(-EPS, EPS)
        else:
            delta = adversarial - x + EPS / 4 * grad / grad.flatten(1).norm(dim=1)[:, None, None, None]
            delta = delta * (EPS / delta.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None, None]
        adversarial = (x + delta).clamp(0, 1)
    model.train()
    return adversarial.detach()


def hand_loss(
    kind: str, model: nn.Module, batch: Batch, step: int, *, norm: str, smoothing: float, gaussian: bool
) -> Tensor:
    if kind == "nt":
        return cross_entropy(model(batch.x), batch.y, smoothing)
    if gaussian:
        start = 1e-3 * random.normal(SEED, f"attack/one/{norm}:{EPS}", batch.index, step, shape=batch.x.shape[1:])
    else:
        start = uniform_start(norm, batch, step)
    adversarial = hand_pgd(model, batch, norm=norm, start=start.double(), divergence_attack=kind == "trades")
    if kind == "at":
        return cross_entropy(model(adversarial), batch.y, smoothing)
    natural, robust = model(batch.x), model(adversarial)
    if kind == "at-half":
        return (cross_entropy(natural, batch.y, smoothing) + cross_entropy(robust, batch.y, smoothing)) / 2
    return cross_entropy(natural, batch.y, smoothing) + 4.0 * kl(natural, robust).mean()


@pytest.mark.parametrize(
    ("kind", "norm", "smoothing", "gaussian"),
    [
        ("nt", "none", 0.0, False),
        ("nt", "none", 0.2, False),
        ("at", "linf", 0.0, False),
        ("at", "linf", 0.1, False),
        ("at", "l2", 0.0, False),
        ("at-half", "linf", 0.0, False),
        ("at-half", "l2", 0.0, False),
        ("trades", "linf", 0.0, False),
        ("trades", "linf", 0.0, True),
        ("trades", "l2", 0.0, False),
    ],
)
def test_one_learner_is_a_plain_pytorch_loop(
    tmp_path: Path, kind: str, norm: str, smoothing: float, gaussian: bool
) -> None:
    learner: dict[str, Any] = {
        "name": "one",
        "objective": {"kind": "trades", "beta": 4} if kind == "trades" else kind,
        "optimizer": {"lr": 0.05, "weight_decay": 1e-3},
        "schedule": {"fractions": [0, 1], "values": [1, 0.5]},
        "label_smoothing": smoothing,
    }
    if kind != "nt":
        learner["threat"] = {"norm": norm, "eps": EPS}
        learner["attack"] = {"steps": STEPS, "start": "gaussian" if gaussian else "uniform"}
    trainer = make_trainer(tiny_recipe([learner]), tmp_path)
    trace, model = spy_on(trainer), fresh_model(trainer)
    trainer.run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    model.train()
    for step, batch in enumerate(trace.batches):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - 0.5 * step / 12)
        loss = hand_loss(kind, model, batch, step, norm=norm, smoothing=smoothing, gaussian=gaussian)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(trace.batches) == 12
    expected = model.state_dict()
    for name, tensor in trainer.learners[0].flat.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_with_one_learner_the_global_one_is_its_average_over_time(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_recipe([NATURAL], mixing={"redistribution": {"every": 0}}), tmp_path)
    trace = spy_on(trainer)
    trainer.run()
    average = trace.start
    for k, moment in enumerate(trace.after["natural"]):
        d = min(0.999, (k + 1) / (k + 10))
        average = d * average + (1 - d) * moment.weights
    np.testing.assert_allclose(trainer.global_learner.vector.numpy(), average, rtol=0, atol=1e-12)


def test_a_learner_is_not_disturbed_by_its_neighbours(tmp_path: Path) -> None:
    never = {"redistribution": {"every": 0}}
    alone = train(tiny_recipe([ROBUST], mixing=never), tmp_path / "alone")
    among = train(tiny_recipe([NATURAL, ROBUST], mixing=never), tmp_path / "among")
    assert torch.equal(alone.learners[0].flat.vector, among.learners[1].flat.vector)


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_divergence_and_its_gradients_stay_finite(scale: float, dtype: torch.dtype) -> None:
    signs = torch.tensor([[1.0, -1, 0], [-1, 1, 1], [1, 1, 1], [0, 0, -1]], dtype=dtype)
    target = (scale * signs).requires_grad_()
    logits = (-scale * signs.roll(1, 1)).requires_grad_()
    value = divergence(target, logits)
    gradients = torch.autograd.grad(value, [target, logits])
    target, logits, value = target.detach(), logits.detach(), value.detach()
    assert bool(value.isfinite()) and float(value) > 0
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    if scale == 1:
        assert float(value) == pytest.approx(float(kl(target, logits).sum()), rel=1e-5)
    assert float(divergence(target, target)) == pytest.approx(0, abs=1e-6)


def test_a_trades_step_with_huge_logits_is_finite(tmp_path: Path) -> None:
    learner = {**ROBUST, "objective": {"kind": "trades", "beta": 6}}
    trainer = make_trainer(tiny_recipe([learner], train={"precision": "fp32", "epochs": 1, "batch_size": 6}), tmp_path)
    robust = trainer.learners[0]
    with torch.no_grad():
        robust.model.linear.weight.mul_(1e5)  # type: ignore[operator, union-attr]
    batch = trainer.train_images.batch(torch.arange(6))
    progress = Progress(step=torch.tensor(0), epoch=torch.tensor(1), lr=torch.tensor(0.1))
    assert float(robust.model(batch.x).detach().abs().max()) > 1e4
    gradients, metrics = robust.objective.gradients(batch, progress)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert all(bool(value.isfinite()) for value in metrics.values())


# -- the columns of the method's table --------------------------------------------------------------------------------


def styled(style: str) -> Recipe:
    learners = [
        {"name": "robust", "objective": "at", "threat": {"norm": "linf"}, "optimizer": {"lr": 0.01}},
        {"name": "natural", "objective": "nt"},
        {"name": "l2", "objective": "at", "threat": {"norm": "l2"}},
    ]
    raw = {"data": {"name": "cifar10"}, "model": {"name": "resnet18"}, "learners": learners, "style": style}
    return Recipe.model_validate(raw)


THIRDS = [0, 1 / 3, 2 / 3, 1]
COLUMNS: dict[str, dict[str, Any]] = {
    "default": {
        "when": "epoch-end",
        "reset": True,
        "gamma": (THIRDS, [1, 1, 1, 0.4]),
        "natural lr": 0.01,
        "schedule": (THIRDS, [1, 1, 0.1, 0.01]),
        "source": "raw",
        "averaging": None,
        "warmup": True,
        "counters": "copy",
        "eps": 8 / 255,
        "step": None,
        "selection": ("held-out", 1000, 0.0),
        "validation": (20, {}),
    },
    "paper": {
        "when": "epoch-end",
        "reset": False,
        "gamma": (THIRDS, [1, 1, 1, 0]),
        "natural lr": 0.1,
        "schedule": ([0, 1 / 3, 0.5, 1], [1, 1, 0.1, 0.01]),
        "source": "raw",
        "averaging": None,
        "warmup": False,
        "counters": "copy",
        "eps": 8 / 255,
        "step": None,
        "selection": ("test", 10_000, 0.0),
        "validation": (20, {}),
    },
    "published-code": {
        "when": "every-iteration",
        "reset": False,
        "gamma": (THIRDS, [1, 1, 1, 0.4]),
        "natural lr": 0.01,
        "schedule": (THIRDS, [1, 1, 0.1, 0.01]),
        "source": "averaged",
        "averaging": (0.999, True),
        "warmup": True,
        "counters": "truncate",
        "eps": 0.031,
        "step": 0.007,
        "selection": ("test", 10_000, 0.88),
        "validation": (10, {"linf": 0.007}),
    },
}


@pytest.mark.parametrize("style", COLUMNS)
def test_a_style_sets_its_whole_column(style: str) -> None:
    recipe, column = styled(style), COLUMNS[style]
    robust, natural, l2 = recipe.learners
    mixing, validation = recipe.mixing, recipe.validation
    assert mixing.redistribution.when == column["when"]
    assert mixing.redistribution.reset == column["reset"]
    assert mixing.redistribution.interval(120) == 5
    assert mixing.redistribution.first_epoch(120) == 75
    positions, values = column["gamma"]
    assert mixing.gamma.positions == pytest.approx(positions)
    assert mixing.gamma.values == values
    assert mixing.decay == 0.999
    assert mixing.warmup == column["warmup"]
    assert mixing.source == column["source"]
    assert mixing.counters == column["counters"]
    assert recipe.learning_rate(natural) == column["natural lr"]
    assert recipe.learning_rate(robust) == recipe.learning_rate(l2) == 0.01
    for learner in recipe.learners:
        positions, values = column["schedule"]
        assert learner.schedule.positions == pytest.approx(positions)
        assert learner.schedule.values == values
        found = learner.averaging and (learner.averaging.decay, learner.averaging.warmup)
        assert found == column["averaging"]
        assert learner.attack.batchnorm == "eval"
        assert learner.attack.steps == 10
        assert learner.own_attack().start == "uniform"
    assert robust.threat is not None and l2.threat is not None
    assert robust.threat.eps == column["eps"]
    assert l2.threat.eps == 128 / 255
    assert robust.attack.step == column["step"]
    assert l2.attack.step is None
    if column["step"] is None:
        assert robust.threat.build().default_step(10) == pytest.approx(2 / 255)
    assert l2.threat.build().default_step(10) == pytest.approx(128 / 255 / 4)
    assert (validation.split, validation.images, validation.min_natural) == column["selection"]
    assert (validation.steps, validation.step) == column["validation"]
    assert validation.rule == "sum"
    assert recipe.train.batch_size == 128
    assert recipe.train.epochs == 120


@pytest.mark.parametrize("style", ["paper", "published-code"])
def test_what_the_recipe_says_itself_stands_above_its_style(style: str) -> None:
    raw = styled("default").model_dump(mode="json")
    recipe = Recipe.model_validate(
        {
            "data": raw["data"],
            "model": raw["model"],
            "style": style,
            "learners": [
                {
                    "name": "robust",
                    "objective": "at",
                    "threat": {"norm": "linf", "eps": "4/255"},
                    "attack": {"step": "1/255"},
                    "optimizer": {"lr": 0.2},
                    "schedule": 1,
                },
                {"name": "natural", "objective": "nt", "optimizer": {"lr": 0.3}},
            ],
            "mixing": {"gamma": 0.5, "redistribution": {"reset": True, "when": "epoch-end"}, "warmup": True},
            "validation": {"split": "held-out", "images": 10},
        }
    )
    robust, natural = recipe.learners
    assert robust.threat is not None and robust.threat.eps == 4 / 255
    assert robust.attack.step == 1 / 255
    assert robust.schedule.values == [1]
    assert recipe.learning_rate(natural) == 0.3
    assert recipe.mixing.gamma.at(100, 120) == 0.5
    assert recipe.mixing.redistribution.reset and recipe.mixing.redistribution.when == "epoch-end"
    assert recipe.mixing.warmup
    assert (recipe.validation.split, recipe.validation.images) == ("held-out", 10)


def test_selection_on_the_test_set_is_said_everywhere(tmp_path: Path) -> None:
    train(tiny_recipe(style="paper"), tmp_path / "paper")
    for record in RunDirectory(tmp_path / "paper").read_metrics():
        assert record["warning"] == TEST_SELECTION
    for name in ("model", "last"):
        assert load_weights(tmp_path / "paper" / f"{name}.safetensors")[1]["warning"] == TEST_SELECTION
    train(tiny_recipe(), tmp_path / "ours")
    assert all("warning" not in record for record in RunDirectory(tmp_path / "ours").read_metrics())
    assert "warning" not in load_weights(tmp_path / "ours" / "model.safetensors")[1]


# -- divergence -------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    spoiled = {"name": "fragile", "objective": {"kind": "spoiled", "at": 7}, "optimizer": {"lr": 0.05}}
    with pytest.raises(DivergedError, match=r"learner 'fragile'.*step 7"):
        train(tiny_recipe([ROBUST, spoiled]), tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.pt"))
    assert names == ["step-000000003.pt", "step-000000006.pt"]
    again = make_trainer(tiny_recipe([ROBUST, spoiled]), tmp_path)
    assert again.resume()
    assert again.step == 6
    assert all(bool(tensor.isfinite().all()) for tensor in again.live_tensors().values())


@pytest.mark.parametrize("step", [3, 5])
def test_weights_that_are_not_finite_never_reach_a_checkpoint(tmp_path: Path, step: int) -> None:
    """The loss is still finite where the gradient is not; step 5 is the last of its epoch."""
    objective = {"kind": "spoiled", "at": step, "weights_only": True}
    spoiled = {"name": "fragile", "objective": objective, "optimizer": {"lr": 0.05}}
    with pytest.raises(DivergedError, match="learner 'fragile'"):
        train(tiny_recipe([ROBUST, spoiled]), tmp_path)
    again = make_trainer(tiny_recipe([ROBUST, spoiled]), tmp_path)
    assert again.resume()
    assert again.step == 3
    assert all(bool(tensor.isfinite().all()) for tensor in again.live_tensors().values())


@pytest.mark.parametrize("batch_size", [6, 18])
def test_an_absurd_learning_rate_is_told_as_divergence(tmp_path: Path, batch_size: int) -> None:
    """With one iteration an epoch the validation is the first to see it."""
    wild = {**NATURAL, "optimizer": {"lr": 1e18, "weight_decay": 1.0}}
    recipe = tiny_recipe([ROBUST, wild], train={"epochs": 4, "batch_size": batch_size, "precision": "fp32"})
    with pytest.raises(DivergedError, match="learner 'natural'"):
        train(recipe, tmp_path)


# -- what the loop feeds ----------------------------------------------------------------------------------------------


def test_bf16_runs_on_the_cpu_and_keeps_weights_in_single_precision(tmp_path: Path) -> None:
    trainer = train(tiny_recipe(train={"epochs": 2, "batch_size": 6, "precision": "bf16"}), tmp_path / "half")
    assert trainer.learners[0].flat.vector.dtype == torch.float32
    single = train(tiny_recipe(train={"epochs": 2, "batch_size": 6, "precision": "fp32"}), tmp_path / "single")
    difference = (trainer.learners[1].flat.vector - single.learners[1].flat.vector).abs().max()
    assert 0 < float(difference) < 0.1
    assert all(np.isfinite(r["train"]["robust"]["loss"]) for r in trainer.directory.read_metrics())


def spied_batches(recipe: Recipe, path: Path, **options: Any) -> tuple[Trainer, list[Batch]]:
    trainer = make_trainer(recipe, path, **options)
    trace = spy_on(trainer)
    trainer.run()
    return trainer, trace.batches


def test_extra_images_fill_their_share_of_each_batch(tmp_path: Path) -> None:
    data = {"name": "arrays", "augmentation": {"crop": 0, "flip": False}, "extra": {"name": "digits", "ratio": "1/3"}}
    splits = tiny_splits(extra=10)
    trainer, batches = spied_batches(tiny_recipe([NATURAL], data=data), tmp_path, splits=splits)
    assert splits.extra is not None
    for batch in batches:
        assert len(batch.y) == 6
        assert int((batch.index >= 24).sum()) == 2
        for x, y, i in zip(batch.x, batch.y, batch.index.tolist(), strict=True):
            images, at = (splits.extra, i - 24) if i >= 24 else (splits.train, i)
            assert torch.equal(images.batch(torch.tensor([at])).x[0].double(), x.double())
            assert int(images.labels[at]) == int(y)
    assert trainer.steps_per_epoch == 4  # 18 of their own, 4 in each batch; the last two are dropped
    seen = torch.cat([batch.index[batch.index >= 24] for batch in batches])
    assert seen.unique().tolist() == list(range(24, 34))
    counts = torch.bincount(seen - 24)
    assert int(counts.max() - counts.min()) <= 1, "each extra image comes once before any comes again"


@pytest.mark.parametrize(("last", "sizes"), [("drop", [5, 5, 5]), ("fill", [5, 5, 5, 5]), ("keep", [5, 5, 5, 3])])
def test_the_last_batch(tmp_path: Path, last: str, sizes: list[int]) -> None:
    recipe = tiny_recipe([NATURAL], train={"epochs": 2, "batch_size": 5, "last_batch": last})
    trainer, batches = spied_batches(recipe, tmp_path)
    assert [len(batch.y) for batch in batches] == sizes * 2
    seen = torch.cat([batch.index for batch in batches[: len(sizes)]])
    assert len(seen.unique()) == (15 if last == "drop" else 18)
    assert not torch.equal(seen, torch.cat([batch.index for batch in batches[len(sizes) :]])), (
        "each epoch has its order"
    )
    assert trainer.steps_per_epoch == len(sizes)


def test_an_epoch_of_fewer_iterations_sees_other_images_each_time(tmp_path: Path) -> None:
    recipe = tiny_recipe([NATURAL], train={"epochs": 3, "batch_size": 5, "iterations": 2})
    trainer, batches = spied_batches(recipe, tmp_path)
    assert trainer.steps_per_epoch == 2 and [len(batch.y) for batch in batches] == [5] * 6
    epochs = [torch.cat([batch.index for batch in batches[i : i + 2]]) for i in (0, 2, 4)]
    assert all(len(seen.unique()) == 10 for seen in epochs), "no image twice in an epoch"
    assert len(torch.cat(epochs).unique()) > 10, "and not the same ones in each"
    whole = spied_batches(tiny_recipe([NATURAL], train={"epochs": 1, "batch_size": 5}), tmp_path / "whole")[1]
    assert torch.equal(epochs[0], torch.cat([batch.index for batch in whole[:2]])), "the beginning of a whole one"


def test_more_iterations_than_the_images_give_are_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe([NATURAL], train={"epochs": 1, "batch_size": 5, "iterations": 4})
    with pytest.raises(DataError, match=r"train\.iterations is 4, but 18 images make 3 batches of 5"):
        make_trainer(recipe, tmp_path)


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="batch_size"):
        make_trainer(tiny_recipe(train={"epochs": 1, "batch_size": 100}), tmp_path)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_held_out_images_are_never_trained_on(tmp_path: Path, seed: int) -> None:
    recipe = tiny_recipe([NATURAL], train={"epochs": 3, "batch_size": 3, "seed": seed})
    trainer, batches = spied_batches(recipe, tmp_path)
    held = set(torch.cat(trainer.validator.batches).tolist())
    assert len(held) == 6
    labels = trainer.train_images.labels[sorted(held)]
    assert torch.bincount(labels).tolist() == [2, 2, 2], "class-balanced"
    assert set(torch.cat([batch.index for batch in batches]).tolist()) == set(range(24)) - held


def test_all_images_are_trained_on_where_selection_is_on_the_test_set(tmp_path: Path) -> None:
    trainer, batches = spied_batches(tiny_recipe([NATURAL], style="paper"), tmp_path)
    assert set(torch.cat([batch.index for batch in batches]).tolist()) == set(range(24))
    assert trainer.validator.images.name == "test"
    assert trainer.validator.count == 6
    without = replace(tiny_splits(), test=None)
    with pytest.raises(DataError, match="held-out"):
        make_trainer(tiny_recipe([NATURAL], style="paper"), tmp_path, splits=without)


def test_cutout_belongs_to_one_learner(tmp_path: Path) -> None:
    recipe = tiny_recipe(
        [{**NATURAL, "name": "cut", "cutout": 2}, NATURAL],
        data={"name": "arrays", "augmentation": {"crop": 0, "flip": False}},
    )
    trainer = make_trainer(recipe, tmp_path)
    seen = batches_of(trainer)
    squares: dict[int, set[tuple[bool, ...]]] = {}
    for cut, plain in zip(seen["cut"], seen["natural"], strict=True):
        assert bool((plain.x > 0).all())
        for image, whole, i in zip(cut.x, plain.x, cut.index.tolist(), strict=True):
            hole = image[0] == 0
            rows, columns = hole.any(1), hole.any(0)
            assert torch.equal(hole, rows[:, None] & columns)
            assert 1 <= int(rows.sum()) <= 2 and 1 <= int(columns.sum()) <= 2
            assert torch.equal(image[0][~hole], whole[0][~hole])
            squares.setdefault(i, set()).add(tuple(hole.flatten().tolist()))
    assert any(len(found) > 1 for found in squares.values()), "the square moves from epoch to epoch"
    assert len(set.union(*squares.values())) > 4, "and from image to image"


def test_mixing_and_redistribution_change_the_result(tmp_path: Path) -> None:
    """With gamma = 1 and no redistribution the natural learner would not matter; it does."""
    schedule = {"epochs": 8, "batch_size": 6, "precision": "fp64"}
    never = {"gamma": 1, "redistribution": {"every": 0}}
    alone = train(tiny_recipe(mixing=never, train=schedule), tmp_path / "alone")
    single = train(tiny_recipe([ROBUST], mixing=never, train=schedule), tmp_path / "single")
    torch.testing.assert_close(alone.global_learner.vector, single.global_learner.vector, rtol=0, atol=1e-12)
    mixed = train(tiny_recipe(mixing={"redistribution": {"every": 0}}, train=schedule), tmp_path / "mixed")
    full = train(tiny_recipe(mixing={"redistribution": {"every": 1}}, train=schedule), tmp_path / "full")
    x = alone.train_images.batch(torch.arange(24)).x.double()
    outputs = []
    for trainer in (alone, mixed, full):
        flat = trainer.learners[0].flat
        model = TinyNet(num_classes=3, in_channels=1).double()
        model.load_state_dict(flat.state_dict(trainer.global_learner.vector, trainer.global_learner.counters))
        with torch.no_grad():
            outputs.append(model.eval()(x))
    for i, one in enumerate(outputs):
        for other in outputs[:i]:
            assert float((one - other).norm(dim=1).mean()) > 1e-3


def test_two_runs_of_one_recipe_are_equal_and_of_two_seeds_are_not(tmp_path: Path) -> None:
    first, second = (train(tiny_recipe(), tmp_path / name) for name in ("first", "second"))
    assert torch.equal(first.global_learner.vector, second.global_learner.vector)
    other = train(tiny_recipe(train={"epochs": 4, "batch_size": 6, "precision": "fp64", "seed": 4}), tmp_path / "other")
    assert not torch.equal(first.global_learner.vector, other.global_learner.vector)


def test_snapshots_come_before_learners_meet(tmp_path: Path) -> None:
    """Published code redistributes within the due epochs, so the epoch before the first of them is kept."""
    recipe = tiny_recipe(mixing={"redistribution": {"every": 2, "start": 0.5, "when": "every-iteration"}})
    trainer = train(recipe, tmp_path)
    assert trainer.directory.snapshot_epochs() == [1, 4]
    folder = trainer.directory.snapshots / "1"
    states = [load_weights(folder / f"{name}.safetensors")[0]["linear.weight"] for name in ("robust", "natural")]
    assert not torch.equal(*states)


def test_a_cutout_as_large_as_the_image_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"learners\.1\.cutout"):
        make_trainer(tiny_recipe([ROBUST, {**NATURAL, "cutout": 4}]), tmp_path)


def test_a_frozen_parameter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen_net(*, num_classes: int, in_channels: int) -> torch.nn.Module:
        net = TinyNet(num_classes=num_classes, in_channels=in_channels)
        net.conv.weight.requires_grad_(False)
        return net

    monkeypatch.setitem(MODELS._things, "frozen-tiny", frozen_net)
    with pytest.raises(GeneralistError, match=r"conv\.weight"):
        make_trainer(tiny_recipe(model={"name": "frozen-tiny"}), tmp_path)
