"""Rewards for two threads: one submits while the other waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from meshsys.rl.prompt import Prompt
from meshsys.rl.rewards import RewardPool, Scores, Ticket

__all__ = ["SharedRewards"]

_LOOK_SECONDS = 0.005


class SharedRewards:
    """A pool that threads take turns with; who waits for scores looks for them now and then, and does not hold it."""

    def __init__(self, pool: RewardPool):
        self._pool, self._turn = pool, threading.Lock()

    def submit(self, samples: Sequence[tuple[Prompt, str]]) -> Ticket:
        """See `RewardPool.submit`."""
        with self._turn:
            return self._pool.submit(samples)

    def collect(self, ticket: Ticket) -> Scores:
        """See `RewardPool.collect`."""
        while True:
            with self._turn:
                if self._pool.ready(ticket):
                    return self._pool.collect(ticket)
            time.sleep(_LOOK_SECONDS)
