"""Queues: which waiting job is next, and what it may do to others.

A queue starts and stops jobs of a `State` until it has nothing more to do at this moment. Each is a function of the
state; `easy` remembers its reservations.
"""

from __future__ import annotations

from collections.abc import Callable

from meshsys.cluster.queues.base import Queue
from meshsys.cluster.queues.easy import Easy
from meshsys.cluster.queues.in_order import backfill, fcfs
from meshsys.cluster.queues.ranked import Ranked, attained, quality, remaining

__all__ = ["PREEMPTIVE", "QUEUES", "Queue", "make_queue"]

QUEUES: dict[str, Callable[[], Queue]] = {
    "fcfs": lambda: fcfs,
    "backfill": lambda: backfill,
    "easy": Easy,
    "srtf": lambda: Ranked(remaining),
    "slaq": lambda: Ranked(quality),
    "fair": lambda: Ranked(attained),
}
"""Makers of queues, by name."""

PREEMPTIVE = ("srtf", "slaq", "fair")
"""Queues that may stop running jobs, and so are asked again as time passes."""


def make_queue(name: str) -> Queue:
    """A new queue by its name."""
    return QUEUES[name]()
