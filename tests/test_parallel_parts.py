"""The parts of distributed training, each in one process."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cli_helpers import run_main
from distributed_helpers import free_port
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from training_helpers import L2, NATURAL, ROBUST, make_trainer, tiny_recipe, train

from generalist.core import distributed, ranks
from generalist.core.distributed import _have_own_gpus
from generalist.core.errors import GeneralistError, RecipeError, RunError
from generalist.core.run import RunDirectory
from generalist.recipe import Recipe, to_yaml
from generalist.stages import check_ranks, run_directory, shared_directory
from generalist.tensors.state import restore
from generalist.tensors.sync_batchnorm import Synchroniser, synchronise
from generalist.training.build import build_engine, build_learners
from generalist.training.global_share import GlobalShare
from generalist.training.graph import why_not_graph
from generalist.training.learner import Learner
from generalist.training.parallel import Parallel
from generalist.training.signals import stop_requests

# -- the global learner in shares -------------------------------------------------------------------------------------


@pytest.mark.parametrize("counters", ["copy", "truncate"])
@pytest.mark.parametrize("decay", [0.9, {"fractions": [0, 0.5, 0.5], "values": [0.9, 0.2, 0]}])
def test_shares_add_up_to_the_direct_form(counters: str, decay: Any, tmp_path: Path) -> None:
    recipe = tiny_recipe(
        [ROBUST, NATURAL, L2],
        mixing={"counters": counters, "decay": decay, "gamma": {"fractions": [0, 1], "values": [0.6, 0.1]}},
    )
    trainer = make_trainer(recipe, tmp_path)
    direct, learners = trainer.global_learner, trainer.learners
    boxes: list[Tensor] = []

    def group(row: int, own: list[int]) -> Any:
        return SimpleNamespace(row=row, own=own, sum_over_groups=boxes.append, send=lambda learner, tensors: None)

    shares = [
        GlobalShare(learners, recipe.mixing, group(0, [0, 1])),
        GlobalShare(learners, recipe.mixing, group(1, [2])),
    ]
    for step in range(1, 9):
        gammas = torch.tensor(recipe.gammas_at(step / 4), dtype=torch.float64)
        for a, learner in enumerate(learners):
            learner.flat.vector.mul_(1 + 0.01 * (a + 1)).add_(0.001 * step)
            learner.flat.counters.add_(a + 1)
        direct.decay.fill_(recipe.mixing.decay_at(step / 4, 4))
        direct.update(learners, gammas)
        for share in shares:
            share.decay.copy_(direct.decay)
            if counters == "truncate":  # what the others would send
                owned = set(share.parallel.own)
                rest = [gammas[a] * learners[a].flat.counters for a in range(3) if a not in owned]
                share.parallel.sum_over_groups = lambda mixed, rest=rest: mixed.add_(sum(rest))
            share.update(learners, gammas)
    whole = shares[0].share + shares[1].share
    torch.testing.assert_close(whole, direct.vector, rtol=1e-12, atol=1e-12)
    assert torch.equal(shares[0].counters, direct.counters)
    assert float(shares[1].count) == float(direct.count) == 8
    if counters == "truncate":
        assert torch.equal(shares[1].counters, direct.counters)


def test_constants_stay_exact_in_shares(tmp_path: Path) -> None:
    """In single precision 0.9 of a constant and 0.1 of it do not always make the constant."""
    trainer = make_trainer(tiny_recipe(train={"epochs": 4, "batch_size": 6, "precision": "fp32"}), tmp_path)
    learners, options = trainer.learners, trainer.job.mixing
    parts = [
        GlobalShare(learners, options, SimpleNamespace(row=row, own=[row]))
        for row in range(2)  # type: ignore[arg-type]
    ]
    for part in parts:
        part.lead = -1  # counts are not looked at here
        for _ in range(300):
            part.update(learners, torch.tensor([0.7, 0.3], dtype=torch.float64))
    assert torch.equal((parts[0].share + parts[1].share).float(), learners[0].flat.vector)


def test_shares_are_added_up_in_double_precision(tmp_path: Path) -> None:
    recipe = tiny_recipe(train={"precision": "fp32"}, mixing={"decay": 0.999, "warmup": False})
    trainer = make_trainer(recipe, tmp_path)
    part = GlobalShare(trainer.learners, recipe.mixing, SimpleNamespace(row=0, own=[0]))  # type: ignore[arg-type]
    part.lead, before = -1, part.share.clone()  # counts are not looked at here
    part.decay.fill_(0.999)
    part.update(trainer.learners, torch.tensor([0.84, 0.16], dtype=torch.float64))
    expected = 0.999 * before + (1 - 0.999) * 0.84 * trainer.learners[0].flat.vector.double()
    torch.testing.assert_close(part.share, expected, rtol=1e-14, atol=1e-16)


def test_a_checkpoint_does_not_round_the_shares(tmp_path: Path) -> None:
    """A run in single precision that goes on from a checkpoint ends where an undisturbed one does, bit for bit."""
    recipe = tiny_recipe(
        train={"epochs": 4, "batch_size": 6, "precision": "fp32"}, mixing={"decay": 0.999, "warmup": False}
    )
    trainer = make_trainer(recipe, tmp_path)

    def two() -> list[GlobalShare]:
        alone = {"sum_over_groups": lambda tensor: None, "send": lambda learner, tensors: None}
        places: list[Any] = [SimpleNamespace(row=row, own=[row], **alone) for row in range(2)]
        return [GlobalShare(trainer.learners, recipe.mixing, place) for place in places]

    def gather(parts: list[GlobalShare]) -> Tensor:
        total = parts[0].share + parts[1].share
        for part in parts:
            part.parallel.sum_over_groups = lambda tensor: tensor.copy_(total)  # type: ignore[method-assign]
            part.gather()
        return parts[0].vector

    undisturbed, gammas = two(), torch.tensor([0.7, 0.3], dtype=torch.float64)
    parts = undisturbed
    for step in range(40):
        for a, learner in enumerate(trainer.learners):
            learner.flat.vector.add_(torch.sin(torch.arange(len(learner.flat.vector)) * (step + a + 1.0)))
        for part in {*undisturbed, *parts}:
            part.update(trainer.learners, gammas)
        if step == 20:
            gather(undisturbed)
            parts = two()
            for part, before in zip(parts, undisturbed, strict=True):
                restore(part.state(), {name: tensor.clone() for name, tensor in before.state().items()})
                part.restored()
            assert torch.equal(parts[1].vector, undisturbed[1].vector)
    assert torch.equal(gather(parts), gather(undisturbed))


# -- BatchNorm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm2d(3), (5, 3, 4, 4)),
        (nn.BatchNorm2d(3, momentum=None), (5, 3, 2, 2)),
        (nn.BatchNorm2d(3, affine=False), (5, 3, 2, 2)),
        (nn.BatchNorm1d(3, track_running_stats=False), (5, 3)),
    ],
)
def test_on_one_rank_it_is_plain_batchnorm(layer: nn.Module, shape: tuple[int, ...]) -> None:
    plain = layer.double()
    own = nn.Sequential(copy.deepcopy(plain))
    ranks = Synchroniser(lambda tensor: None)
    synchronise(own, ranks)
    other = copy.deepcopy(own)  # what a copy of a network does, too
    x = torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).requires_grad_()
    weight = torch.linspace(0, 1, x.numel(), dtype=torch.float64).reshape(shape)
    for _ in range(2):
        expected = plain(x)
        with ranks.over(0.3):
            found = other(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, expected)]
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)
    for (name, buffer), wanted in zip(other[0].named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, rtol=1e-12, atol=1e-12, msg=name)
    torch.testing.assert_close(other.eval()(x), plain.eval()(x))


def test_only_within_a_step_do_ranks_speak(tmp_path: Path) -> None:
    """Statistics that are taken of the same images on every rank are no parts of a batch."""
    calls: list[int] = []
    model = nn.Sequential(nn.BatchNorm2d(2))
    synchronise(model, Synchroniser(lambda tensor: calls.append(tensor.numel())))
    model.train()(torch.zeros(2, 2, 3, 3))
    assert calls == []
    with model[0].ranks.over(0.5):
        model(torch.ones(2, 2, 3, 3, dtype=torch.bfloat16))
        assert model(torch.ones(2, 2, 3, 3, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert calls == [5, 5]  # two sums, two sums of squares and a count


def test_without_running_statistics_evaluation_mode_is_of_the_batch_too() -> None:
    calls: list[int] = []
    model = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)).eval()
    synchronise(model, ranks := Synchroniser(lambda tensor: calls.append(tensor.numel())))
    with ranks.over(0.5):
        model(torch.ones(2, 2, 3, 3))
    assert calls == [5]


def test_an_attack_sums_over_ranks_whether_or_not_the_layer_has_weights() -> None:
    """What ranks send backwards is weighted by their shares in training, and is not under attack."""
    x = torch.linspace(-1, 2, 40).reshape(5, 2, 2, 2).requires_grad_()
    for trains in (True, False):
        sent: list[list[Tensor]] = []
        for affine in (True, False):
            model = nn.Sequential(nn.BatchNorm2d(2, affine=affine), nn.Conv2d(2, 1, 2, bias=False))
            nn.init.ones_(model[1].weight)
            calls: list[Tensor] = []
            synchronise(model, ranks := Synchroniser(lambda tensor, calls=calls: calls.append(tensor.clone())))
            model = copy.deepcopy(model).requires_grad_(trains)
            with ranks.over(0.3):
                torch.autograd.grad(model(x).square().sum(), x)
            sent.append(calls)
        torch.testing.assert_close(sent[0], sent[1])


class WithActivation(nn.BatchNorm2d):
    """As some libraries have it: the activation is a part of the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_a_batchnorm_that_does_more_is_refused() -> None:
    with pytest.raises(GeneralistError, match="WithActivation is a BatchNorm with a forward pass of its own"):
        synchronise(nn.Sequential(WithActivation(2)), Synchroniser(lambda tensor: None))


