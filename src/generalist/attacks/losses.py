"""The losses that attacks maximise: functions of logits [B, K], one number per sample.

Each takes logits of at least single precision (`widen` them first). Nothing here adds samples up, so a sample's loss
and gradient depend on the sample alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from generalist.core.errors import GeneralistError

SampleLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, K], labels [B]) to a loss [B]."""

TINY = 1e-12
"""The smallest denominator of DLR, for when all logits are zero."""


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log p_y. It and its gradient vanish where the model is very confident."""
    return F.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """The largest other logit minus that of the label: above 0 where the sample is misclassified, below where not."""
    return others(logits, y).amax(1) - _chosen(logits, y)


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio: the margin over the gap between the largest and the third largest logit.

    It does not change when the logits are shifted or scaled (Croce and Hein, 2020). It needs three classes; for two it
    is the margin, which leads to the same steps, as these do not depend on a gradient's length.
    """
    if logits.shape[1] < 3:
        return margin(logits, y)
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / _spread(top[:, 0] - top[:, 2], top)


def dlr_targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The target's logit minus the label's, over the gap between the largest logit and the mean of third and fourth.

    It needs four classes; for two or three it is just the difference of the two logits.
    """
    gap = _chosen(logits, target) - _chosen(logits, y)
    if logits.shape[1] < 4:
        return gap
    top = logits.topk(4, dim=1).values
    return gap / _spread(top[:, 0] - (top[:, 2] + top[:, 3]) / 2, top)


def likely_wrong(logits: Tensor, y: Tensor, rank: int | Tensor) -> Tensor:
    """The wrong class with the `rank`-th largest logit, 1 for the likeliest; among equals the first.

    Each sample may have its own rank, [B]: from 1 to below the number of classes, which is not checked.
    """
    if isinstance(rank, int) and not 1 <= rank < logits.shape[1]:
        raise GeneralistError(f"there is no wrong class number {rank} among {logits.shape[1]} classes")
    order = others(torch.nan_to_num(logits), y).argsort(dim=1, descending=True, stable=True)
    return order[:, rank - 1] if isinstance(rank, int) else _chosen(order, rank - 1)


def others(logits: Tensor, y: Tensor) -> Tensor:
    """The logits with that of the label replaced by -inf."""
    own = torch.arange(logits.shape[1], device=logits.device) == y.unsqueeze(1)
    return logits.masked_fill(own, -torch.inf)


def _chosen(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes.unsqueeze(1)).squeeze(1)


def _spread(difference: Tensor, top: Tensor) -> Tensor:
    """The difference of logits, but at least the size of their rounding error.

    This keeps loss and gradient finite where the logits are (almost) equal, and changes nothing elsewhere.
    """
    rounding = torch.finfo(top.dtype).eps * top.detach().abs().amax(1)
    return torch.maximum(difference, rounding + TINY)
