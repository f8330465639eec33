"""A cluster simulator that goes second by second and asks the policy anew every time.

No events, no memory of what did not fit, no copies of pods: at every second it ends what ends, lets come what comes,
and goes through the queue from the beginning. Whole seconds only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshsys.cluster.pod import Pod
from meshsys.cluster.policies import Policy


@dataclass(eq=False)
class NaiveJob:
    arrival: int
    duration: int
    shape: tuple[int, ...]
    start: int = -1
    grant: Any = None

    def runs(self, now: int) -> bool:
        return 0 <= self.start <= now < self.end

    @property
    def end(self) -> int:
        return self.start + self.duration


class Naive:
    def __init__(self, pod: Pod, policy: Policy, jobs: Sequence[NaiveJob], queue: str, window: int, order: str):
        self.pod, self.policy, self.jobs = pod, policy, jobs
        self.queue, self.window, self.order = queue, window, order
        self.now = 0
        self.reserved: tuple[NaiveJob, int, Any] | None = None  # whose, when, where

    def run(self) -> None:
        """Fills in the start of every job."""
        while any(job.start < 0 for job in self.jobs):
            if self.queue == "srtf":  # without stopping others
                for job in sorted(self.waiting(), key=lambda job: job.duration)[: self.window]:
                    self.start(job, self.fitting(job))
            else:
                while self.waiting() and self.start(self.waiting()[0], self.for_first(self.waiting()[0])):
                    pass
                while self.queue != "fcfs" and self.overtake():
                    pass
            self.now += 1

    def waiting(self) -> list[NaiveJob]:
        return [job for job in self.jobs if job.start < 0 and job.arrival <= self.now]

    def start(self, job: NaiveJob, grant: Any) -> bool:
        if grant is not None:
            job.start, job.grant = self.now, grant
        return grant is not None

    def pod_now(self, ended_by: int = -1) -> Pod:
        """The pod with the jobs that run now and do not end by a later time."""
        pod = self.pod.empty()
        for number, job in enumerate(self.jobs, 1):
            if job.runs(self.now) and job.end > ended_by:
                pod.take(number, job.grant)
        return pod

    def fitting(self, job: NaiveJob) -> Any:
        return self.policy.place(self.pod_now(), job.shape)

    def for_first(self, job: NaiveJob) -> Any:
        if self.reserved and self.reserved[0] is job and self.now >= self.reserved[1]:
            if self.pod_now().admits(self.reserved[2]):
                return self.reserved[2]
        return self.fitting(job)

    def overtake(self) -> bool:
        """Whether a job behind the first started; then others may be in the window."""
        first, *behind = self.waiting()[: self.window + 1] or [None]
        if self.order == "shortest":
            behind.sort(key=lambda job: job.duration)
        elif self.order == "largest":
            behind.sort(key=lambda job: -math.prod(job.shape))
        # As by a scheduler that plans ahead only when somebody could overtake.
        if self.queue == "easy" and any(self.fitting(job) is not None for job in behind):
            if not self.reserved or self.reserved[0] is not first or self.reserved[1] <= self.now:
                self.reserved = self.reserve(first)
        return any([self.start(job, self.beside(job)) for job in behind])

    def beside(self, job: NaiveJob) -> Any:
        grant = self.fitting(job)
        if self.queue == "easy" and grant is not None and self.reserved and self.now + job.duration > self.reserved[1]:
            rest = self.pod_now()
            rest.fail(self.reserved[2].nodes.ravel())
            grant = self.policy.place(rest, job.shape)
        return grant

    def reserve(self, first: NaiveJob) -> tuple[NaiveJob, int, Any] | None:
        """The first end of a running job at which, with it and all before it gone, the first waiting job fits."""
        for end in sorted({job.end for job in self.jobs if job.runs(self.now)}):
            grant = self.policy.place(self.pod_now(ended_by=end), first.shape)
            if grant is not None:
                return first, end, grant
        return None
