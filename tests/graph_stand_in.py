"""The graph engine on a machine without CUDA: replaying runs the iteration that was recorded.

This checks the engine's book-keeping, not CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from generalist.training.graph import GraphEngine


class Recording:
    """Stands in for a CUDA graph of `engine`, which whoever makes the engine puts here."""

    engine: GraphEngine

    def replay(self) -> None:
        self.engine._step_inside()


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
    replace(torch.cuda, "graph", lambda graph, capture_error_mode: nullcontext())
    replace(torch.cuda, "CUDAGraph", Recording)
    modes: list[Any] = [0]
    replace(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    replace(torch.cuda, "set_sync_debug_mode", modes.append)
