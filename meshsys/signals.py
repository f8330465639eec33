"""SIGINT and SIGTERM while something runs that can stop only between its steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

__all__ = ["StopSignals", "stop_signals"]


class StopSignals:
    """SIGINT and SIGTERM of a run.

    Attributes:
        wait_for_step: a signal lets the step end; until this is set there is nothing to save, and it ends the process.
        caught: the first signal, once there is one; the second ends the process at once.
    """

    def __init__(self) -> None:
        self.wait_for_step = False
        self.caught: signal.Signals | None = None

    def watch(self, source: int) -> None:
        """Reads signal numbers, a byte each, until the file ends."""
        while byte := os.read(source, 1):
            if byte[0] not in _STOPPING:
                continue
            number = signal.Signals(byte[0])
            if self.caught or not self.wait_for_step:
                _exit_now(number, "at once" if self.caught else "before the first step: nothing is lost")
            self.caught = number


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Watches the signals on a thread of their own, as XLA can keep the main one for minutes."""
    signals = StopSignals()
    source, sink = os.pipe()
    os.set_blocking(sink, False)
    watcher = threading.Thread(target=signals.watch, args=(source,), name="meshsys-signals", daemon=True)
    before = {number: signal.signal(number, lambda *_: None) for number in _STOPPING}
    wakeup = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield signals
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(sink)
        watcher.join()
        os.close(source)


_STOPPING = (signal.SIGINT, signal.SIGTERM)


def _exit_now(number: signal.Signals, when: str) -> NoReturn:
    """Ends the process without waiting for any of its threads; checkpoints and metrics bear that."""
    show_cursor = "\r\n\x1b[?25h" if os.isatty(1) else ""  # the progress bar hides it
    with suppress(OSError):
        os.write(1, f"{show_cursor}stopped by {number.name} {when}\n".encode())
    os._exit(128 + number)
