"""Start and end of a job of several processes, one per rank, as launched by torchrun.

`with start(device) as group:` joins the processes that torchrun's environment describes (NCCL between GPUs, gloo
between CPUs) and gives each its rank and device; a single process gets a group of one, in which nothing is sent. If a
rank fails, the others fail with it, and one of them says why.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from generalist.core.errors import GeneralistError, InterruptedRunError, LostRankError
from generalist.core.ranks import failed, launched, telling, variable

GRACE = 3.0
"""Seconds that ranks which have lost another one wait for it to say why, or for each other to report that they live."""

MEETING = 600.0
"""Longest time in seconds for all ranks to join. Later calls may wait much longer, for a rank that is working."""

LETTING_GO = 0.1
"""Seconds for gloo's threads to release the last messages. They need the interpreter for that: if one still waits for
it when the interpreter shuts down (a group can outlive its use), the process aborts."""

_CAUSE = "cause"


@dataclass
class Group:
    """The processes of a job. Every rank must make the same calls in the same order."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: float = 600.0
    """Seconds that a call waits for the other ranks."""
    direct: bool = True
    """Whether GPUs send to each other without their hosts: such messages can be part of a CUDA graph."""
    store: Store | None = field(default=None, repr=False)
    parts: dict[Any, Any] = field(default_factory=dict, repr=False)
    """A cache of smaller groups of these processes: each keeps threads, sockets and GPU memory until the end, so none
    is made twice."""

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and talks to the user."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.agree([0])

    def agree(self, values: list[int]) -> list[int]:
        """The largest of each value over all ranks."""
        if self.world == 1:
            return values
        agreed = torch.tensor(values, dtype=torch.int64)  # on the host, so that no GPU is waited for
        with answering():
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
        found: list[int] = agreed.tolist()
        return found

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world > 1:
            with answering():
                dist.all_reduce(values)
        return values

    def gather_objects(self, value: Any) -> list[Any]:
        """The value of each rank, on every rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        with answering():
            dist.all_gather_object(found, value)
        return found

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks whose facts differ from those of rank 0: together they would compute nonsense."""
        first, *others = self.gather_objects(dict(facts))
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                if other.get(name) != first.get(name):
                    raise GeneralistError(
                        f"rank {rank} differs from rank 0 in {name}: give all ranks the same command, the same files "
                        "and the same versions"
                    )

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        carried = [value]
        with answering():
            dist.broadcast_object_list(carried, src=0)
        return carried[0]


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one for a while: only there are graphs recorded and our kernels launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def start(device: torch.device | None = None, *, timeout: float = 600.0) -> Iterator[Group]:
    """Join the job that this process belongs to, and leave it at the end; a single process gets a group of one.

    `cuda` without a number becomes the GPU of this rank. `timeout` is how many seconds a rank waits for the others.
    """
    device = device or torch.device("cpu")
    rank, world = launched()
    if world == 1:
        with current(device):
            yield Group(device=device)
        return
    if failed():  # the other ranks are out of step, and may still be waiting for this one
        raise GeneralistError(
            "an earlier call in this process has lost contact with the other ranks: end it and start the job again"
        )
    if dist.is_initialized():  # by the caller, who will also end it
        if "cpu:" not in dist.get_backend_config():
            raise GeneralistError(
                "the existing process group cannot carry messages between hosts: initialise it with the backend "
                "cpu:gloo,cuda:nccl, or leave it to generalist"
            )
        direct = "cuda:nccl" in dist.get_backend_config()
        yield Group(dist.get_rank(), dist.get_world_size(), _place(device), timeout, direct)
        return
    group = _join(rank, world, _place(device), timeout)
    try:
        yield group
        group.barrier()  # no rank leaves while another still needs it
        time.sleep(LETTING_GO)
    except BaseException as error:
        _decide_who_tells(group, error)
        raise
    dist.destroy_process_group()


def _place(device: torch.device) -> torch.device:
    """The GPU of this rank, if `device` is a GPU without a number."""
    if str(device) != "cuda":
        return device
    local, there = variable("LOCAL_RANK", 0), torch.cuda.device_count()
    here = max(local + 1, variable("LOCAL_WORLD_SIZE", 1))  # so that all ranks of a node fail, as only the first tells
    if here > there:
        raise GeneralistError(
            f"local rank {here - 1} has no GPU of its own: {there} are here; start with --nproc-per-node {there}, "
            "or --device cpu"
        )
    return torch.device("cuda", local)


