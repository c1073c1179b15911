"""SIGINT and SIGTERM as a question that is asked between two batches."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_signals() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the signal received so far, 0 when none.

    Only the first is held back: a second one does at once what it always does. In threads other than the main one,
    where Python handles no signals, nothing changes.
    """
    received = [0]
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def hold_back(number: int, frame: FrameType | None) -> None:
        received[0] = number
        restore()

    for number in _SIGNALS:
        signal.signal(number, hold_back)
    try:
        yield lambda: received[0]
    finally:
        restore()
