"""The state of a simulated cluster: what waits, what runs and until when, and the operations on it.

Queues see this alone. Whether a shape fits is asked of the policy once, and its "no" holds until chips come back: a
job that starts makes room for none.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.config import ClusterConfig, PolicyConfig
from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies import Policy
from meshsys.cluster.traces import Shape
from meshsys.cluster.workload import Workload

__all__ = ["Run", "State", "Waiting"]


@dataclass
class Run:
    """A job that runs.

    Attributes:
        job: its row in the workload.
        grant: its chips.
        since: seconds, when it got them.
        begins: seconds, when it has started up on them.
        rate: of its work, in seconds that it was to last for a second that passes.
        ends: seconds.
    """

    job: int
    grant: Grant
    since: float
    begins: float
    rate: float
    ends: float


class Waiting:
    """Rows of the jobs that wait, ascending, which is the order of arrival; in one array."""

    def __init__(self) -> None:
        self._rows = np.empty(64, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> NDArray[np.int64]:
        """A view, until the next `add` or `remove`."""
        return self._rows[: self._count]

    @property
    def first(self) -> int:
        return int(self._rows[0])

    def add(self, job: int) -> None:
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        place = self._count
        if place and self._rows[place - 1] > job:  # it waited before, and comes back
            place = int(np.searchsorted(self.rows, job))
            self._rows[place + 1 : self._count + 1] = self._rows[place : self._count].copy()
        self._rows[place] = job
        self._count += 1

    def remove(self, job: int) -> None:
        place = int(np.searchsorted(self.rows, job))
        self._rows[place : self._count - 1] = self._rows[place + 1 : self._count].copy()
        self._count -= 1


class State:
    """One policy's cluster at one moment, `now`.

    Attributes:
        pod, policy, workload: where jobs run, who places them, which they are.
        options: the policy's configuration.
        now: seconds.
        waiting: jobs without chips.
        running: by job.
        promised: waiting jobs to which the queue will give back the chips that they had; nobody else starts them.
        left: float64 [jobs] seconds of work that a job has still to do, at its nominal size and speed; for one that
            runs, as it was when it got its chips.
        attained: float64 [jobs] chip-seconds that a job has had; for one that runs, before it got its chips.
        restart: float64 [jobs] seconds that a job takes to start up, next time.
        ends: heap of (seconds, job) of runs; an entry whose run has another end is void.
        wake: seconds, when the queue wants to be asked even if nothing happens.
        decisions: seconds that each answer of the policy took.
        releases: how often chips came back.
    """

    def __init__(
        self,
        pod: Pod,
        policy: Policy,
        workload: Workload,
        cluster: ClusterConfig,
        options: PolicyConfig,
        efficiency: float = 1.0,
    ):
        self.pod, self.policy, self.workload, self.options = pod, policy, workload, options
        self._cluster = cluster
        self.now = 0.0
        self.waiting = Waiting()
        self.running: dict[int, Run] = {}
        self.promised: set[int] = set()
        self.wake = math.inf
        self.size = workload.size
        self.left = workload.duration.copy()
        self.attained = np.zeros(len(workload))
        self.restart = np.zeros(len(workload))
        self.ends: list[tuple[float, int]] = []
        self.decisions: list[float] = []
        self.violations = 0
        self.joined = 0
        self.grants = 0
        self.moves = np.zeros(len(workload), np.int64)
        self.starts = np.zeros(len(workload), np.int64)
        self.first_start = np.full(len(workload), np.nan)
        self.releases = 0
        self.blocked = np.zeros(len(workload.shapes), bool)
        self._no: set[Shape] = set()  # shapes beside the workload's that do not fit now
        self._shape = workload.shape.tolist()
        self._sizes = self.size.tolist()
        self._place = {shape: place for place, shape in enumerate(workload.shapes)}
        self._efficiency = efficiency

    # What queues ask

    def shape(self, job: int) -> Shape:
        return self.workload.shapes[self._shape[job]]

    def fitting(self, job: int) -> Grant | None:
        """Chips for a waiting job as it asked for them, if there are any now."""
        index = self._shape[job]
        if self.blocked[index]:
            return None
        grant = self.ask(self.pod, self.workload.shapes[index])
        if grant is None:
            self.blocked[index] = True
        return grant

    def fitting_shape(self, shape: Shape) -> Grant | None:
        """Chips for any shape, if there are any now."""
        if shape in self._no or ((index := self._place.get(shape)) is not None and self.blocked[index]):
            return None
        grant = self.ask(self.pod, shape)
        if grant is None:
            self._no.add(shape)
        return grant

    def ask(self, pod: Pod, shape: Shape) -> Grant | None:
        """The policy's answer for a pod, this one or a copy; one that takes time is measured."""
        if math.prod(shape) > pod.free:
            return None
        begun = time.perf_counter()
        grant = self.policy.place(pod, shape)
        self.decisions.append(time.perf_counter() - begun)
        return grant

    def ends_if(self, job: int, grant: Grant) -> float:
        """When a waiting job would end if it got these chips now."""
        return self.now + self._pause(job, grant) + float(self.left[job]) / self.rate(job, grant)

    def by_end(self) -> list[Run]:
        """All runs, the first to end first."""
        return sorted(self.running.values(), key=lambda run: (run.ends, run.job))

    def work_left(self, run: Run) -> float:
        """Seconds of nominal work that a running job has still to do."""
        return float(self.left[run.job]) - max(0.0, self.now - run.begins) * run.rate

    # What queues do

    def start(self, job: int, grant: Grant) -> None:
        """Gives a waiting job its chips."""
        self.waiting.remove(job)
        self._run(job, grant, self._pause(job, grant))
        self.starts[job] += 1
        if self.starts[job] == 1:
            self.first_start[job] = self.now

    def stop(self, job: int, restart: float) -> None:
        """A running job waits again, with the work it has left, and takes `restart` seconds more next time."""
        self._halt(self.running[job])
        self.restart[job] = restart
        self.waiting.add(job)

    def move(self, grants: dict[int, Grant], pause: float) -> None:
        """Running jobs get other chips all at once, and stand still for `pause` seconds."""
        for job in grants:
            self._halt(self.running[job])
        for job, grant in grants.items():
            self._run(job, grant, pause)
            self.moves[job] += 1

    # What the simulator does

    def finish(self, run: Run) -> None:
        """Takes the chips of a job that has ended."""
        self._halt(run)
        self.left[run.job] = 0.0

    def lose(self, job: int, checkpoint: float, restart: float) -> None:
        """A running job lost a chip: it waits again, with what it did since its last checkpoint still to do."""
        run = self.running[job]
        ran = max(0.0, self.now - run.begins)
        lost = (ran % checkpoint if checkpoint else 0.0) * run.rate
        self.stop(job, restart)
        self.left[job] += lost

    def freed(self) -> None:
        """Chips came back: what did not fit may fit now."""
        self.blocked[:] = False
        self._no.clear()
        self.releases += 1

    # Parts

    def rate(self, job: int, grant: Grant) -> float:
        """Speed of a job on a grant: 1 on its own shape with links between neighbours and rings closed."""
        scale = (grant.size / self._sizes[job]) ** self._efficiency if grant.size != self._sizes[job] else 1.0
        part = self._cluster.communication
        if not part:
            return scale
        ways = [
            (2 if closed or side == 2 else 1) for side, closed in zip(grant.shape, grant.wrap, strict=True) if side > 1
        ]
        slower = grant.dilation * 2 * len(ways) / sum(ways) if ways else 1.0
        return scale / (1 - part + part * slower)

    def _pause(self, job: int, grant: Grant) -> float:
        joining = self._cluster.reconfigure_seconds if len(grant.cubes) > 1 else 0.0
        return float(self.restart[job]) + joining

    def _run(self, job: int, grant: Grant, pause: float) -> None:
        self.pod.take(job + 1, grant)
        rate = self.rate(job, grant)
        begins = self.now + pause
        ends = begins + float(self.left[job]) / rate
        self.running[job] = Run(job, grant, self.now, begins, rate, ends)
        heapq.heappush(self.ends, (ends, job))
        self.grants += 1
        self.joined += len(grant.cubes) > 1
        self.violations += not grant.wireable

    def _halt(self, run: Run) -> None:
        self.left[run.job] = max(self.work_left(run), 0.0)
        self.attained[run.job] += (self.now - run.since) * run.grant.size
        self.pod.release(run.job + 1)
        del self.running[run.job]
        self.freed()
