"""A module's weights and BatchNorm buffers as views of one vector.

Averaging, mixing and redistribution are then one pass over one vector instead of a loop over sixty tensors, and two
modules of the same architecture are copied, compared or added as plain vectors of equal layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from generalist.core.errors import GeneralistError

# cuDNN and vectorised kernels need aligned pointers: an unaligned train-mode BatchNorm fails with
# "misaligned address".
_ALIGNMENT_BYTES = 128

COUNTER = "num_batches_tracked"

ORDINARY = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool}
ORDINARY |= {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
"""The types that weights may have, as PyTorch cannot compute with the others."""


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in the vector."""

    name: str
    offset: int
    shape: torch.Size
    channels_last: bool

    def view(self, vector: Tensor) -> Tensor:
        """This tensor as a view of any vector with the same layout."""
        segment = vector[self.offset : self.offset + self.shape.numel()]
        if not self.channels_last:
            return segment.view(self.shape)
        out, channels, height, width = self.shape
        return segment.view(out, height, width, channels).permute(0, 3, 1, 2)


class Flat:
    """One module, stored flat: `vector` = parameters, then float buffers; `counters` = BatchNorm's step counts.

    Other buffers (index tables, masks) are constants of the architecture and are left out: weights for other constants
    belong to another network.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parameters: list[tuple[str, Tensor]] = list(module.named_parameters())  # a tied parameter appears once
        buffers = [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
        counters = [(name, b) for name, b in module.named_buffers() if name.rpartition(".")[2] == COUNTER]
        if not parameters:
            raise GeneralistError("the model has no parameters to train")
        _check_one_dtype(parameters + buffers)
        self.counter_names = [name for name, _ in counters]
        self._stored_names = _stored_names(module)
        self.slots, self.parameter_size = _lay_out(parameters)
        buffer_slots, self.size = _lay_out(buffers, start=self.parameter_size)
        self.parameter_slots = list(self.slots)
        self.slots += buffer_slots
        sample = parameters[0][1]
        self.vector = torch.zeros(self.size, dtype=sample.dtype, device=sample.device)
        self.counters = torch.zeros(len(counters), dtype=torch.int64, device=sample.device)
        with torch.no_grad():
            for slot, (_, tensor) in zip(self.slots, parameters + buffers, strict=True):
                view = slot.view(self.vector)
                view.copy_(tensor)
                tensor.data = view
            for i, (_, counter) in enumerate(counters):
                self.counters[i] = counter
                counter.data = self.counters[i]

    @property
    def parameters(self) -> Tensor:
        """The part of the vector that is trained."""
        return self.vector[: self.parameter_size]

    @torch.no_grad()
    def load(self, vector: Tensor, counters: Tensor) -> None:
        self.vector.copy_(vector)
        self.counters.copy_(counters)

    def gather_gradients(self, gradients: list[Tensor], into: Tensor) -> None:
        """Write one gradient per parameter into a vector of the parameters' layout."""
        torch._foreach_copy_([slot.view(into) for slot in self.parameter_slots], gradients)

    def state_dict(self, vector: Tensor | None = None, counters: Tensor | None = None) -> dict[str, Tensor]:
        """The module's state dict (contiguous copies on the CPU), with the values of another vector if one is given."""
        counters = self.counters if counters is None else counters
        counters = counters.cpu()  # all at once, as copying each by itself would wait for the device every time
        return {name: t.cpu().contiguous().clone() for name, t in self.views(vector, counters).items()}

    def views(self, vector: Tensor | None = None, counters: Tensor | None = None) -> dict[str, Tensor]:
        """Like `state_dict`, but as views of the vector on its device, which change with it."""
        vector = self.vector if vector is None else vector
        counters = self.counters if counters is None else counters
        views = {slot.name: slot.view(vector) for slot in self.slots}
        views |= dict(zip(self.counter_names, counters.unbind(), strict=True))
        module = self.module.state_dict()
        return {name: views.get(self._stored_names.get(name, name), own).detach() for name, own in module.items()}

    @torch.no_grad()
    def read(self, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A state dict as (vector, counters) of this layout. Shapes are checked; dtypes are converted."""
        vector, counters = self.vector.clone(), self.counters.clone()
        expected = self.module.state_dict()
        missing, unknown = expected.keys() - state.keys(), state.keys() - expected.keys()
        if missing or unknown:
            name = sorted(missing or unknown)[0]
            raise GeneralistError(
                f"the weights do not fit this architecture: {'missing' if missing else 'unexpected'} tensor {name!r}"
            )
        for name, tensor in state.items():
            if tensor.dtype not in ORDINARY:
                raise GeneralistError(f"the weights are damaged: {name!r} holds {tensor.dtype}")
        for slot in self.slots:
            if slot.name not in expected:
                continue
            if state[slot.name].shape != slot.shape:
                raise GeneralistError(
                    f"the weights do not fit this architecture: {slot.name!r} has shape "
                    f"{tuple(state[slot.name].shape)}, expected {tuple(slot.shape)}"
                )
            slot.view(vector).copy_(state[slot.name])
        for i, name in enumerate(self.counter_names):
            if name not in expected:
                continue
            if state[name].numel() != 1:
                raise GeneralistError(f"the weights do not fit this architecture: {name!r} is not one number")
            if not torch.isfinite(state[name]).all() or not 0 <= float(state[name]) < 2**53:
                raise GeneralistError(f"the weights are damaged: {name!r} is no count")
            counters[i] = int(state[name])
        for name, constant in constants_of(self.module).items():
            if name in expected and not torch.equal(state[name].to(constant), constant):
                raise GeneralistError(
                    f"the weights do not fit this architecture: they belong to another {name!r}, a buffer that "
                    "training does not change; let the model make it without random numbers"
                )
        return vector, counters

    @torch.no_grad()
    def become(self, state: Mapping[str, Tensor]) -> None:
        """Take over a whole state dict, including the constants."""
        for name, constant in constants_of(self.module).items():
            if name in state and state[name].shape == constant.shape and state[name].dtype in ORDINARY:
                constant.copy_(state[name])
        self.load(*self.read(state))


def constants_of(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that training does not change: neither floats nor BatchNorm's counts."""
    named = module.named_buffers()
    return {name: b for name, b in named if not b.is_floating_point() and name.rpartition(".")[2] != COUNTER}


def _lay_out(tensors: list[tuple[str, Tensor]], start: int = 0) -> tuple[list[Slot], int]:
    slots, offset = [], start
    for name, tensor in tensors:
        channels_last = tensor.dim() == 4 and (
            tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        )
        slots.append(Slot(name, offset, tensor.shape, channels_last))
        step = max(1, _ALIGNMENT_BYTES // tensor.element_size())
        offset += -(-tensor.numel() // step) * step
    return slots, offset


def _stored_names(module: nn.Module) -> dict[str, str]:
    """Every name of every tensor, with the one name under which it is stored: a tied tensor has several."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _check_one_dtype(tensors: list[tuple[str, Tensor]]) -> None:
    dtype = tensors[0][1].dtype
    for name, tensor in tensors:
        if tensor.dtype != dtype:
            raise GeneralistError(
                f"the model mixes dtypes: {name!r} is {tensor.dtype}, the first tensor {dtype}; convert it to one"
            )
