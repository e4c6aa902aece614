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

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:  # asked twice: stop at once, without a checkpoint
            raise KeyboardInterrupt
        self.received = number


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch the signals while the block runs. Only the main thread can; elsewhere nothing is caught."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.handle) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
