"""Host: signals that wait until a run is between two chunks."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def waiting_signals() -> Iterator[list[int]]:
    """Has SIGTERM and SIGINT (Ctrl-C) wait; yields the list of those that came.

    A second SIGINT interrupts at once. What came takes its effect at the end, unless an exception ends the block.
    Outside of the main thread, which alone gets signals, nothing waits.
    """
    came: list[int] = []

    def handle(number, frame):
        if number == signal.SIGINT and came:
            raise KeyboardInterrupt
        came.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if came:
        signal.raise_signal(came[0])
