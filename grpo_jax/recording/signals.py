"""Host: signals that take effect between two chunks of a run."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class StopSignal(SystemExit):
    """A signal ended a run between two chunks, and all of it is saved. Exits with the code that shells expect."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Defers SIGTERM and SIGINT (Ctrl-C) to the end of the block; yields the list of those received so far.

    A second SIGINT interrupts at once. If an exception ends the block, the deferred signals are dropped. Only the main
    thread receives signals: in another one, nothing is deferred.
    """
    received: list[int] = []

    def handle(number, frame):
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    handlers = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if received:
        signal.raise_signal(received[0])
