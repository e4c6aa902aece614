"""A global learner whose memory changes during training: `mixing.decay` as a schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from graph_stand_in import Recording, replace_cuda
from torch.utils._python_dispatch import TorchDispatchMode
from training_helpers import (
    NATURAL,
    ROBUST,
    assert_engines_agree,
    make_trainer,
    spy_on,
    stopped_and_resumed,
    tiny_recipe,
    train,
)

from generalist.core.errors import RecipeError
from generalist.core.schedule import Schedule
from generalist.recipe import Recipe, load_recipe, parse, parse_yaml, stage_recipe, to_yaml
from generalist.report.section_setup import _flat
from generalist.training import build
from generalist.training.artefacts import branch_files
from generalist.training.graph import GraphEngine
from generalist.training.loop import Trainer

STEPS, SPE, EPOCHS = 12, 3, 4  # iterations, those of an epoch, epochs
BENT = {"fractions": [0, 0.5, 1], "values": [0.3, 0.2, 0.4]}
JUMPING = {"epochs": [0, 2, 2, 3], "values": [0.9, 0.7, 0.0, 0.6]}


def recipe(decay: Any, *, train_options: dict[str, Any] | None = None, **mixing: Any) -> Recipe:
    often = {"every": 2, "start_epoch": 2}
    return tiny_recipe(
        mixing={"decay": decay, "gamma": 0.6, "redistribution": often, **mixing}, train=train_options or {}
    )


def bent(k: int) -> float:
    return float(np.interp(k / STEPS, BENT["fractions"], BENT["values"]))


def jumping(k: int) -> float:
    epoch = k / SPE
    return 0.9 - 0.1 * epoch if epoch < 2 else 0.6 * min(epoch - 2, 1)


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize(("decay", "at"), [(BENT, bent), (JUMPING, jumping)], ids=["fractions", "epochs"])
def test_each_iteration_keeps_what_its_time_says(
    tmp_path: Path, decay: Any, at: Callable[[int], float], warmup: bool
) -> None:
    """Restated in numpy: theta_g <- d theta_g + (1 - d) sum_a gamma_a theta_a, d that of the iteration's start."""
    trainer = make_trainer(recipe(decay, warmup=warmup), tmp_path)
    trace = spy_on(trainer)
    trainer.run()
    theta = trace.start
    assert len(trace.mixed) == STEPS
    for k, found in enumerate(trace.mixed):
        d = min(at(k), (k + 1) / (k + 10)) if warmup else at(k)
        theta = d * theta + (1 - d) * (0.6 * trace.after["robust"][k].weights + 0.4 * trace.after["natural"][k].weights)
        np.testing.assert_allclose(found, theta, rtol=0, atol=1e-12, err_msg=f"iteration {k}")


@pytest.mark.parametrize("constant", [{"fractions": [0], "values": [0.7]}, {"epochs": [0, 3], "values": [0.7, 0.7]}])
@pytest.mark.parametrize("style", [{}, {"counters": "truncate", "warmup": False}])
def test_a_constant_schedule_is_the_number_bit_for_bit(
    tmp_path: Path, constant: dict[str, Any], style: dict[str, Any]
) -> None:
    one, other = train(recipe(0.7, **style), tmp_path / "one"), train(recipe(constant, **style), tmp_path / "other")
    for name, tensor in one.live_tensors().items():
        assert torch.equal(tensor, other.live_tensors()[name]), name
    changing = train(recipe(BENT, **style), tmp_path / "changing")
    assert not torch.equal(one.global_learner.vector, changing.global_learner.vector)


def same(one: Trainer, other: Trainer) -> bool:
    return all(torch.equal(tensor, other.live_tensors()[name]) for name, tensor in one.live_tensors().items())


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = train(recipe(BENT), tmp_path / "whole")
    resumed = stopped_and_resumed(recipe(BENT), tmp_path / "parts", epoch=2)
    assert same(whole, resumed)


def test_a_branch_goes_on_with_the_decay_of_its_epoch(tmp_path: Path) -> None:
    source = train(recipe(0.5, train_options={"snapshots": {"every": 2}}), tmp_path / "source")
    source.directory.recipe.write_text(to_yaml(recipe(0.5)))
    branch = make_trainer(recipe(BENT, warmup=False, train_options={"start_epoch": 2}), tmp_path / "branch")
    branch.start_from(branch_files(f"{source.directory.path}@2", ["robust", "natural"]))
    trace = spy_on(branch)
    branch.run()
    after = 0.6 * trace.after["robust"][0].weights + 0.4 * trace.after["natural"][0].weights
    np.testing.assert_allclose(trace.mixed[0], 0.2 * trace.start + 0.8 * after, rtol=0, atol=1e-12)


