"""Backfill with a reservation for the first job."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.queues.base import candidates, instead_of, started

if TYPE_CHECKING:
    from meshsys.cluster.state import State

__all__ = ["Easy"]


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


class Easy:
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
        self._asked: tuple[int, int, int] | None = None  # the last vain question for chips to borrow

    def __call__(self, state: State) -> None:
        self._give_back(state)
        self._start_first(state)
        while behind := [job for job in candidates(state) if job not in self._lent]:
            held = self._reservation(state)
            reserved = [*self._lent.values(), *([held] if held else [])]
            if not any([started(state, job, self._beside(state, job, reserved)) for job in behind]):
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
        asked = job, state.releases, len(behind)
        late = [lent.grant for lent in self._lent.values() if lent.time < state.now + need]
        grant, stopped = (None, []) if asked == self._asked else instead_of(state, job, behind, late)
        # With a slower placement it may last longer than it was to.
        lasts = 0.0 if grant is None else state.ends_if(job, grant) - state.now + pause
        if grant is None or any((state.now - run.begins) * share < lasts - 1e-6 for run in stopped):
            self._asked = asked
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
