"""What a recorded iteration asks of an objective: nothing waits for the device, and both engines agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from objectives_toy import make_toy
from torch.utils._python_dispatch import TorchDispatchMode

from generalist.api import train
from generalist.core.run import RunDirectory
from generalist.data.options import load_splits
from generalist.recipe import load_recipe
from generalist.training.graph import GraphEngine
from generalist.training.loop import Trainer

AROUND = [{"kind": "awp", "around": kind} for kind in ("trades", "mart", "fat", "agr")]
OBJECTIVES: list[Any] = [
    *("at", "at-half", "trades", "mart", "fat", "iat", "rst", "score", "fast-at", "awp", "agr", "ar-at", "at-distil"),
    {"kind": "score", "form": "at"},
    {"kind": "at-distil", "match": "logits", "attack_from": "teacher"},
    *AROUND,
]
DIGITS = [
    *("nt", "at", "at-half", "trades-1", "trades-6", "mart", "fat", "iat", "rst", "score", "score-at", "fast-at"),
    *("awp", "agr", "at-linf-l2", "at-max", "msd", "e-at", "part", "ramp"),
]

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
"""Operations whose result the host, or a shape, needs."""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
"""Operations that count a mask's entries."""


class NothingWaits(TorchDispatchMode):
    """Fails where an operation would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if func in INDEXING else []
        assert func not in WAITING and not masks, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_what_waits() -> None:
    with pytest.raises(AssertionError, match="waits"), NothingWaits():
        float(torch.ones(()))
    with pytest.raises(AssertionError, match="waits"), NothingWaits():
        torch.ones(3)[torch.tensor([True, False, True])]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_nothing_waits_for_the_device(tmp_path: Path, objective: Any) -> None:
    toy = make_toy(objective, tmp_path, scalars={"tau": 0.0, "steered": 1.0})
    assert toy.objective.capturable
    with NothingWaits():
        gradients, metrics = toy.gradients()
    assert len(gradients) == len(list(toy.model.parameters())) and "loss" in metrics


def iterations(path: Path, name: str, engine: str, steps: int, *more: str) -> torch.Tensor:
    """The learner's weights after `steps` iterations."""
    changes = [f"train.engine={engine}", "train.precision=fp64", "train.epochs=2", "validation.images=50", *more]
    job = load_recipe(f"baseline-digits-{name}", overrides=["model.width=4", *changes])
    path.mkdir()
    trainer = Trainer(job, RunDirectory(path), load_splits(job.data), device=torch.device("cuda"))
    assert isinstance(trainer.engine, GraphEngine) == (engine == "graph")
    options = job.data.augmentation
    for epoch in (1, 2):
        trainer.learners[0].objective.epoch_start(epoch)
        items = trainer.engine.feed(trainer.train_images, trainer._batches(epoch), epoch=epoch, seed=0, options=options)
        for item in items:
            position = trainer.step / trainer.steps_per_epoch
            trainer.engine.set_progress(step=trainer.step, epoch=epoch, position=position)
            trainer.engine.iteration(item)
            trainer.step += 1
            if trainer.step == steps:
                break
    return trainer.learners[0].flat.vector.clone()


@pytest.mark.gpu
@pytest.mark.parametrize("name", DIGITS)
def test_graph_equals_eager_in_float64(tmp_path: Path, name: str) -> None:
    """30 iterations of two epochs of 17: fat's tau, agr's steering and part's masks change among them."""
    eager, graph = (iterations(tmp_path / engine, name, engine, 30) for engine in ("eager", "graph"))
    assert float((eager - graph).abs().max()) < 1e-9 and float(eager.abs().max()) > 0.1


@pytest.mark.gpu
def test_graph_equals_eager_with_helper_images(tmp_path: Path) -> None:
    teacher = train("digits-nt", overrides=["model.width=4", "train.epochs=2"], out=tmp_path / "teacher", device="cpu")
    objective = f"learners.0.objective={{kind: hat, teacher: {teacher.path}}}"
    eager, graph = (iterations(tmp_path / engine, "at", engine, 30, objective) for engine in ("eager", "graph"))
    assert float((eager - graph).abs().max()) < 1e-9 and float(eager.abs().max()) > 0.1
