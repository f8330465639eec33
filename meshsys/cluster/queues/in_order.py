"""Queues in the order of arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshsys.cluster.queues.base import candidates, started

if TYPE_CHECKING:
    from meshsys.cluster.state import State

__all__ = ["backfill", "fcfs"]


def fcfs(state: State) -> None:
    """In the order of arrival; the first that does not fit holds up all behind it."""
    while len(state.waiting):
        grant = state.fitting(state.waiting.first)
        if grant is None:
            return
        state.start(state.waiting.first, grant)


def backfill(state: State) -> None:
    """What fits among the first `window` jobs behind the first starts; the first may starve."""
    fcfs(state)
    while any([started(state, job, state.fitting(job)) for job in candidates(state)]):
        pass  # those that started let others into the window
