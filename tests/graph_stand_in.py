"""The graph engine on a machine without CUDA: replaying runs the iteration that was recorded.

This checks the engine's book-keeping, not CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from generalist.training.graph import GraphEngine


class Recording:
    """Stands in for a CUDA graph of `engine`, which whoever makes the engine puts here."""

    engine: GraphEngine
    outside: list[int]
    """The learners that were not recorded, however many are left out by now."""

    def replay(self) -> None:
        now, self.engine.outside = self.engine.outside, self.outside
        self.engine._step_inside()
        self.engine.outside = now


@contextmanager
def _recording(graph: Recording, capture_error_mode: str) -> Iterator[None]:
    yield
    graph.outside = list(graph.engine.outside)


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def replace_cuda(replace: Callable[[Any, str, Any], None]) -> None:
    """`replace` is `setattr`, or that of a fixture which undoes it."""
    replace(torch.cuda, "Stream", lambda device: _Stream())
    replace(torch.cuda, "current_stream", lambda device: _Stream())
    replace(torch.cuda, "stream", lambda stream: nullcontext())
    replace(torch.cuda, "device", lambda device: nullcontext())
    replace(torch.cuda, "graph", _recording)
    replace(torch.cuda, "CUDAGraph", Recording)
    modes: list[Any] = [0]
    replace(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    replace(torch.cuda, "set_sync_debug_mode", modes.append)