# -- refusals ---------------------------------------------------------------------------------------------------------


def divided(recipe: Recipe, ranks: int = 2) -> Parallel:
    """A place among `ranks` that share batches, in a process on its own."""
    parallel = Parallel([1.0] * len(recipe.learners))
    parallel.ranks = ranks
    return parallel


def built(recipe: Recipe, parallel: Parallel, path: Path) -> list[Learner]:
    trainer = make_trainer(recipe, path)
    return build_learners(
        recipe,
        trainer.train_images,
        trainer.train_index,
        device=torch.device("cpu"),
        artefact=lambda text: {},
        validation=(trainer.train_images, trainer.train_index),
        trust_code=False,
        parallel=parallel,
    )


@pytest.mark.parametrize(
    "objective", ["iat", {"kind": "ramp"}, {"kind": "awp", "around": "iat"}], ids=["iat", "ramp", "awp"]
)
def test_objectives_that_need_whole_batches_are_refused(objective: Any, tmp_path: Path) -> None:
    recipe = tiny_recipe([{**ROBUST, "objective": objective}])
    with pytest.raises(RecipeError, match=r"learners.0.objective: '(iat|ramp|awp)' needs whole batches, which 2 ranks"):
        built(recipe, divided(recipe), tmp_path)


def test_a_batch_smaller_than_its_ranks_is_refused() -> None:
    parallel = divided(tiny_recipe(), ranks=4)
    parallel.check_batches([torch.arange(7), torch.arange(4)])
    with pytest.raises(RecipeError, match="a batch of 3 cannot be divided between 4 ranks"):
        parallel.check_batches([torch.arange(7), torch.arange(3)])


