"""Running jobs that give way: migration against fragmentation, and elastic jobs that shrink, grow and refold.

Both ask the policy on a copy of the pod, and change the pod only when all of it works out. While the queue has promised
chips to jobs, they are left where they are.
"""

from __future__ import annotations

import math

import numpy as np

from meshsys.cluster.config import ElasticConfig
from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.state import Run, State
from meshsys.cluster.traces import Shape, compact_shape

__all__ = ["Elasticity", "Migration", "sizes_of"]


class Migration:
    """Moves running jobs together, so that the first waiting job fits.

    Tried only where enough chips are free and their shape alone is in the way. Jobs in the emptiest cubes are lifted,
    1, 2, 4, ... of them; the waiting job is placed, then they are, the largest first.
    """

    def __init__(self) -> None:
        self._tried = -1, -1

    def __call__(self, state: State) -> bool:
        """Whether jobs were moved, and the first waiting one started."""
        options = state.options.migration
        if not options.jobs or not len(state.waiting) or state.promised:
            return False
        job = state.waiting.first
        waited = state.now - max(float(state.workload.arrival[job]), 0.0)
        if state.size[job] > state.pod.free or waited < 60 * options.wait_minutes:
            return False
        if self._tried == (job, state.pod.changes):
            return False
        self._tried = job, state.pod.changes
        movers = self._movers(state, 60 * options.every_minutes)
        count = 1
        while count <= min(options.jobs, len(movers)):
            plan = _repack(state, job, movers[:count])
            if plan is not None:
                own, moved = plan
                # Those that come back to just the chips they had do not notice.
                changed = {run.job: moved[run.job] for run in movers[:count] if not _same(run.grant, moved[run.job])}
                state.move(changed, 60 * options.minutes)
                state.start(job, own)
                return True
            if count == min(options.jobs, len(movers)):
                break
            count = min(2 * count, options.jobs, len(movers))
        return False

    def _movers(self, state: State, stay: float) -> list[Run]:
        pod = state.pod
        used = np.bincount(pod.cube_of[pod.owner != 0], minlength=int(pod.cube_of.max()) + 1)
        runs = [run for run in state.running.values() if state.now - run.since >= stay and run.ends > state.now]

        def cost(run: Run) -> tuple[int, int, int]:
            return int(used[pod.cube_of[run.grant.nodes.ravel()]].max()), run.grant.size, run.job

        return sorted(runs, key=cost)


def _same(one: Grant, other: Grant) -> bool:
    return one.shape == other.shape and bool((one.nodes == other.nodes).all())


def _repack(state: State, job: int, runs: list[Run]) -> tuple[Grant, dict[int, Grant]] | None:
    """Chips for a waiting job and then for the runs that give way; None if they do not all fit."""
    trial = state.pod.copy()
    for run in runs:
        trial.release(run.job + 1)
    own = state.ask(trial, state.shape(job))
    if own is None:
        return None
    trial.take(job + 1, own)
    moved: dict[int, Grant] = {}
    for run in sorted(runs, key=lambda run: (-run.grant.size, run.job)):
        # Where it was is best, if it is still free.
        grant = run.grant if trial.admits(run.grant) else state.ask(trial, run.grant.shape)
        if grant is None:
            return None
        trial.take(run.job + 1, grant)
        moved[run.job] = grant
    return own, moved


_STAY = 3600.0  # seconds between two changes of a job's size
_MOST_TRIED = 8  # jobs at one moment


def sizes_of(shape: Shape, least: float, most: float) -> list[Shape]:
    """Shapes that an elastic job can have, the largest first, its own among them.

    Sides are halved, the largest even one first, or doubled, the smallest one first; and its own size also comes as
    the most compact box.
    """
    size = math.prod(shape)
    found = [shape]
    while len(found) < 16:
        sides = list(found[-1])
        even = [side for side in sides if side % 2 == 0]
        if not even or math.prod(sides) / 2 < least * size:
            break
        place = len(sides) - 1 - sides[::-1].index(max(even))
        sides[place] //= 2
        found.append(tuple(sides))
    compact = compact_shape(size, len(shape))
    if compact != tuple(sorted(shape)):
        found.insert(1, compact)
    while len(found) < 32:
        sides = list(found[0])
        if math.prod(sides) * 2 > most * size:
            break
        sides[sides.index(min(sides))] *= 2
        found.insert(0, tuple(sides))
    return found


class Elasticity:
    """Elastic jobs: start smaller or in another shape, shrink for the first waiting job, grow where nothing waits."""

    def __init__(self, config: ElasticConfig) -> None:
        self._config = config
        self._shapes: dict[Shape, list[Shape]] = {}
        self._tried = -1

    def __call__(self, state: State) -> bool:
        """Whether a job started or changed its size."""
        if not self._config.share or state.promised:
            return False
        if len(state.waiting):
            job = state.waiting.first
            return (state.workload.elastic[job] and self._start(state, job)) or self._shrink(state, job)
        return self._grow(state)

    def _options(self, shape: Shape) -> list[Shape]:
        if shape not in self._shapes:
            self._shapes[shape] = sizes_of(shape, self._config.least, self._config.most)
        return self._shapes[shape]

    def _start(self, state: State, job: int) -> bool:
        """In its own size as another box, or smaller."""
        for shape in self._options(state.shape(job)):
            if math.prod(shape) <= state.size[job]:
                grant = state.fitting_shape(shape)
                if grant is not None:
                    state.start(job, grant)
                    return True
        return False

    def _settled(self, state: State) -> list[Run]:
        """Elastic runs whose size has not changed for a while, the largest first."""
        runs = [
            run
            for run in state.running.values()
            if state.workload.elastic[run.job] and state.now - run.since >= _STAY and run.ends > state.now
        ]
        return sorted(runs, key=lambda run: (-run.grant.size, run.job))[:_MOST_TRIED]

    def _shrink(self, state: State, job: int) -> bool:
        """Elastic runs take less, one after another, until the first waiting job fits."""
        trial, changed = state.pod.copy(), {}
        for run in self._settled(state):
            smaller = [shape for shape in self._options(state.shape(run.job)) if math.prod(shape) < run.grant.size]
            if not smaller:
                continue
            kept = _within(trial, run, smaller, state)
            if kept is None:
                continue
            changed[run.job] = kept
            own = state.ask(trial, state.shape(job))
            if own is not None:
                state.move(changed, 60 * self._config.restart_minutes)
                state.start(job, own)
                return True
        return False

    def _grow(self, state: State) -> bool:
        """Elastic runs take more, where that pays for the restart."""
        if not state.pod.free or self._tried == state.pod.changes:
            return False
        self._tried = state.pod.changes
        pause = 60 * self._config.restart_minutes
        for run in self._settled(state)[::-1]:
            larger = [shape for shape in self._options(state.shape(run.job)) if math.prod(shape) > run.grant.size]
            trial = state.pod.copy()
            trial.release(run.job + 1)
            for shape in larger:
                grant = state.ask(trial, shape)
                if grant is not None:
                    ends = state.now + pause + state.work_left(run) / state.rate(run.job, grant)
                    if ends < run.ends:
                        state.move({run.job: grant}, pause)
                        return True
                    break
        return False


def _within(trial: Pod, run: Run, shapes: list[Shape], state: State) -> Grant | None:
    """Gives a run, on the trial pod, the largest of the smaller shapes that it finds room for."""
    trial.release(run.job + 1)
    for shape in shapes:
        grant = state.ask(trial, shape)
        if grant is not None:
            trial.take(run.job + 1, grant)
            return grant
    trial.take(run.job + 1, run.grant)
    return None
