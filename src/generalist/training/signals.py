"""SIGINT and SIGTERM become a request that the loop answers between two iterations."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Which signal arrived, if any."""

    received: int | None = None

    def __init__(self, *, patient: bool = False) -> None:
        self.patient = patient

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and not self.patient:  # asked twice: stop at once, without a checkpoint
            raise KeyboardInterrupt
        self.received = number


@contextmanager
def stop_requests(*, patient: bool = False) -> Iterator[StopRequest]:
    """Catch the signals while the block runs. Only the main thread can; elsewhere nothing is caught.

    `patient`: a second signal changes nothing. A launcher and a scheduler may each send one to every process of a job.
    """
    request = StopRequest(patient=patient)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.handle) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
