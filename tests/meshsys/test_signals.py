"""What a signal does, and when."""

from __future__ import annotations

import os
import signal
import time

from meshsys import signals as module


def test_signals_before_and_after_the_first_step(monkeypatch):
    """Before it the first signal ends the process, afterwards the second."""
    ended = []
    monkeypatch.setattr(module, "_exit_now", lambda number, when: ended.append((number, when)))

    def send(number: signal.Signals) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.1)

    with module.stop_signals() as signals:
        send(signal.SIGTERM)
        assert ended == [(signal.SIGTERM, "before the first step: nothing is lost")]
    with module.stop_signals() as signals:
        signals.wait_for_step = True
        send(signal.SIGTERM)
        assert signals.caught is signal.SIGTERM and len(ended) == 1
        send(signal.SIGINT)
        assert ended[1:] == [(signal.SIGINT, "at once")]
