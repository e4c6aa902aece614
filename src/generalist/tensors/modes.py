"""Use a network for a while and restore it afterwards: its modes, its gradient flags, its buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn


@contextmanager
def frozen(model: nn.Module, *, training: bool | None = False) -> Iterator[None]:
    """Hold the parameters of `model` constant: no gradient reaches them, and its state is restored afterwards.

    `training` is the mode within this context: False for eval, True for train, None for whatever each module is in.
    Unless the mode is eval, forward passes write to copies of the buffers (BatchNorm's running statistics and
    counters), which are then dropped. Nothing waits for the device, so this may run inside a CUDA graph capture.
    """
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    buffers = [] if training is False else _buffers(model)
    try:
        _lend_copies(buffers)
        if training is not None:
            model.train(training)
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        # One flag at a time: `model.train()` would also affect the modules that their owner keeps in eval mode.
        for module, mode in modes:
            module.training = mode
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Every place in which a buffer is registered; a shared buffer has several."""
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _lend_copies(buffers: list[tuple[nn.Module, str, Tensor]]) -> None:
    """Replace each buffer by a copy.

    Copying the old values back instead would write to the originals, which autograd counts as a change: it would refuse
    the backward pass of a forward pass made before.
    """
    copies: dict[int, Tensor] = {}
    for owner, name, buffer in buffers:
        owner._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())


@contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the tensors afterwards, bit for bit, whatever happens to them within this context.

    In place and without waiting for the device, so this may be part of a captured CUDA graph.
    """
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def computing_in(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Forward passes in mixed precision of `dtype`; None leaves them in the precision of the weights."""
    return torch.autocast(device.type, dtype) if dtype is not None else nullcontext()