def test_parts_cover_a_batch_and_shares_add_up() -> None:
    batch, parts, shares = torch.arange(7), [], []
    for column in range(3):
        parallel = divided(tiny_recipe(), ranks=3)
        parallel.column = column
        parallel.begin(batch)
        parts.append(parallel.part_of(batch))
        shares.append(parallel.share)
    assert sorted(torch.cat(parts).tolist()) == batch.tolist()
    assert [len(part) for part in parts] == [3, 2, 2] and sum(shares) == pytest.approx(1)


def test_the_graph_engine_says_why_it_does_not_run(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_recipe(), tmp_path)
    parallel = divided(trainer.job)
    where = (trainer.job, trainer.train_images, torch.device("cuda"), trainer.learners)
    parallel.sync = Synchroniser(lambda tensor: None)
    assert why_not_graph(*where, parallel) is None
    parallel.group.direct = False
    assert "ranks share a GPU" in str(why_not_graph(*where, parallel))
    parallel.ranks, parallel.groups = 1, 2  # learners apart send nothing in an iteration
    assert why_not_graph(*where, parallel) is None


def test_no_graph_where_one_group_alone_would_record(tmp_path: Path) -> None:
    """To record another variant runs iterations more, and in each of them the groups add their counters up."""
    norms = {"kind": "e-at", "beside": [{"norm": "l2", "eps": 0.2}]}
    trainer = make_trainer(
        tiny_recipe([{**ROBUST, "objective": norms}, NATURAL], mixing={"counters": "truncate"}), tmp_path
    )
    parallel = divided(trainer.job, ranks=1)
    where = (trainer.job, trainer.train_images, torch.device("cuda"), trainer.learners)
    assert why_not_graph(*where, parallel) is None
    parallel.groups = 2
    assert "groups of learners add counters up" in str(why_not_graph(*where, parallel))