def _join(rank: int, world: int, device: torch.device, timeout: float) -> Group:
    if rank >= world:
        raise GeneralistError(f"rank {rank} of {world} processes cannot exist: ranks count from 0; start with torchrun")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    wait = timedelta(seconds=timeout)
    meeting = min(timeout, MEETING)
    try:
        whole, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=meeting)))
        store = PrefixStore(_meet(PrefixStore("generalist", whole), rank, world, meeting), whole)
        whole.set_timeout(wait)
        direct = _have_own_gpus(store, rank, world, device)
        # Small messages that control the job are sent between hosts, so that no GPU is waited for.
        backend = "cpu:gloo,cuda:nccl" if direct else "gloo"
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=world, timeout=wait)
    except (RuntimeError, ValueError) as error:
        raise GeneralistError(
            f"rank {rank} could not join the other {world - 1} processes: {_first_line(error)}; start with torchrun"
        ) from error
    telling.joined = True
    return Group(rank, world, device, timeout, direct, store)


def _have_own_gpus(store: Store, rank: int, world: int, device: torch.device) -> bool:
    """Whether every rank has a GPU to itself, which NCCL requires; `--device cuda:0` puts all ranks on one."""
    own = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"gpu/{rank}", own)
    gpus = {store.get(f"gpu/{other}").decode() for other in range(world)}
    return "" not in gpus and len(gpus) == world


def _meet(store: Store, rank: int, world: int, timeout: float) -> str:
    """A name for this start of the job: the same on all ranks, and not used by any earlier start.

    torchrun's store outlives the processes that it restarts, so they may find entries of dead ones in it, and the count
    of restarts differs between nodes. So each rank asks under a new random name, and rank 0 answers.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"ask/{rank}", own)
        name = store.get(f"answer/{own}").decode()
        store.set(f"{name}/joined/{rank}", "")
        return name
    waiting, answered = set(range(1, world)), set[str]()
    end = time.monotonic() + timeout
    while waiting:
        if time.monotonic() > end:
            raise RuntimeError(f"rank {', '.join(map(str, sorted(waiting)))} did not arrive within {timeout:g} s")
        for other in [other for other in waiting if store.check([f"ask/{other}"])]:
            asked = store.get(f"ask/{other}").decode()
            if asked not in answered:
                store.set(f"answer/{asked}", own)
                answered.add(asked)
        waiting = {other for other in waiting if not store.check([f"{own}/joined/{other}"])}
        time.sleep(0.01)
    return own


@contextmanager
def answering() -> Iterator[None]:
    """Wraps a call that needs other ranks: a rank that does not answer becomes a `LostRankError`."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    """The first line of the message, without the source location that PyTorch puts in front."""
    line = str(error).strip().partition("\n")[0][:300]
    return line.partition("] ")[2] or line if line.startswith("[") else line


def _decide_who_tells(group: Group, error: BaseException) -> None:
    """Choose the process that tells the user: the first rank with an error of its own, or if there is none, one of
    those that have lost another rank."""
    assert group.store is not None, "only a group that `start` has made is ended by it"
    try:
        lost = _missing(group, "here", unless=_CAUSE) if isinstance(error, LostRankError) else []
        telling.teller = group.store.compare_set(_CAUSE, "", str(group.rank)) == str(group.rank).encode()
        if group.first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            _missing(group, "left")  # this process holds the store: wait until the others have read it
        else:
            group.store.set(f"left/{group.rank}", "")
    except RuntimeError:  # the process that held the store is gone, so no other rank can be asked
        telling.teller, lost = True, []
    if isinstance(error, LostRankError):
        names = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
        error.args = (
            f"{names} has died, or has not answered for {group.timeout:g} s ({error}). Go on with --resume, "
            "with a longer timeout if it was only slow",
        )
    if not isinstance(error, InterruptedRunError):  # which is not one rank's failure: all have agreed to stop
        telling.label = f"rank {group.rank}: "


def _missing(group: Group, sign: str, *, unless: str | None = None) -> list[int]:
    """Give a sign, wait for those of the other ranks, and return the ranks that gave none. Empty if any rank sets
    `unless`."""
    store = group.store
    assert store is not None
    store.set(f"{sign}/{group.rank}", "")
    end = time.monotonic() + GRACE
    missing = list(range(group.world))
    while missing and time.monotonic() < end:
        if unless is not None and store.check([unless]):
            return []
        missing = [rank for rank in missing if not store.check([f"{sign}/{rank}"])]
        time.sleep(0.05)
    return missing
