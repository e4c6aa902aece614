"""BatchNorm's running statistics, re-estimated: for networks whose weights did not come from training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from generalist.core.errors import GeneralistError


def tracked(model: nn.Module) -> dict[str, _BatchNorm]:
    """The layers of `model` that keep running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None
    }


def statistics_names(model: nn.Module) -> set[str]:
    """Names in the state dict of everything that `reestimate` changes."""
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    return {f"{name}.{buffer}".lstrip(".") for name in tracked(model) for buffer in buffers}


@torch.no_grad()
def reestimate(model: nn.Module, batches: Iterable[Tensor]) -> int:
    """Replace every running mean and variance by its plain average over `batches`; returns how many there were.

    Each batch counts the same, and its variance is the unbiased one, as in training. Weights are not changed, and
    modules other than BatchNorm are in evaluation mode, so dropout draws nothing. Modes and momenta are restored, and
    so are the statistics if a batch fails or there is none. The counters then hold the number of averaged batches.
    """
    layers = list(tracked(model).values())
    if not layers:
        raise GeneralistError("the model has no BatchNorm statistics to re-estimate")
    count = 0
    with _averaging(model, layers):
        for batch in batches:
            model(batch)
            count += 1
        if count == 0:
            raise GeneralistError("statistics cannot be re-estimated on no images: give at least one batch")
    return count


@contextmanager
def _averaging(model: nn.Module, layers: list[_BatchNorm]) -> Iterator[None]:
    """Within this context BatchNorm averages over all batches; on failure everything is restored."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    before = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(recurse=False)]
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # for PyTorch, this means that every batch counts the same
            layer.training = True
        yield
    except BaseException:
        for buffer, value in before:
            buffer.copy_(value)
        raise
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        # One flag at a time: `model.train()` would also switch on the modules that their owner keeps in eval mode.
        for module, mode in modes:
            module.training = mode
