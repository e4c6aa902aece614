"""The network on which attacks search: the model's own function in a faster form, or the model itself.

A search may use any network, because what it finds counts only if the user's own model misclassifies that very image.
So BatchNorm is folded into the convolutions, in the model's own precision; for float32 on a GPU that is the precision
of its convolutions under PyTorch's flags, by default TensorFloat-32's eleven bits. `precision fast` searches in
bfloat16. A faster form is used only if its outputs for a few images agree with the model's; otherwise, and if a model
cannot be folded, the search uses the model itself, and the summary says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from generalist.attacks.accuracy import logits_of
from generalist.attacks.pgd import Classifier
from generalist.evaluation.classifier import AnyPrecision, InBfloat16
from generalist.evaluation.cpu_network import CpuNetwork
from generalist.tensors.capture import Recorder
from generalist.tensors.folding import CannotFoldError, FoldedNetwork, check_answers, fold, trace
from generalist.tensors.fused import FusedNetwork, fastest, like_tensor_float, tensor_float

CLOSE = 1e-3
"""How far logits of the folded network may be from the model's, as a share of the largest: rounding is far below."""

CLOSE_IN_TENSOR_FLOAT = 1e-2
"""The same on a GPU whose convolutions keep three digits of float32's seven, the model's own and ours alike."""

CLOSE_IN_HALF = 0.1
"""The same in bfloat16, which keeps two to three digits."""


@dataclass(frozen=True)
class Searched:
    """A network to search on."""

    network: Classifier
    folded: bool
    """Whether it is a folded copy, which threads may share because it does not touch the user's model."""
    row_by_row: bool = False
    """Whether an image's output does not depend on the number of images in the batch."""
    note: str | None = None
    """Why it is the model itself, if a folded copy was wanted."""


def operations(searched: Searched, x: Tensor) -> float:
    """Additions and multiplications per image of a forward pass, in convolutions and matrix products.

    Counted for folded networks only, 0 for others: watching a user's model while it runs could have any effect.
    """
    return searched.network.operations(x) / len(x) if isinstance(searched.network, FoldedNetwork) else 0.0


def full_precision(model: AnyPrecision, x: Tensor, *, compiled: bool = False) -> Searched:
    """The network for searching in the model's own precision; `x` are a few images of the evaluation."""
    if model.dtype not in (torch.float32, torch.float64):
        return Searched(model, folded=False)  # folding would round the weights anew
    try:
        network = _recording(_folded(model.model, model.dtype, x, compiled=compiled), x.device)
        coarse = x.is_cuda and model.dtype == torch.float32 and tensor_float()
        check_answers(network, logits_of(model, x), x, close=CLOSE_IN_TENSOR_FLOAT if coarse else CLOSE)
    except CannotFoldError as error:
        return Searched(model, folded=False, note=f"attacks search on the model itself, which is not folded: {error}")
    return _found(network)


def half_precision(model: AnyPrecision, x: Tensor, *, compiled: bool = False) -> Searched:
    """The network for searching in bfloat16: folded, on a GPU in fused kernels; else the model under autocast."""
    try:
        network = fastest(model.model, torch.bfloat16, shape=x.shape[1:], compiled=compiled)
        network = _recording(network, x.device)
        check_answers(network, logits_of(model, x), x, close=CLOSE_IN_HALF)
    except CannotFoldError as error:
        note = f"bfloat16 searches use the model under autocast, which is not folded: {error}"
        return Searched(InBfloat16(model), folded=False, note=note)
    return _found(network)


def _found(network: FoldedNetwork) -> Searched:
    return Searched(network, folded=True, row_by_row=isinstance(network, FusedNetwork) and network.row_by_row)


def _folded(model: nn.Module, dtype: torch.dtype, x: Tensor, *, compiled: bool) -> FoldedNetwork:
    if x.is_cuda and dtype == torch.float32:
        return like_tensor_float(model, shape=x.shape[1:]) or _channels_last(fold(model, dtype, compiled=compiled))
    if x.is_cuda or dtype != torch.float32 or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return _channels_last(fold(model, dtype, compiled=compiled))
    try:
        return _channels_last(CpuNetwork(trace(model, dtype)))
    except CannotFoldError:  # not a chain of convolutions, but it may still be foldable
        return _channels_last(fold(model, dtype))


def _recording(network: FoldedNetwork, device: torch.device) -> FoldedNetwork:
    """On a GPU attacks replay their steps; on the CPU there is no launch to save."""
    network.recorder = Recorder(device) if device.type == "cuda" else None
    return network


def _channels_last(network: FoldedNetwork) -> FoldedNetwork:
    network.graph.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def notes_of(searched: Sequence[Searched]) -> list[str]:
    return [one.note for one in searched if one.note is not None]
