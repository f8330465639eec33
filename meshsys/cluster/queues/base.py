"""What queues are, and what several of them do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshsys.cluster.grant import Grant

if TYPE_CHECKING:
    from meshsys.cluster.state import Run, State

__all__ = ["Queue", "candidates", "instead_of", "started"]


class Queue(Protocol):
    """Starts and stops jobs."""

    def __call__(self, state: State) -> None: ...


def started(state: State, job: int, grant: Grant | None) -> bool:
    """Starts a job if there are chips for it; whether there were."""
    if grant is not None:
        state.start(job, grant)
    return grant is not None


def candidates(state: State) -> list[int]:
    """Jobs behind the first, within the window, in the order in which they may overtake; without those known not to
    fit."""
    window, order = state.options.reach, state.options.order
    rows = state.waiting.rows[1 : None if window is None else window + 1]
    rows = rows[~state.blocked[state.workload.shape[rows]]]
    rows = rows[state.size[rows] <= state.pod.free]
    if order == "shortest":
        rows = rows[np.argsort(state.left[rows], kind="stable")]
    elif order == "largest":
        rows = rows[np.argsort(-state.size[rows], kind="stable")]
    found: list[int] = rows.tolist()
    return found


def instead_of(
    state: State, job: int, behind: Sequence[Run], kept: Sequence[Grant] = ()
) -> tuple[Grant | None, list[Run]]:
    """Chips that a job would have if some runs were not there, none of those that are to be kept free; and whose of
    the runs these are."""
    if not behind or state.pod.free + sum(run.grant.size for run in behind) < state.size[job]:
        return None, []
    trial = state.pod.copy()
    for run in behind:
        trial.release(run.job + 1)
    for each in kept:
        trial.fail(each.nodes.ravel())
    grant = state.ask(trial, state.shape(job))
    if grant is None:
        return None, []
    return grant, [run for run in behind if _overlap(run, grant, state.pod.shared_links)]


def _overlap(run: Run, grant: Grant, shared_links: bool) -> bool:
    chips = np.intersect1d(run.grant.nodes, grant.nodes).size
    return bool(chips or (not shared_links and np.intersect1d(run.grant.links, grant.links).size))