def test_the_groups_of_one_mesh_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage has a trainer of its own, and each group threads and sockets of its own."""
    made: list[list[list[int]]] = []

    def make(ranks: list[list[int]], **options: Any) -> tuple[str, list[str]]:
        made.append(ranks)
        return f"group {len(made)}", []

    def mesh(groups: list[str], device: str, grid: Tensor, *, mesh_dim_names: tuple[str, str]) -> dict[str, Any]:
        return dict(zip(mesh_dim_names, groups, strict=True)) | {"grid": grid.tolist(), "device": device}

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", make)
    monkeypatch.setattr(DeviceMesh, "from_group", mesh)
    group = distributed.Group(world=4)
    first, second = (Parallel([1.0, 1.0], group=group) for _ in range(2))
    assert made == [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    assert second.mesh is first.mesh
    assert first.mesh == {"learners": "group 1", "data": "group 2", "grid": [[0, 1], [2, 3]], "device": "cpu"}


def test_synchronised_networks_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tiny_recipe(), tmp_path)
    job = tiny_recipe(train={"compile": True})
    parallel, said = divided(job), []
    parallel.sync = Synchroniser(lambda tensor: None)
    where = (job, trainer.train_images, trainer.learners, trainer.global_learner)
    compiled: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compiled.append(module))
    before = [learner.view.moves for learner in trainer.learners]
    build_engine(*where, device=torch.device("cpu"), iterations=9999, say=said.append, parallel=parallel)
    assert not compiled and all(learner.view.moves not in before for learner in trainer.learners)
    assert said == ["networks are not compiled for training: BatchNorm is synchronised (train.parallel.sync_batchnorm)"]
    build_engine(*where, device=torch.device("cpu"), iterations=9999, say=said.append)
    assert compiled == [learner.model for learner in trainer.learners]


# -- the environment and the run directory ----------------------------------------------------------------------------


def test_without_a_launcher_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with distributed.start() as group:
        group.barrier()
        assert (group.rank, group.world, group.first) == (0, 1, True)
        assert group.gather_objects("x") == ["x"] and group.from_first(3) == 3 and group.agree([1, 2]) == [1, 2]
    assert ranks.tells() and ranks.label() == ""


@pytest.mark.parametrize("rank", ["three", "-1", "2"])
def test_a_hostile_environment_is_one_clear_line(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GeneralistError, match="start with torchrun"), distributed.start():
        pytest.fail("it must not start")


def test_a_hostile_environment_ends_the_command_line_clearly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "[red]")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, told = run_main(["train", "digits-d"], monkeypatch, capsys)
    assert code == 2 and told.count("\n") == 1 and "RANK is '[red]', not a number" in told


def test_a_mistake_of_another_node_alone_is_told_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, local, told in (("2", "0", 1), ("3", "1", 0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        code, _, error = run_main(["train", str(tmp_path / "missing.yaml")], monkeypatch, capsys)
        assert (code, error.count("\n")) == (2, told)
        assert not ranks.tells()  # results are rank 0's to show


def test_too_few_gpus_are_noticed_by_the_rank_that_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(GeneralistError, match="rank 1 has no GPU of its own: 1 are here"),
        distributed.start(torch.device("cuda"), timeout=0.1),
    ):
        pytest.fail("it must not start")


def test_a_rank_that_never_comes_is_not_waited_for_as_long_as_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation allows its ranks days for their parts, which one that failed before the start would cost, too."""
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "MEETING", 1.0, raising=False)
    begun = time.monotonic()
    with pytest.raises(GeneralistError, match="could not join"), distributed.start(timeout=30):
        pytest.fail("it must not start")
    assert time.monotonic() - begun < 20


def test_a_job_that_has_failed_takes_no_further_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that catches the error and trains again would wait for ranks that still wait for it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks.telling, "teller", True)
    with pytest.raises(GeneralistError, match="start the job again"), distributed.start():
        pass


def test_a_group_of_the_callers_must_reach_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(GeneralistError, match="cpu:gloo,cuda:nccl"), distributed.start():
        pytest.fail("it must not start")


