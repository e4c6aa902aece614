"""The options of training on several processes: which rank does what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from generalist.core.errors import RecipeError
from generalist.core.options import Number, Options


class ParallelOptions(Options):
    """How the processes of a torchrun job share the work; a single process ignores it. A run may be resumed with other
    values and on another number of processes."""

    layout: Literal["auto", "data", "learners", "both"] = "auto"
    """`data`: each rank takes a part of every batch, and gradients are summed. `learners`: each rank trains learners of
    its own on whole batches; no weights are sent within an epoch. `both`: each group of ranks trains learners of its
    own and divides the batches among its ranks. `auto`: the fastest of these, judged by the number of passes that each
    learner makes; among equals, the one that sends least."""

    mesh: list[int] | None = Field(default=None, min_length=2, max_length=2)
    """The layout in numbers, as [groups of learners, ranks a group]; their product is the number of processes."""

    sync_batchnorm: bool = True
    """Where batches are divided, let BatchNorm normalise by the statistics of the whole batch, so that results do not
    depend on the number of ranks; this costs a short message per layer and pass. False: each rank uses the statistics
    of its own part, and the running statistics are averaged over ranks."""

    timeout: Number = Field(default=600.0, ge=1, le=1_000_000)
    """Seconds that a rank waits for the others before the job fails. Must be longer than any rank needs for a
    validation and a checkpoint."""


def mesh_shape(options: ParallelOptions, costs: Sequence[float], world: int) -> tuple[int, int]:
    """(groups of learners, ranks per group) for learners of these `costs`."""
    count = len(costs)
    if world == 1:
        return 1, 1
    if options.mesh is not None:
        return _checked_mesh(options.mesh, count, world)
    fitting = [groups for groups in range(1, min(count, world) + 1) if world % groups == 0]
    if options.layout == "data":
        return 1, world
    if options.layout == "learners":
        if world > count:
            raise RecipeError(
                "train.parallel.layout", f"{count} learners cannot occupy {world} ranks; use both, data or auto"
            )
        return world, 1
    if options.layout == "both":
        several = [groups for groups in fitting if 1 < groups < world]
        if not several:
            raise RecipeError(
                "train.parallel.layout",
                f"{world} ranks do not make equal groups of several for {count} learners; use data, learners or auto",
            )
        return several[-1], world // several[-1]
    groups = min(fitting, key=lambda groups: (_time(costs, groups, world), -groups))
    return groups, world // groups


def _checked_mesh(mesh: Sequence[int], count: int, world: int) -> tuple[int, int]:
    groups, ranks = mesh
    if min(mesh) < 1 or groups * ranks != world:
        raise RecipeError(
            "train.parallel.mesh",
            f"{groups} x {ranks} does not fit {world} processes; start as many with torchrun, or set it to null",
        )
    if groups > count:
        raise RecipeError("train.parallel.mesh", f"{groups} groups are more than there are learners ({count})")
    return groups, ranks


def _time(costs: Sequence[float], groups: int, world: int) -> float:
    """The time of an iteration, in passes over a whole batch."""
    owners = assign(costs, groups)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == group) for group in range(groups)]
    return max(loads) * groups / world


def assign(costs: Sequence[float], groups: int) -> list[int]:
    """The group of each learner: the most expensive first, each into the group that has the least to do so far."""
    loads, owners = [0.0] * groups, [0] * len(costs)
    for learner in sorted(range(len(costs)), key=lambda a: -costs[a]):
        group = loads.index(min(loads))
        owners[learner] = group
        loads[group] += costs[learner]
    return owners
