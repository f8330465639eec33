"""Queues: which waiting job is next, and what it may do to others.

A queue starts and stops jobs of a `State` until it has nothing more to do at this moment. One registry; each is a
function of the state, but `easy`, which remembers its reservation.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod

if TYPE_CHECKING:
    from meshsys.cluster.state import Run, State

__all__ = ["PREEMPTIVE", "QUEUES", "Queue", "make_queue"]


class Queue(Protocol):
    """Starts and stops jobs."""

    def __call__(self, state: State) -> None: ...


def _fcfs(state: State) -> None:
    """In the order of arrival; the first that does not fit holds up all behind it."""
    while len(state.waiting):
        grant = state.fitting(state.waiting.first)
        if grant is None:
            return
        state.start(state.waiting.first, grant)


def _backfill(state: State) -> None:
    """What fits among the first `window` jobs behind the first starts; the first may starve."""
    _fcfs(state)
    while any([_started(state, job, state.fitting(job)) for job in _candidates(state)]):
        pass  # those that started let others into the window


def _started(state: State, job: int, grant: Grant | None) -> bool:
    if grant is not None:
        state.start(job, grant)
    return grant is not None


def _candidates(state: State) -> list[int]:
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


@dataclass(eq=False)
class _Reservation:
    """Chips that a waiting job will have.

    Attributes:
        job: whose.
        time: seconds, when it will start there.
        grant: the chips.
        borrower: who has some of them until then; None where they are those of several runs.
    """

    job: int
    time: float
    grant: Grant
    borrower: int | None = None


_NAP = 60.0  # seconds after which a first job at most asks for the chips of yet another


class _Easy:
    """Backfill that never delays the first waiting job (EASY: Lifka, JSSPP'95), for shapes.

    The first job that does not fit gets the earliest time at which running jobs will have made room for its shape, and
    the chips it will have then. Jobs behind it may start if they end before, or on other chips. Jobs' durations are
    known.

    With `interrupt`, a first job that lasts at most that part of the time for which others have run since they started
    borrows their chips: they stop, and come back to just these chips when it ends. So no job is held up for more than
    about that part of its time.
    """

    def __init__(self) -> None:
        self._held: _Reservation | None = None  # the first waiting job's
        self._lent: dict[int, _Reservation] = {}  # of jobs that were interrupted; as `State.promised`
        self._rest: Pod | None = None  # the pod without reserved chips
        self._rest_of: tuple[object, ...] = ()
        self._no: set[tuple[object, ...]] = set()  # shapes that do not fit there
        self._releases = -1

    def __call__(self, state: State) -> None:
        self._give_back(state)
        self._start_first(state)
        while candidates := [job for job in _candidates(state) if job not in self._lent]:
            held = self._reservation(state)
            reserved = [*self._lent.values(), *([held] if held else [])]
            if not any([_started(state, job, self._beside(state, job, reserved)) for job in candidates]):
                return

    def _give_back(self, state: State) -> None:
        """Jobs that were interrupted run on where they were."""
        for job, lent in list(self._lent.items()):
            if lent.time <= state.now or lent.borrower not in state.running:
                del self._lent[job]
                state.promised.discard(job)
                # Elsewhere it is the turn of others as well: then, if a chip failed, it waits as they do.
                if state.pod.admits(lent.grant):
                    state.start(job, lent.grant)

    def _first(self, state: State) -> int | None:
        if not self._lent:
            return state.waiting.first if len(state.waiting) else None
        return next((job for job in state.waiting.rows.tolist() if job not in self._lent), None)

    def _start_first(self, state: State) -> None:
        while (job := self._first(state)) is not None:
            held, grant = self._held, None
            if held is not None and held.job == job and state.now >= held.time and state.pod.admits(held.grant):
                # Just these chips were kept free; the policy might prefer others, or miss that they fit.
                grant = held.grant
            grant = grant or self._beside(state, job, list(self._lent.values())) or self._borrow(state, job)
            if grant is None:
                return
            state.start(job, grant)

    def _reservation(self, state: State) -> _Reservation | None:
        """The first job's; found anew when another is first, or when its time has passed without it."""
        job, held = self._first(state), self._held
        if job is None:
            return None
        if held is None or held.job != job or held.time <= state.now:
            self._held = _reserve(state, job, self._lent)
        return self._held

    def _beside(self, state: State, job: int, reserved: list[_Reservation]) -> Grant | None:
        """Chips for a job that it gives back in time, or that nobody has reserved."""
        grant = state.fitting(job)
        if grant is None or not reserved:
            return grant
        ends = state.ends_if(job, grant)
        late = [each for each in reserved if each.time < ends]
        if not late:
            return grant
        if self._releases != state.releases:
            self._no.clear()
            self._releases = state.releases
        shape, whose = state.shape(job), tuple(late)
        if (shape, whose) in self._no:
            return None
        if self._rest is None or self._rest_of != (state.pod.changes, whose):
            self._rest, self._rest_of = state.pod.copy(), (state.pod.changes, whose)
            for each in late:
                self._rest.fail(each.grant.nodes.ravel())
        grant = state.ask(self._rest, shape)
        if grant is None:
            self._no.add((shape, whose))
        return grant

    def _borrow(self, state: State, job: int) -> Grant | None:
        """Chips of jobs that have run so long that this one does not matter to them; those are stopped."""
        share = state.options.interrupt
        if not share or not state.blocked[state.workload.shape[job]]:
            return None
        pause = 60 * state.options.preempt_minutes
        need = float(state.left[job]) + float(state.restart[job]) + pause
        borrowers = {lent.borrower for lent in self._lent.values()}
        behind = [
            run
            for run in state.running.values()
            if (state.now - run.begins) * share >= need and run.ends > state.now and run.job not in borrowers
        ]
        late = [lent for lent in self._lent.values() if lent.time < state.now + need]
        grant, stopped = _instead_of(state, job, behind, late)
        if grant is None:
            soon = (run.begins + need / share for run in state.running.values())
            state.wake = min((max(time, state.now + _NAP) for time in soon if time > state.now), default=math.inf)
            return None
        ends = state.ends_if(job, grant)
        for run in stopped:
            state.stop(run.job, pause)
            self._lent[run.job] = _Reservation(run.job, ends, run.grant, job)
            state.promised.add(run.job)
        return grant


def _reserve(state: State, job: int, lent: dict[int, _Reservation]) -> _Reservation | None:
    """The first end of a run at which, with it and all before it gone, the job fits; None if it never does.

    Jobs that were interrupted have their chips as if they ran, until they will have ended.
    """
    runs, shape, size = state.by_end(), state.shape(job), int(state.size[job])
    back = [(each.time + state.restart[each.job] + state.left[each.job], each.grant) for each in lent.values()]
    ends = sorted({*(run.ends for run in runs), *(float(end) for end, _ in back)})
    count = [bisect.bisect_right(runs, end, key=lambda run: run.ends) for end in ends]
    freed = state.pod.free + np.cumsum([0, *(run.grant.size for run in runs)])[count]
    low, high = int(np.searchsorted(freed, size)), len(ends) - 1
    found: _Reservation | None = None
    while low <= high:
        middle = (low + high) // 2
        trial = state.pod.copy()
        for run in runs[: count[middle]]:
            trial.release(run.job + 1)
        for end, grant in back:
            if end > ends[middle]:
                trial.fail(grant.nodes.ravel())
        fits = state.ask(trial, shape)
        if fits is None:
            low = middle + 1
        else:
            found, high = _Reservation(job, ends[middle], fits), middle - 1
    return found


def _instead_of(
    state: State, job: int, behind: Sequence[Run], late: Sequence[_Reservation] = ()
) -> tuple[Grant | None, list[Run]]:
    """Chips that a job would have if some runs were not there, without what is reserved; and whose of the runs these
    are."""
    if not behind or state.pod.free + sum(run.grant.size for run in behind) < state.size[job]:
        return None, []
    trial = state.pod.copy()
    for run in behind:
        trial.release(run.job + 1)
    for each in late:
        trial.fail(each.grant.nodes.ravel())
    grant = state.ask(trial, state.shape(job))
    if grant is None:
        return None, []
    return grant, [run for run in behind if _overlap(run, grant, state.pod.shared_links)]


# Queues that may stop running jobs

_WORTH = 2.0  # a waiting job takes the chips of those that are so much behind it
_ATTEMPTS = 4  # to stop others, at one moment
_EPOCH = 3600.0  # seconds that slaq looks ahead
_CURVE = 20.0  # how fast losses fall

Rows = NDArray[np.int64]


def _remaining(state: State, rows: Rows, left: NDArray[np.float64]) -> NDArray[np.float64]:
    """srtf: seconds that are left."""
    return left


def _attained(state: State, rows: Rows, left: NDArray[np.float64]) -> NDArray[np.float64]:
    """fair: chip-seconds that a job has had, and a chip-hour: least attained service, as in Tiresias (NSDI'19)."""
    now = [
        (state.now - run.since) * run.grant.size if (run := state.running.get(job)) else 0.0 for job in rows.tolist()
    ]
    return state.attained[rows] + np.array(now) + 3600.0


def _quality(state: State, rows: Rows, left: NDArray[np.float64]) -> NDArray[np.float64]:
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
class _Ranked:
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
        grant, stopped = _instead_of(state, job, behind)
        for run in stopped:
            state.stop(run.job, 60 * state.options.preempt_minutes)
        return grant


def _overlap(run: Run, grant: Grant, shared_links: bool) -> bool:
    chips = np.intersect1d(run.grant.nodes, grant.nodes).size
    return bool(chips or (not shared_links and np.intersect1d(run.grant.links, grant.links).size))


QUEUES: dict[str, Callable[[], Queue]] = {
    "fcfs": lambda: _fcfs,
    "backfill": lambda: _backfill,
    "easy": _Easy,
    "srtf": lambda: _Ranked(_remaining),
    "slaq": lambda: _Ranked(_quality),
    "fair": lambda: _Ranked(_attained),
}
"""Makers of queues, by name."""

PREEMPTIVE = ("srtf", "slaq", "fair")
"""Queues that may stop running jobs, and so are asked again as time passes."""


def make_queue(name: str) -> Queue:
    """A new queue by its name."""
    return QUEUES[name]()
