"""Queues that put jobs in an order of their own, and may stop running ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.grant import Grant
from meshsys.cluster.queues.base import instead_of

if TYPE_CHECKING:
    from meshsys.cluster.state import State

__all__ = ["Ranked", "attained", "quality", "remaining"]

_WORTH = 2.0  # a waiting job takes the chips of those that are so much behind it
_ATTEMPTS = 4  # to stop others, at one moment
_EPOCH = 3600.0  # seconds that slaq looks ahead
_CURVE = 20.0  # how fast losses fall

Rows = NDArray[np.int64]


def remaining(state: State, rows: Rows, left: NDArray[np.float64]) -> NDArray[np.float64]:
    """srtf: seconds that are left."""
    return left


def attained(state: State, rows: Rows, left: NDArray[np.float64]) -> NDArray[np.float64]:
    """fair: chip-seconds that a job has had, and a chip-hour: least attained service, as in Tiresias (NSDI'19)."""
    now = [
        (state.now - run.since) * run.grant.size if (run := state.running.get(job)) else 0.0 for job in rows.tolist()
    ]
    return state.attained[rows] + np.array(now) + 3600.0


def quality(state: State, rows: Rows, left: NDArray[np.float64]) -> NDArray[np.float64]:
    """slaq: chip-seconds for a unit of quality, over the next hour (SLAQ: Zhang et al., SoCC'17).

    A job's loss falls from 1 to 0 along 1 / (1 + 20 x), x being the part of its work that is done: the sublinear
    curve that SLAQ fits to losses. Its jobs share chips in any proportion; these run whole, or wait.
    """
    duration = state.workload.duration[rows]
    done = 1 - left / duration
    then = np.minimum(1.0, done + _EPOCH / duration)
    gain = (1 / (1 + _CURVE * done) - 1 / (1 + _CURVE * then)) / (1 - 1 / (1 + _CURVE))
    return state.size[rows] * np.minimum(_EPOCH, left) / np.maximum(gain, 1e-12)


@dataclass(frozen=True)
class Ranked:
    """The job with the least of a quantity first; it may stop those that have twice as much."""

    rank: Callable[[State, Rows, NDArray[np.float64]], NDArray[np.float64]]

    def __call__(self, state: State) -> None:
        attempts = _ATTEMPTS if state.options.preempt else 0
        rows, ranks = self._waiting(state)
        for job, rank in zip(rows, ranks, strict=True):
            grant = state.fitting(job)
            if grant is None and attempts:
                attempts -= 1
                grant = self._make_room(state, job, rank)
            if grant is not None:
                state.start(job, grant)
        if len(state.waiting) and attempts < state.options.preempt * _ATTEMPTS:
            for job in self._waiting(state)[0]:  # those that were stopped may fit elsewhere
                grant = state.fitting(job)
                if grant is not None:
                    state.start(job, grant)

    def _waiting(self, state: State) -> tuple[list[int], list[float]]:
        rows = state.waiting.rows
        if not len(rows):
            return [], []
        ranks = self.rank(state, rows, state.left[rows])
        order = np.argsort(ranks, kind="stable")[: state.options.reach]
        return rows[order].tolist(), ranks[order].tolist()

    def _make_room(self, state: State, job: int, rank: float) -> Grant | None:
        """Stops the runs behind a job whose chips it can use; without those, all that may be stopped are tried."""
        least = 60 * state.options.quantum_minutes
        runs = [run for run in state.running.values() if state.now - run.begins >= least]
        rows = np.array([run.job for run in runs], np.int64)
        ranks = self.rank(state, rows, np.array([state.work_left(run) for run in runs]))
        behind = [run for run, theirs in zip(runs, ranks.tolist(), strict=True) if theirs >= _WORTH * rank]
        grant, stopped = instead_of(state, job, behind)
        for run in stopped:
            state.stop(run.job, 60 * state.options.preempt_minutes)
        return grant