@pytest.mark.parametrize(
    ("devices", "direct"), [(["cuda:0", "cuda:1"], True), (["cuda:0", "cuda:0"], False), (["cpu", "cpu"], False)]
)
def test_gpus_send_directly_where_each_rank_has_one(
    devices: list[str], direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda rank: _have_own_gpus(store, rank, 2, torch.device(devices[rank])), range(2))
        assert list(found) == [direct, direct]


def test_a_resumed_run_may_share_the_work_differently(tmp_path: Path) -> None:
    recipe = tiny_recipe()
    run = RunDirectory(tmp_path / "run")
    train(recipe, run.path)
    run.recipe.write_text(to_yaml(recipe))
    changed = tiny_recipe(train={"parallel": {"layout": "data", "timeout": 5}})
    assert run_directory(changed, run.path, resume=True) == run
    with pytest.raises(RecipeError, match=r"train\.\w+: differs"):
        run_directory(tiny_recipe(train={"seed": 4}), run.path, resume=True)


def test_a_resumed_run_may_have_begun_before_an_option_was_there(tmp_path: Path) -> None:
    """As after an upgrade: what its recipe does not say has its default value, now as then."""
    recipe, run = tiny_recipe(), RunDirectory(tmp_path / "run")
    run.path.mkdir()
    assert recipe.train.deterministic is False
    run.recipe.write_text(re.sub(r"(?m)^  deterministic: .*\n", "", to_yaml(recipe)))
    assert run_directory(recipe, run.path, resume=True) == run
    with pytest.raises(RecipeError, match=r"train\.\w+: differs"):
        run_directory(tiny_recipe(train={"deterministic": True}), run.path, resume=True)
    run.recipe.write_text(to_yaml(recipe) + "no_option_of_ours: 3\n")
    with pytest.raises(RecipeError, match="no_option_of_ours: differs"):
        run_directory(recipe, run.path, resume=True)


class Beside(distributed.Group):
    """A group of two whose rank 0 has what the test says."""

    def __init__(self, first: dict[str, Any]) -> None:
        super().__init__(rank=1, world=2)
        self.theirs = first

    def gather_objects(self, value: Any) -> list[Any]:
        return [{**value, **self.theirs}, value]


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ({"the version of generalist": "0.0.1"}, "the version of generalist"),
        ({"the version of PyTorch": "2.0"}, "the version of PyTorch"),
        ({"--from": "runs/a"}, "--from"),
        ({"the recipe's train": {"seed": 7}}, "the recipe's train"),
        ({"the recipe's no_option_of_ours": 3}, "the recipe's no_option_of_ours"),
    ],
)
def test_ranks_that_were_given_different_things_are_refused(first: dict[str, Any], words: str) -> None:
    check_ranks(tiny_recipe(), None, Beside({}))
    with pytest.raises(GeneralistError, match=f"^rank 1 differs from rank 0 in {words}: give all ranks the same"):
        check_ranks(tiny_recipe(), None, Beside(first))


def test_a_job_that_is_started_anew_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run, alone = tiny_recipe(), RunDirectory(tmp_path / "run"), distributed.Group()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(RunError, match="name the run with --out"):
        shared_directory(recipe, None, resume=False, group=alone)
    assert shared_directory(recipe, run.path, resume=False, group=alone) == (run, False)  # it has not begun
    run.path.mkdir()
    run.recipe.write_text(to_yaml(recipe))
    # The first start goes on as well: if it refused to, torchrun would start it anew, and that start would not.
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert shared_directory(recipe, run.path, resume=False, group=alone) == (run, True)
    with pytest.raises(RecipeError, match=r"train\.\w+: differs"):
        shared_directory(tiny_recipe(train={"seed": 4}), run.path, resume=False, group=alone)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with pytest.raises(RunError, match="exists already"):
        shared_directory(recipe, run.path, resume=False, group=alone)


def test_a_job_of_several_ignores_a_second_signal() -> None:
    with stop_requests(patient=True) as request:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert request.received == signal.SIGTERM


def test_a_process_on_its_own_stops_at_once_at_the_second() -> None:
    with stop_requests() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            request.handle(signal.SIGTERM, None)


def test_the_gpu_that_is_asked_for_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are recorded on the current GPU, wherever the tensors are: on another one they would record nothing."""
    entered: list[torch.device] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(which)
        yield
        entered.remove(which)

    monkeypatch.setattr(torch.cuda, "device", device)
    second = torch.device("cuda:1")
    with distributed.start(second) as group:
        assert entered == [second] and group.device == second
    with distributed.start(torch.device("cpu")):
        assert entered == []
