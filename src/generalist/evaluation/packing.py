"""Full batches even when few samples survive: work is packed by (sample, round), and shapes never change.

In float32 a sample's result can depend on the shape of its batch, though not on the other samples in it. So every batch
has the same number of rows; if there is too little work for one, rows are repeated and the copies ignored. That costs
the time of a full batch, but makes verdicts equal bit by bit for any sharding, order and resume. Only a search on a
network that computes each row by itself can do without the copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from generalist.core.errors import DataError
from generalist.data.sets import Batch, Images
from generalist.evaluation.verdicts import Bools, Ints

CPU_BATCHES = (64, 256)
"""The smallest and largest number of rows on a CPU. With fewer, a small network spends its time between operations;
with more, its activations no longer fit the caches."""
CPU_SHARE = 0.4
"""The share of all samples in a batch, within those limits: if up to 80% survive, they fit into two batches, one for
each core of a small machine. With batches of a fifth, Square takes a third longer on such a machine."""
HEAVY = 1e8
"""Operations per image of a forward pass from which a network counts as heavy: a ResNet-18 has 1.1e9 on 32x32 pixels, a
wrn-10-1 2.6e7."""
HEAVY_ROWS = 32
"""The rows for such a network on a CPU, in any evaluation: more are no faster, and would make more of a step's last
batch copies."""
CUDA_BATCHES = (256, 1024)
CUDA_SHARE = 0.25
"""The same on a GPU, which needs more rows to be busy, and attacks one batch after the other. Without copies a large
batch costs nothing extra, so the largest is always taken."""
ROWS = 32
"""A search without copies takes a multiple of this many rows, as a GPU records its steps anew for every number."""


def default_batch_size(device: torch.device, samples: int, *, row_by_row: bool = False, operations: float = 0.0) -> int:
    """Rows per batch for an evaluation of so many samples, in all its shards together."""
    cuda = device.type == "cuda"
    if not cuda and operations >= HEAVY:
        return HEAVY_ROWS
    least, most = CUDA_BATCHES if cuda else CPU_BATCHES
    if row_by_row:
        return most
    return min(most, max(least, math.ceil((CUDA_SHARE if cuda else CPU_SHARE) * samples)))


def pack(pending: Bools, size: int) -> tuple[Ints, Ints]:
    """(positions, rounds) of the next batch, at most `size` items of `pending` [rounds, samples].

    The earliest round comes first. If its samples do not fill the batch, later rounds of samples that are still
    unbroken are added: some may turn out to be unnecessary, but their rows would have been empty otherwise.
    """
    rounds, positions = np.divmod(np.flatnonzero(pending)[:size], pending.shape[1])
    return positions.astype(np.int64), rounds.astype(np.int64)


def rows_for(count: int, size: int) -> int:
    """How many rows of a batch of `size` to compute for `count` items, with few copies."""
    return min(size, -(-count // ROWS) * ROWS)


@dataclass(frozen=True)
class Feeder:
    """Fetches samples from an image set, one batch of a fixed shape at a time."""

    images: Images
    device: torch.device
    dtype: torch.dtype
    """float64 for models of that precision, so that attacks on them search in it, too; else float32."""
    size: int

    def batch(self, samples: Ints) -> Batch:
        """These samples, repeated until they fill the batch."""
        index = torch.from_numpy(np.resize(samples, self.size))
        batch = self.images.batch(index)
        return Batch(
            x=batch.x.to(self.device, self.dtype), y=batch.y.to(self.device), index=batch.index.to(self.device)
        )

    def rounds(self, rounds: Ints) -> torch.Tensor:
        """The round of each row of the batch."""
        return torch.from_numpy(np.resize(rounds, self.size)).to(self.device)


def check_images(batch: Batch, name: str) -> None:
    """Refuse pixels outside [0, 1]: eps would not mean what it says."""
    low, high = (float(end) for end in batch.x.aminmax())
    if not (low >= 0 and high <= 1):  # false for nan, too
        raise DataError(
            f"{name}: images must lie in [0, 1], not in [{low:g}, {high:g}]: undo the normalisation, or divide by 255"
        )
