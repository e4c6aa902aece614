"""Steps of a loop, recorded once as a CUDA graph and replayed, without host work between a step's kernels.

A search takes the same step hundreds of times, from tensors to tensors of the same shapes. On a GPU, launching its
kernels takes the host longer than running them takes the GPU. A step here is a function (state, given) -> state of
nested tuples of tensors; it reads `given` and does not change it. A large tensor of the state may be changed in place
and returned as it is: that one is not copied. A step may close over numbers, networks and options, but never over
tensors of the batch, which would become part of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

WARM_UP = 2
"""Runs of a step before it is recorded: libraries choose their kernels, compilers compile, caches are filled."""

State = TypeVar("State")
Given = tuple[Tensor, ...]
Step = Callable[[State, Given], State]


def recorded(network: object, key: Hashable, step: Step[State]) -> Step[State]:
    """The step, or its recording if the network has a `Recorder`.

    The key names everything that the step closes over, except the network. The state that a recording returns is
    overwritten when any step with that key is taken again: keep a copy of what is needed longer.
    """
    recorder = getattr(network, "recorder", None)
    return recorder.step(key, step) if isinstance(recorder, Recorder) else step


class Recorder:
    """The recordings of the steps around one network, by key and by the shapes of the tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recordings: dict[Hashable, _Recording[Any]] = {}
        # Shared by all, as a recording leaves nothing there that any recording reads later.
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def step(self, key: Hashable, step: Step[State]) -> Step[State]:
        """The step as replays of its recording, which is made on the first call."""

        def replayed(state: State, given: Given) -> State:
            tensors, form = tree_flatten(state)
            shapes = tuple((tensor.shape, tensor.dtype) for tensor in (*tensors, *given))
            place = (key, form, shapes)
            if place not in self._recordings:
                self._recordings[place] = _Recording(step, tensors, form, given, self._pool)
            found: State = self._recordings[place].replay(tensors, given)
            return found

        return replayed


class _Recording(Generic[State]):
    """One step with its own tensors. On the CPU there is no graph: the step runs on these tensors."""

    def __init__(self, step: Step[State], state: list[Tensor], form: TreeSpec, given: Given, pool: Any) -> None:
        self._step, self._form = step, form
        self._own = [tensor.clone() for tensor in state]
        self._given = tuple(tensor.clone() for tensor in given)
        self._source = given
        self._state: State = tree_unflatten(self._own, form)
        self._replay: Callable[[], None] = self._once if pool is None else self._capture(pool)
        for own, tensor in zip(self._own, state, strict=True):  # the warm-up changed them
            own.copy_(tensor)

    def replay(self, state: list[Tensor], given: Given) -> State:
        """Take the step from this state."""
        for own, tensor in zip(self._own, state, strict=True):
            if tensor is not own:
                own.copy_(tensor)
        for i, (own, tensor) in enumerate(zip(self._given, given, strict=True)):
            if tensor is not self._source[i]:  # most are the same from one step to the next
                own.copy_(tensor)
        self._source = given
        self._replay()
        return self._state

    def _once(self) -> None:
        """Take the step in place. Tensors may swap places, so all are saved before the first is overwritten."""
        found, _ = tree_flatten(self._step(self._state, self._given))
        places = {own.untyped_storage().data_ptr() for own in self._own}
        moved = [(own, tensor) for own, tensor in zip(self._own, found, strict=True) if tensor is not own]
        safe = [
            (own, tensor.clone() if tensor.untyped_storage().data_ptr() in places else tensor) for own, tensor in moved
        ]
        for own, tensor in safe:
            own.copy_(tensor)

    def _capture(self, pool: Any) -> Callable[[], None]:
        stream = torch.cuda.Stream(self._own[0].device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._once()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._once()
        return graph.replay