class _NoReading(TorchDispatchMode):
    """Refuses to read a tensor's value on the host: what is recorded would keep it for good."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_recorded_iterations_find_it_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replayed, an iteration reads the same memory each time: the decay must lie there, and nowhere else."""
    eager = train(recipe(JUMPING, parts=True), tmp_path / "eager")
    replace_cuda(monkeypatch.setattr)
    monkeypatch.setattr(build, "why_not_graph", lambda *given: None)
    graph = make_trainer(recipe(JUMPING, parts=True, train_options={"engine": "graph"}), tmp_path / "graph")
    assert isinstance(graph.engine, GraphEngine)
    monkeypatch.setattr(Recording, "engine", graph.engine, raising=False)
    update, places, values = graph.global_learner.update, set(), []

    def spied(learners: Any, gammas: Any) -> None:
        places.add(graph.global_learner.decay.data_ptr())
        values.append(float(graph.global_learner.decay))
        with _NoReading():
            update(learners, gammas)

    monkeypatch.setattr(graph.global_learner, "update", spied)
    graph.run()
    assert same(eager, graph)
    assert len(places) == 1 and values[-STEPS:] == pytest.approx([jumping(k) for k in range(STEPS)], abs=1e-15)


@pytest.mark.parametrize(
    ("decay", "says"),
    [
        ({"fractions": [0, 1], "values": [0.9, 1]}, r"mixing\.decay: every value is a share .* from 0 to below 1"),
        ({"fractions": [0, 1], "values": [-0.1, 0.9]}, r"mixing\.decay: every value is a share"),
        ({"epochs": [0, 9], "values": [0.9, 0.99]}, r"mixing\.decay: breakpoint 9 lies beyond the end \(4 epochs\)"),
        ({"fractions": [0, 1], "values": [0.9]}, r"mixing\.decay: 2 breakpoints and 1 values"),
        ({"fractions": [0], "values": ["much"]}, r"mixing\.decay\.values\.0: Input should be a valid number"),
        (1, r"mixing\.decay: Input should be less than 1"),
        ("much", r"mixing\.decay: Input should be a valid number \(got 'much'\)"),
    ],
)
def test_what_no_average_can_keep_is_refused(decay: Any, says: str) -> None:
    raw = recipe(0.5).model_dump(mode="json")
    with pytest.raises(RecipeError, match=says):
        parse({**raw, "mixing": {**raw["mixing"], "decay": decay}})


def test_recipes_say_it_as_it_was_given() -> None:
    """A number stays one; a resolved recipe reads back as it is, and a field of the schedule can be set."""
    for decay in (0.5, BENT):
        given = load_recipe("digits-t", overrides=[f"mixing.decay={decay}"])
        again = load_recipe(parse_yaml(to_yaml(given), "resolved"))
        assert again == given and isinstance(again.mixing.decay, float if decay == 0.5 else Schedule)
    changed = load_recipe(given, overrides=["mixing.decay.values.2=0.99"])
    assert changed.mixing.decay_at(50, 50) == 0.99 and changed.mixing.decay_at(25, 50) == 0.2
    fields = [_flat(each.model_dump(mode="json")) for each in (given, changed)]
    assert {key for key in fields[0] if fields[0][key] != fields[1][key]} == {"mixing.decay.values"}


def test_a_stage_may_have_one_of_its_own() -> None:
    stages = [{"name": "one", "change": {"mixing": {"decay": BENT}}}, {"name": "two"}]
    found = tiny_recipe([ROBUST, NATURAL], stages=stages)
    own = [stage_recipe(found, stage, trust_code=False).mixing.decay for stage in found.stages]
    assert own == [Schedule.model_validate(BENT), 0.999]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_graph_equals_eager_in_float64(tmp_path: Path, compiled: str) -> None:
    overrides = ['mixing.decay={"fractions": [0, 1], "values": [0, 0.99]}', f"train.compile={compiled}"]
    assert_engines_agree("digits-d", tmp_path, overrides=[*overrides, "mixing.redistribution.every=1"], learner=0)
