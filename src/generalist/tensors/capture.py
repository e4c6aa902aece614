"""Steps of a loop, recorded once as a CUDA graph and replayed: no host work between a step's kernels.

A search takes the same step hundreds of times: tensors to tensors of the same shapes. On a GPU the host needs longer to
launch its kernels than these need to run. A step here is a function (state, given) -> state of nested tuples of
tensors; `given` is what it reads and does not change. A large tensor of the state it may change in place and return as
it is: that one is not copied. It may close over numbers, networks and options, never over tensors of the batch: those
would be part of the recording.
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
    """The step, or its recording where the network has a `Recorder`.

    The key names all that the step closes over, the network apart. The state that a recording returns is overwritten
    when any step of that key is taken again: keep a copy of what is needed longer.
    """
    recorder = getattr(network, "recorder", None)
    return recorder.step(key, step) if isinstance(recorder, Recorder) else step


class Recorder:
    """The recordings of one network's callers, by key and by the shapes of the tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recordings: dict[Hashable, _Recording[Any]] = {}
        # One for all: a recording leaves nothing there that it or another one reads at a later time.
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def step(self, key: Hashable, step: Step[State]) -> Step[State]:
        """The step as replays of its recording, which is made when it is first taken."""

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
    """One step with tensors of its own. On the CPU there is no graph: the step runs on these tensors."""

    def __init__(self, step: Step[State], state: list[Tensor], form: TreeSpec, given: Given, pool: Any) -> None:
        self._step, self._form = step, form
        self._own = [tensor.clone() for tensor in state]
        self._given = tuple(tensor.clone() for tensor in given)
        self._source = given
        self._state: State = tree_unflatten(self._own, form)
        self._replay: Callable[[], None] = self._once if pool is None else self._capture(pool)
        for own, tensor in zip(self._own, state, strict=True):  # the warm-up went on from it
            own.copy_(tensor)

    def replay(self, state: list[Tensor], given: Given) -> State:
        """The step from this state."""
        for own, tensor in zip(self._own, state, strict=True):
            if tensor is not own:
                own.copy_(tensor)
        for i, (own, tensor) in enumerate(zip(self._given, given, strict=True)):
            if tensor is not self._source[i]:  # most stay the same from one step to the next
                own.copy_(tensor)
        self._source = given
        self._replay()
        return self._state

    def _once(self) -> None:
        """The step in place. A tensor may move to another's place, so all are safe before the first is overwritten."""
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
