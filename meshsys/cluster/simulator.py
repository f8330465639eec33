"""The event-driven simulator: arrivals, ends, failures and repairs, and between them what the queue does.

The same configuration gives the same result, times of decisions apart. Events of one moment happen in this order:
ends, repairs, failures, arrivals; then the queue, migration and elastic jobs are asked, until nothing changes.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster import policies
from meshsys.cluster.adapt import Elasticity, Migration, sizes_of
from meshsys.cluster.config import ClusterConfig, ElasticConfig, PolicyConfig
from meshsys.cluster.pod import FAILED, FREE, Pod
from meshsys.cluster.policies import Policy
from meshsys.cluster.queues import PREEMPTIVE, make_queue
from meshsys.cluster.state import State
from meshsys.cluster.traces import Shape
from meshsys.cluster.workload import Workload
from meshsys.errors import ConfigError
from meshsys.torus import Topology, TopologyError

__all__ = ["Outcome", "Series", "make_pod", "simulate"]

_SNAPSHOTS = 32


@dataclass(frozen=True, eq=False)
class Series:
    """What changed over time; row i holds from `time[i]` to `time[i + 1]`.

    Attributes:
        time: float64 seconds, rising.
        used: int64 chips that jobs have.
        broken: int64 free chips that lie in cubes which jobs have a part of.
        waiting: int64 jobs that wait.
        failed: int64 chips that are out of use.
    """

    time: NDArray[np.float64]
    used: NDArray[np.int64]
    broken: NDArray[np.int64]
    waiting: NDArray[np.int64]
    failed: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one policy made of a workload; arrays have a row a job, NaN where it has none.

    Attributes:
        chips: of the pod.
        dims: of the pod.
        workload: the jobs.
        arrival, start, end: float64 seconds; `start` is the first one.
        refused: jobs that could not be placed at all.
        blocked_resource, blocked_shape, blocked_order: float64 seconds that each waited for want of chips; for want of
            a shape, with chips enough; or behind others, its own shape not being tried.
        starts, moves: how often each got chips after waiting, and how often while it ran.
        series: over time.
        until: seconds up to which utilisation counts: the last arrival, or the last end where all arrive at once.
        grants, joined, violations: placements, those of more than one cube, and those that cannot be wired.
        decisions: float64 seconds of each answer of the policy.
        snapshots: seconds, and whose each chip was: 0 nobody's, -1 out of use, else the job's row plus 1.
    """

    chips: int
    dims: tuple[int, ...]
    workload: Workload
    arrival: NDArray[np.float64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    refused: NDArray[np.bool_]
    blocked_resource: NDArray[np.float64]
    blocked_shape: NDArray[np.float64]
    blocked_order: NDArray[np.float64]
    starts: NDArray[np.int64]
    moves: NDArray[np.int64]
    series: Series
    until: float
    grants: int
    joined: int
    violations: int
    decisions: NDArray[np.float64]
    snapshots: tuple[tuple[float, NDArray[np.int64]], ...]


def make_pod(config: ClusterConfig) -> Pod:
    """The cluster's pod, with the chips that are out of use from the beginning.

    Raises:
        ConfigError: a topology that cannot be, cubes it is not made of, or a failed chip that it does not have.
    """
    try:
        topology = Topology.parse(config.topology, "cluster.topology")
    except TopologyError as error:
        raise ConfigError(str(error)) from None
    pod = Pod(topology, config.cube, config.wiring, shared_links=config.shared_links, options="cluster.")
    for place, chip in enumerate(config.failures.failed):
        if len(chip) != pod.ndim or not all(0 <= at < side for at, side in zip(chip, pod.dims, strict=True)):
            raise ConfigError(
                f"cluster.failures.failed.{place}={list(chip)} is no chip of {config.topology}; "
                f"give {pod.ndim} coordinates, each below its dimension"
            )
    if config.failures.failed:
        pod.fail([int(np.ravel_multi_index(chip, pod.dims)) for chip in config.failures.failed])
    return pod


def simulate(
    cluster: ClusterConfig,
    workload: Workload,
    options: PolicyConfig,
    elastic: ElasticConfig | None = None,
    policy: Policy | None = None,
) -> Outcome:
    """Runs a workload under one policy to its end.

    Args:
        elastic: what elastic jobs may do; None: nothing.
        policy: instead of `options.placement`.

    Raises:
        ConfigError: a pod or a policy that cannot be.
    """
    if policy is None:
        policy = policies.get(options.placement, "placement")
    return _Simulation(cluster, workload, options, elastic or ElasticConfig(), policy).run()


_REPAIR, _FAILURE = 0, 1  # kinds of chip events, in their order at one moment


class _Simulation:
    def __init__(
        self,
        cluster: ClusterConfig,
        workload: Workload,
        options: PolicyConfig,
        elastic: ElasticConfig,
        policy: Policy,
    ):
        self.cluster, self.workload, self.options = cluster, workload, options
        pod = make_pod(cluster)
        self.state = State(pod, policy, workload, cluster, options, elastic.efficiency)
        self.queue = make_queue(options.queue)
        self.adapt = (Migration(), Elasticity(elastic))
        count = len(workload)
        self.arrival = workload.arrival.copy()
        self.come = 0  # jobs that have come
        self.end = np.full(count, np.nan)
        self.refused = np.zeros(count, bool)
        self.open = count  # jobs that have not ended and are not refused
        self.blocked = np.zeros((3, count))  # resource, shape, order
        self.possible = _possible(pod, policy, workload, elastic)
        self.chip_events: list[tuple[float, int, int]] = []
        self.random = np.random.default_rng(cluster.failures.seed)
        self.quantum = 60 * options.quantum_minutes if options.queue in PREEMPTIVE and options.preempt else 0.0
        self.recorder = _Recorder(pod, workload)
        self.last_come = 0.0

    def run(self) -> Outcome:
        self._next_failure()
        while self.open:
            now = self._next_moment()
            if now == math.inf:
                self._give_up()
                continue
            self._wait_until(now)
            self._end_runs()
            self._change_chips()
            self._arrive()
            self._schedule()
        self.recorder.record(self.state)
        return self._outcome()

    # Time

    def _next_moment(self) -> float:
        ends = self.state.ends
        while ends and not self._is_end(*ends[0]):
            heapq.heappop(ends)
        moments = [self.state.wake]
        if ends:
            moments.append(ends[0][0])
        if self.come < len(self.workload) and (self.workload.backlog is None or not self.come):
            moments.append(float(self.arrival[self.come]))
        if self.chip_events and (ends or len(moments) > 1 or self._repairs):
            # Failures go on for ever; without a job that runs or will come they matter only until all is repaired.
            moments.append(self.chip_events[0][0])
        return min(moments)

    @property
    def _repairs(self) -> bool:
        return any(kind == _REPAIR for _, kind, _ in self.chip_events)

    def _is_end(self, time: float, job: int) -> bool:
        run = self.state.running.get(job)
        return run is not None and run.ends == time

    def _wait_until(self, now: float) -> None:
        """Counts what the jobs that wait are waiting for."""
        state = self.state
        passed = now - state.now
        if passed > 0 and len(state.waiting):
            rows = state.waiting.rows
            large = state.size[rows] > state.pod.free
            shaped = state.blocked[self.workload.shape[rows]]
            reason = np.where(large, 0, np.where(shaped, 1, 2))
            self.blocked[reason, rows] += passed
        state.now = now
        if now >= state.wake:
            state.wake = math.inf

    # Events

    def _end_runs(self) -> None:
        state = self.state
        while state.ends and state.ends[0][0] <= state.now:
            time, job = heapq.heappop(state.ends)
            if self._is_end(time, job):
                state.finish(state.running[job])
                self.end[job] = time
                self.open -= 1

    def _next_failure(self) -> None:
        mean = self.cluster.failures.mtbf_hours
        if mean is not None:
            wait = self.random.exponential(3600 * mean / self.state.pod.size)
            chip = int(self.random.integers(self.state.pod.size))
            heapq.heappush(self.chip_events, (self.state.now + wait, _FAILURE, chip))

    def _change_chips(self) -> None:
        failures, state = self.cluster.failures, self.state
        while self.chip_events and self.chip_events[0][0] <= state.now:
            _, kind, chip = heapq.heappop(self.chip_events)
            if kind == _REPAIR:
                state.pod.repair([chip])
                state.freed()
                continue
            self._next_failure()
            owner = int(state.pod.owner[chip])
            if owner == FAILED:
                continue
            for job in state.pod.fail([chip]):
                state.lose(job - 1, 60 * failures.checkpoint_minutes, 60 * failures.restart_minutes)
            heapq.heappush(self.chip_events, (state.now + 3600 * failures.repair_hours, _REPAIR, chip))

    def _arrive(self) -> None:
        if self.workload.backlog is None:
            while self.come < len(self.workload) and self.arrival[self.come] <= self.state.now:
                self._come()

    def _feed(self) -> bool:
        """Fills the backlog up; whether a job came."""
        before = self.come
        if self.workload.backlog is not None:
            while self.come < len(self.workload) and len(self.state.waiting) < self.workload.backlog:
                self.arrival[self.come] = self.last_come = self.state.now
                self._come()
        return self.come > before

    def _come(self) -> None:
        job = self.come
        self.come += 1
        if self.possible[job]:
            self.state.waiting.add(job)
        else:
            self.refused[job] = True
            self.open -= 1

    def _schedule(self) -> None:
        state = self.state
        while True:
            fed = self._feed()
            if len(state.waiting):
                self.queue(state)
            if not (any(adapt(state) for adapt in self.adapt) or self._feed() or (fed and not len(state.waiting))):
                break
        if self.quantum and len(state.waiting) and state.wake == math.inf and state.running:
            state.wake = state.now + self.quantum
        self.recorder.record(state)

    def _give_up(self) -> None:
        """Nothing runs, comes or is repaired any more: the first job that waits never starts (RFold does the same)."""
        job = self.state.waiting.first
        self.state.waiting.remove(job)
        self.refused[job] = True
        self.open -= 1
        self._schedule()

    def _outcome(self) -> Outcome:
        state, recorder = self.state, self.recorder
        ends = self.end[np.isfinite(self.end)]
        last = float(ends.max()) if len(ends) else 0.0
        until = self.last_come if self.workload.backlog is not None else float(self.arrival[-1])
        return Outcome(
            chips=state.pod.size,
            dims=state.pod.dims,
            workload=self.workload,
            arrival=self.arrival,
            start=state.first_start,
            end=self.end,
            refused=self.refused,
            blocked_resource=self.blocked[0],
            blocked_shape=self.blocked[1],
            blocked_order=self.blocked[2],
            starts=state.starts,
            moves=state.moves,
            series=recorder.series(),
            until=until if until > 0 else last,
            grants=state.grants,
            joined=state.joined,
            violations=state.violations,
            decisions=np.array(state.decisions),
            snapshots=tuple(recorder.snapshots),
        )


def _possible(pod: Pod, policy: Policy, workload: Workload, elastic: ElasticConfig) -> NDArray[np.bool_]:
    """Which jobs the pod, empty as it is now, has chips for: those that are out of use from the beginning stay so."""

    def fits(shape: Shape) -> bool:
        return policy.possible(pod, shape) and (pod.free == pod.size or policy.place(pod, shape) is not None)

    found = np.array([fits(shape) for shape in workload.shapes])
    other = found.copy()  # in another size or shape
    if elastic.share:
        for place, shape in enumerate(workload.shapes):
            other[place] |= any(fits(each) for each in sizes_of(shape, elastic.least, 1.0))
    return np.where(workload.elastic & (elastic.share > 0), other[workload.shape], found[workload.shape])


class _Recorder:
    """Keeps the series, and pictures of the pod at some moments, spread over the whole run."""

    def __init__(self, pod: Pod, workload: Workload):
        self._rows: list[tuple[float, int, int, int, int]] = []
        self._changes = -1
        self._broken = self._used = self._failed = 0
        self._cubes = pod.cube_of if pod.cube else _blocks(pod)
        self._count = int(self._cubes.max()) + 1
        self._room = np.bincount(self._cubes, minlength=self._count)
        self.snapshots: list[tuple[float, NDArray[np.int64]]] = []
        # Doubled, and every other picture dropped, whenever there are too many.
        self._every = max(float(workload.arrival[-1]), float((workload.size * workload.duration).sum()) / pod.size)
        self._every /= _SNAPSHOTS

    def record(self, state: State) -> None:
        pod = state.pod
        if self._changes != pod.changes:
            self._changes = pod.changes
            owner = pod.owner
            free = np.bincount(self._cubes[owner == FREE], minlength=self._count)
            self._failed = int(np.count_nonzero(owner == FAILED))
            self._used = pod.size - pod.free - self._failed
            self._broken = int(free[free < self._room].sum())
        row = (state.now, self._used, self._broken, len(state.waiting), self._failed)
        if self._rows and self._rows[-1][0] == state.now:
            self._rows.pop()
        self._rows.append(row)
        if not self.snapshots or state.now >= self.snapshots[-1][0] + self._every:
            self.snapshots.append((state.now, pod.owner.astype(np.int64)))
            if len(self.snapshots) > 2 * _SNAPSHOTS:
                self.snapshots = self.snapshots[::2]
                self._every *= 2

    def series(self) -> Series:
        columns = [np.array(column) for column in zip(*self._rows, strict=True)]
        return Series(*columns)


def _blocks(pod: Pod) -> NDArray[np.int64]:
    """For a pod without cubes: blocks of at most 4 chips a side, which stand for them."""
    sides = [max(side for side in (4, 3, 2, 1) if length % side == 0) for length in pod.dims]
    grid = tuple(length // side for length, side in zip(pod.dims, sides, strict=True))
    return np.asarray(np.ravel_multi_index(tuple((pod.coords // sides).T), grid))
