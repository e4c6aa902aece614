"""The order of an epoch, as a list of batches of sample indices."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from generalist.core.errors import DataError
from generalist.core.random import permutation


def epoch_batches(
    index: Tensor,
    *,
    extra_index: Tensor | None = None,
    ratio: float = 0.0,
    batch_size: int,
    seed: int,
    epoch: int,
    last: Literal["drop", "fill", "keep"],
    iterations: int | None = None,
) -> list[Tensor]:
    """The batches of one pass over `index` in an order drawn for `epoch`, counted from 1.

    `last` says what happens to an incomplete last batch: `drop` it, `fill` it from the start of the order (all shapes
    equal), or `keep` it smaller. `iterations` ends the epoch after so many batches. With `extra_index`, each batch ends
    with round(batch_size * ratio) extra samples; their order continues from epoch to epoch, so that each is seen once
    before any is seen again.
    """
    extras = _extras_per_batch(extra_index, ratio=ratio, batch_size=batch_size)
    labelled = batch_size - extras
    if len(index) == 0:
        raise DataError("there are no samples to train on")
    order = index[permutation(len(index), seed, "order", epoch, device=index.device)]
    chunks = _chunks(order, size=labelled, last=last)
    if iterations is not None:
        if iterations > len(chunks):
            raise DataError(
                f"train.iterations is {iterations}, but {len(index)} images make {len(chunks)} batches of {labelled}: "
                "make it smaller, or leave it out for all of them"
            )
        chunks = chunks[:iterations]
    if extra_index is None or extras == 0:
        return chunks
    sizes = [round(len(chunk) * extras / labelled) for chunk in chunks]
    per_epoch = sum(sizes)
    if per_epoch == 0:  # a single kept batch, too small for its share to make a whole sample
        return chunks
    stream = _extra_stream(extra_index, start=(epoch - 1) * per_epoch, count=per_epoch, seed=seed)
    return [torch.cat(pair) for pair in zip(chunks, torch.split(stream, sizes), strict=True)]


def _extras_per_batch(extra_index: Tensor | None, *, ratio: float, batch_size: int) -> int:
    if batch_size < 1:
        raise DataError(f"batch_size must be at least 1, not {batch_size}")
    if extra_index is None or len(extra_index) == 0:
        if ratio:
            raise DataError("a ratio of extra images needs extra images: give data.extra, or set the ratio to 0")
        return 0
    extras = round(batch_size * ratio)
    if not 0 < extras < batch_size:
        raise DataError(
            f"a ratio of {ratio:g} in batches of {batch_size} makes {extras} extra images each: "
            "choose a ratio (or a larger batch) that leaves both kinds in it"
        )
    return extras


def _chunks(order: Tensor, *, size: int, last: str) -> list[Tensor]:
    count = len(order)
    if last == "drop":
        if count < size:
            raise DataError(
                f"{count} samples do not fill one batch of {size}, and an incomplete last one is dropped: "
                "reduce train.batch_size, or set train.last_batch to fill or keep"
            )
        order = order[: count - count % size]
    elif last == "fill":
        total = math.ceil(count / size) * size
        order = order[torch.arange(total, device=order.device) % count]
    return list(torch.split(order, size))


def _extra_stream(extra_index: Tensor, *, start: int, count: int, seed: int) -> Tensor:
    """Positions start..start+count-1 of an endless sequence of passes, each pass in its own random order."""
    size = len(extra_index)
    passes = range(start // size, (start + count - 1) // size + 1)
    orders = [permutation(size, seed, "order/extra", number, device=extra_index.device) for number in passes]
    offset = start - passes[0] * size
    return extra_index[torch.cat(orders)[offset : offset + count]]
