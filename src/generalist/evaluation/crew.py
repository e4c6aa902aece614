"""Batches that are attacked at once, each on a thread of its own: how small tensors use several cores.

An operation on a small batch is too short to be shared between cores. On the CPU a crew attacks several batches at
once instead, each with its own share of PyTorch's threads. How many follows from the machine and the settings of the
evaluation, never from what survived: in float32 a result can depend on the number of threads as on the batch's shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from generalist.attacks.pgd import Classifier
from generalist.evaluation.packing import HEAVY

MOST = 8
"""Threads of a crew: beyond, they would wait for the interpreter rather than compute."""

Result = TypeVar("Result")


def crew_size(device: torch.device, *, batches: int, operations: float = 0.0) -> int:
    """How many batches to attack at once, of so many that an attack on all samples has.

    Of a heavy network two threads share one batch: its operations are long enough for that, and two batches beside each
    other would drive one another's activations out of the caches.
    """
    if device.type != "cpu":
        return 1
    threads = torch.get_num_threads() // (2 if operations >= HEAVY else 1)
    return max(1, min(threads, batches, MOST))


class StoppedError(Exception):
    """The crew is sent home in the middle of a batch."""


class Crew:
    """Runs work on its threads; with a size of 1, on the caller's own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._home = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._threads = torch.get_num_threads()

    def __enter__(self) -> Self:
        if self.size > 1:
            share = max(1, self._threads // self.size)
            # PyTorch's number of threads belongs to the thread that sets it.
            self._pool = ThreadPoolExecutor(self.size, "attack", initializer=torch.set_num_threads, initargs=(share,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the batches in flight; after an error or an interrupt they stop at their next forward pass."""
        if self._pool is None:
            return
        if kind is not None:
            self._home.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        # What a thread sets is also what threads begin with that are made later.
        torch.set_num_threads(self._threads)

    def hire(self, network: Classifier) -> Classifier:
        """The network for work of this crew: it can be stopped."""

        def answer(x: Tensor) -> Tensor:
            if self._home.is_set():
                raise StoppedError
            return network(x)

        return answer if self._pool is not None else network

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        if self._pool is not None:
            return self._pool.submit(work)
        done: Future[Result] = Future()
        done.set_result(work())
        return done
