"""BatchNorm over a batch that is divided between ranks, normalised by the statistics of the whole batch.

PyTorch's own SyncBatchNorm runs only on GPUs, is a class of its own, and gives ranks with fewer samples the same weight
as others; this one keeps the layers as they are (only `forward` is replaced) and is exact for uneven parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from generalist.core.errors import GeneralistError


class Synchroniser:
    """Sums over the ranks that share a batch. All BatchNorm layers share one, and use it while it is `active`."""

    def __init__(self, total: Callable[[Tensor], None]) -> None:
        self.total = total
        """Replaces a tensor by its sum over the ranks."""
        self.active = False
        self.share = 1.0
        """This rank's share of the batch: the weight of its mean loss in that of the whole batch."""

    @contextmanager
    def over(self, share: float) -> Iterator[None]:
        """Within this context, BatchNorm in training mode sees the whole batch."""
        self.active, self.share = True, share
        try:
            yield
        finally:
            self.active = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Synchroniser:
        return self  # a copy of a network belongs to the same ranks


def synchronise(model: nn.Module, ranks: Synchroniser) -> None:
    """Let BatchNorm in `model`, and in copies of it, normalise by the whole batch while `ranks` is active."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            if type(layer).forward is not _BatchNorm.forward:  # it may do more than normalise, which would be lost
                raise GeneralistError(
                    f"{type(layer).__name__} is a BatchNorm with a forward pass of its own, which cannot see the whole "
                    "batch; set train.parallel.sync_batchnorm to false, or train.parallel.layout to learners"
                )
            layer.ranks = ranks  # type: ignore[assignment]
            layer.witness = [*model.parameters()][:1]  # type: ignore[assignment]  # a list, or it would be its own
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: Any, x: Tensor) -> Tensor:
    of_batch = layer.training or layer.running_mean is None  # else by the running statistics
    if not (of_batch and layer.ranks.active):
        plain: Tensor = type(layer).forward(layer, x)
        return plain
    return _normalised(layer, x)


def _normalised(layer: Any, x: Tensor) -> Tensor:
    """Computed in at least single precision. Sums and squares travel in one message, taken about the running mean,
    which all ranks share: about zero, the mean of the squares and the square of the mean could cancel."""
    axes = [0, *range(2, x.dim())]
    along = [1, -1, *[1] * (x.dim() - 2)]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pivot = wide.new_zeros(x.shape[1]) if layer.running_mean is None else layer.running_mean.clone()
    shifted = wide - pivot.view(along)
    own = wide.new_full((1,), x.numel() / x.shape[1])
    # In training, the loss is a mean to which each rank contributes by its share; in an attack, which holds the weights
    # constant, it is a sum.
    trains = all(parameter.requires_grad for parameter in layer.witness)
    sums = _total(torch.cat([shifted.sum(axes), shifted.square().sum(axes), own]), layer.ranks, trains)
    count = sums[-1].detach()
    offset, squares = (sums[:-1] / count).chunk(2)
    variance = (squares - offset.square()).clamp_min(0)
    _track(layer, (pivot + offset).detach(), variance.detach(), count)
    result = (shifted - offset.view(along)) * torch.rsqrt(variance + layer.eps).view(along)
    if layer.weight is not None:
        result = result * layer.weight.view(along) + layer.bias.view(along)
    return result.to(x.dtype)


@torch.no_grad()
def _track(layer: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """The running statistics, by PyTorch's rules: the unbiased variance, and a plain average without momentum."""
    if layer.running_mean is None:
        return
    layer.num_batches_tracked.add_(1)
    weight = layer.momentum
    if weight is None:
        weight = (1 / layer.num_batches_tracked).to(mean.dtype)
    layer.running_mean.lerp_(mean, weight)
    layer.running_var.lerp_(variance * (count / (count - 1)), weight)


def _total(values: Tensor, ranks: Synchroniser, weighted: bool) -> Tensor:
    total: Tensor = _Total.apply(values, ranks, weighted)  # type: ignore[no-untyped-call]
    return total


class _Total(torch.autograd.Function):
    """A sum over ranks through which gradients flow: each rank's loss depends on every rank's values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: Synchroniser, weighted: bool) -> Tensor:
        ctx.ranks, ctx.share = ranks, ranks.share if weighted else 1.0
        total = values.clone()
        ranks.total(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Every rank's gradients are weighted by its own share in the end: another rank's loss must count by that one's.
        total = grads[0] * ctx.share
        ctx.ranks.total(total)
        return total / ctx.share, None, None
