"""Where a process stands in the mesh of (learners x data), and what it sends to the others.

Every rank builds every learner, but steps only those of its own group, on its own part of each batch. Ranks of one
group hold the same weights at all times; of the other groups' learners they have the weights of the last `gather`.
A single process is a mesh of 1 x 1, for which nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from generalist.core.distributed import Group, answering
from generalist.core.errors import RecipeError
from generalist.tensors.sync_batchnorm import Synchroniser
from generalist.training.learner_options import LearnerOptions
from generalist.training.options import Job
from generalist.training.parallel_options import ParallelOptions, assign, mesh_shape


class Parallel:
    """This process's place: learner group `row` of `groups`, and rank `column` of the `ranks` in it."""

    def __init__(
        self,
        costs: Sequence[float] = (1.0,),
        options: ParallelOptions = ParallelOptions(),  # noqa: B008 - it cannot be changed
        group: Group | None = None,
    ) -> None:
        self.group = group or Group()
        self.groups, self.ranks = mesh_shape(options, costs, self.group.world)
        self.row, self.column = divmod(self.group.rank, self.ranks)
        self.owners = assign(costs, self.groups)
        self.own = [a for a, owner in enumerate(self.owners) if owner == self.row]
        self.sync = Synchroniser(self.total) if self.ranks > 1 and options.sync_batchnorm else None
        self.share = 1.0
        """This rank's part of the current batch."""
        self.mesh = _mesh(options, self.group, self.groups, self.ranks)
        """PyTorch's mesh with the dimensions `learners` and `data`; None for a single process."""

    def _group(self, dimension: str) -> Any:
        return self.mesh.get_group(dimension) if self.mesh is not None else None

    # -- batches ----------------------------------------------------------------------------------------------------

    def part_of(self, batch: Tensor) -> Tensor:
        """This rank's samples of a batch: every n-th one, so that each rank has its share of each kind."""
        return batch[self.column :: self.ranks]

    def check_batches(self, batches: Sequence[Tensor]) -> None:
        largest, smallest = len(batches[0]), min(len(batch) for batch in batches)
        if smallest == 1 < largest:
            raise RecipeError(
                "train.last_batch",
                "keep would leave a last batch of one image, which has no variance for BatchNorm; drop or fill it",
            )
        if smallest < self.ranks:
            raise RecipeError(
                "train.batch_size",
                f"a batch of {smallest} cannot be divided between {self.ranks} ranks; make it larger, drop or fill the "
                "last one (train.last_batch), or use fewer ranks",
            )

    def begin(self, batch: Tensor) -> None:
        """Call before the iteration on this batch."""
        self.share = len(self.part_of(batch)) / len(batch)

    # -- within a group of ranks that share batches -------------------------------------------------------------------

    @contextmanager
    def whole_batch(self) -> Iterator[None]:
        """Within this context BatchNorm sees the whole batch, if it is synchronised."""
        if self.sync is None:
            yield
            return
        with self.sync.over(self.share):
            yield

    def total(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks that share a batch."""
        with answering():
            dist.all_reduce(tensor, group=self._group("data"))

    def mean(self, tensor: Tensor) -> None:
        """Replace a mean over this rank's samples by that over the whole batch."""
        if self.ranks > 1:
            self.total(tensor.mul_(self.share))

    def means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same for several at once, as copies: for objectives that do more than sum gradients."""
        if self.ranks == 1:
            return list(tensors)
        together = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self.mean(together)
        parts = torch.split(together, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def as_first(self, tensors: Iterable[Tensor]) -> None:
        """Fill tensors with those of rank 0: what every rank has computed may differ in its rounding on GPUs."""
        if self.group.world == 1:
            return
        with answering():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    # -- between groups of learners -----------------------------------------------------------------------------------

    def sum_over_groups(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the groups of learners."""
        if self.groups > 1:
            with answering():
                dist.all_reduce(tensor, group=self._group("learners"))

    def send(self, learner: int, tensors: Iterable[Tensor]) -> None:
        """Fill a learner's tensors with those of the group that steps it."""
        if self.groups == 1:
            return
        source = self.owners[learner] * self.ranks + self.column
        with answering():
            for tensor in tensors:
                dense = tensor.contiguous()  # weights with channels last are not
                dist.broadcast(dense, src=source, group=self._group("learners"))
                if dense is not tensor:
                    tensor.copy_(dense)

    def describe(self) -> dict[str, Any]:
        """For the run's record."""
        return {
            "processes": self.group.world,
            "mesh": [self.groups, self.ranks],
            "sync_batchnorm": self.sync is not None,
        }


def parallel_for(job: Job, group: Group | None = None) -> Parallel:
    """The place of this process in a run."""
    return Parallel([cost(learner) for learner in job.learners], job.train.parallel, group)


def cost(learner: LearnerOptions) -> float:
    """The approximate number of forward and backward passes of an iteration."""
    return 1.0 + sum(attack.steps for _, attack in learner.attacks())


def _mesh(options: ParallelOptions, group: Group, groups: int, ranks: int) -> DeviceMesh | None:
    """Along `learners` are the ranks that hold the same part of each batch, along `data` those of the same learners."""
    if group.world == 1:
        return None
    key = (groups, ranks, options.timeout)
    if key not in group.parts:
        grid = torch.arange(group.world).reshape(groups, ranks)
        wait = {"timeout": timedelta(seconds=options.timeout)}  # a mesh that makes its groups waits for half an hour
        with answering():
            across, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), **wait)  # type: ignore[no-untyped-call]
            within, _ = dist.new_subgroups_by_enumeration(grid.tolist(), **wait)  # type: ignore[no-untyped-call]
        group.parts[key] = DeviceMesh.from_group(
            [across, within], group.device.type, grid, mesh_dim_names=("learners", "data")
        )
    mesh: DeviceMesh = group.parts[key]
    return mesh
