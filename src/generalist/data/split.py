"""Which samples are held out: class-balanced validation indices, and seeded random subsets."""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.core.errors import DataError
from generalist.core.random import permutation


def hold_out(labels: Tensor, *, count: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sorted (train, validation) indices with `count` samples held out, the same number of every class.

    If `count` is not a multiple of `classes`, randomly chosen classes give one more. A pure function.
    """
    labels = labels.cpu()
    if not 0 < count < len(labels):
        raise DataError(
            f"cannot hold out {count} of {len(labels)} images: "
            "hold out at least 1 and leave some to train (validation.images)"
        )
    each, more = divmod(count, classes)
    generous = set(permutation(classes, seed, "hold-out/classes")[:more].tolist())
    order = permutation(len(labels), seed, "hold-out/order")
    ordered = labels[order]
    held = torch.zeros(len(labels), dtype=torch.bool)
    for number in range(classes):
        quota = each + (number in generous)
        members = order[ordered == number]
        if quota and len(members) <= quota:
            raise DataError(
                f"class {number} has {len(members)} images, too few to hold out {quota} and train on the rest: "
                f"hold out fewer than {count} (validation.images)"
            )
        held[members[:quota]] = True
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()


def subset(n: int, count: int, seed: int) -> Tensor:
    """`count` sorted indices from 0..n-1, drawn without replacement."""
    if not 0 < count <= n:
        raise DataError(f"cannot draw {count} of {n} samples: ask for 1 to {n}")
    return permutation(n, seed, "subset")[:count].sort().values
