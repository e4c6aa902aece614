"""What the tests of distributed training share: runs of tiny recipes on several processes, and their results."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from graph_stand_in import Recording, replace_cuda
from torch import Tensor
from training_helpers import make_trainer, stop_after, tiny_splits

from generalist.core import distributed
from generalist.core.run import RunDirectory
from generalist.recipe import Recipe
from generalist.training import build
from generalist.training import checkpoint as checkpoints
from generalist.training.artefacts import branch_files
from generalist.training.graph import GraphEngine
from generalist.training.loop import Trainer

TOLERANCE = 1e-9


def environment(**more: str) -> dict[str, str]:
    """Of a process of its own: one thread, and the code that this one runs."""
    paths = [str(Path(__file__).parent), *sys.path]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def with_parallel(recipe: Recipe, **options: Any) -> Recipe:
    parallel = recipe.train.parallel.model_copy(update=options)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"parallel": parallel})})


def run_on(world: int, cases: Mapping[str, Recipe], out: Path, *, stop: Sequence[str] = ()) -> None:
    """Train every case below `out` on `world` processes; those in `stop` only to the end of the first epoch.

    A run named `start` below `out` is where their weights come from. The graph engine has a stand-in for CUDA.
    """
    out.mkdir(parents=True, exist_ok=True)
    texts = {name: (case.model_dump_json(), name in stop) for name, case in cases.items()}
    (out / "cases.json").write_text(json.dumps(texts))
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(out)],
            env=environment(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)[-4000:]


def result(path: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The tensors of a run's newest checkpoint, and its metrics without what depends on the clock or on rounding."""
    found = checkpoints.load_newest(RunDirectory(path), warn=print)
    assert found is not None
    records = RunDirectory(path).read_metrics()
    for record in records:
        del record["images_per_second"]
        for metrics in record["train"].values():
            # Signs of cosines: the gradient of a bias in front of BatchNorm is zero, and its sign that of an error.
            metrics.pop("conflict", None)
    return found.tensors, records


def assert_same(path: Path, other: Path, *, tolerance: float = TOLERANCE) -> None:
    (tensors, records), (expected, expected_records) = result(path), result(other)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        allowed = _tolerance(name, tolerance)
        torch.testing.assert_close(tensor, expected[name], rtol=allowed, atol=allowed, msg=name)
    assert len(records) == len(expected_records) > 0
    for record, wanted in zip(records, expected_records, strict=True):
        assert_close_values(record, wanted, tolerance)


def assert_close_values(value: Any, expected: Any, tolerance: float, where: str = "") -> None:
    """Nested plain values: numbers to the tolerance, everything else exactly."""
    if isinstance(expected, dict):
        assert value.keys() == expected.keys(), where
        for key in expected:
            assert_close_values(value[key], expected[key], tolerance, f"{where}.{key}")
    elif isinstance(expected, float):
        assert abs(value - expected) <= _tolerance(where, tolerance) * max(1.0, abs(expected)), (where, value, expected)
    else:
        assert value == expected, (where, value, expected)


def _tolerance(name: str, tolerance: float) -> float:
    """Accuracies that objectives report are means in single precision."""
    reported = "accurac" in name or name.startswith("objective.e-at")
    return max(tolerance, 1e-6) if reported else tolerance


def _main(out: Path) -> None:
    cases = json.loads((out / "cases.json").read_text())
    with distributed.start(timeout=60) as group:
        for name, (text, stop) in cases.items():
            recipe = Recipe.model_validate_json(text)
            path = out / name
            if recipe.train.engine == "graph":
                replace_cuda(setattr)
                build.why_not_graph = lambda *given: None
            if group.first:
                path.mkdir(exist_ok=True)
            if stop:
                stop_after(recipe, path, epoch=1, group=group)
                continue
            trainer: Trainer = make_trainer(recipe, path, splits=tiny_splits(), group=group)
            if recipe.train.engine == "graph":
                assert isinstance(trainer.engine, GraphEngine)
                Recording.engine = trainer.engine
            if not trainer.resume() and (start := out / "start").is_dir():
                trainer.start_from(branch_files(str(start), [learner.name for learner in trainer.learners]))
            trainer.run()
            _check_ranks_agree(trainer)


def _check_ranks_agree(trainer: Trainer) -> None:
    """All ranks end with the same learners, the same global learner and the same best epoch."""
    digests = {name: float(tensor.double().abs().sum()) for name, tensor in trainer.live_tensors().items()}
    for other in trainer.group.gather_objects((digests, trainer.best, trainer.regret.history)):
        assert other == (digests, trainer.best, trainer.regret.history)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
