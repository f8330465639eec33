"""Which of the jobs that wait gets chips now, and which.

The queues of the simulator know how long jobs last. Here nobody does, so `easy` keeps the chips free that the first
job will have, whatever the others' length.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from meshsys.cluster.factors import factorisations
from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies import Policy
from meshsys.cluster.store import Job

__all__ = ["choose", "possible_shapes"]

Shape = tuple[int, ...]


def choose(
    queue: str, pod: Pod, policy: Policy, failed: Collection[int], waiting: Sequence[Job], ending: Sequence[int]
) -> tuple[Job, Grant] | None:
    """The next job to start, and its chips; None if there is none now.

    Args:
        queue: `fcfs`, `backfill` or `easy`.
        pod: with the jobs that run, by their ids.
        failed: chips that are out of use.
        waiting: those that may start, the first first.
        ending: ids of jobs that run, the first to end first.
    """
    idle = pod.empty()
    idle.fail(failed)
    shapes = [possible_shapes(idle, policy, job.spec.shape) for job in waiting]
    room = pod
    for place, job in enumerate(waiting):
        grant = _fitting(room, policy, shapes[place])
        if grant is not None:
            return job, grant
        if queue == "fcfs" or not pod.free:
            return None
        if place == 0 and queue == "easy":
            room = _without_reservation(pod, policy, shapes[0], ending)
    return None


def possible_shapes(idle: Pod, policy: Policy, shape: Shape) -> tuple[Shape, ...]:
    """The shape; where failed chips leave it no place even without jobs, all others of its size that have one, the
    likest first.

    Args:
        idle: the pod with its failed chips and no jobs.
    """
    if idle.free == idle.size or policy.place(idle, shape) is not None:
        return (shape,)
    others = factorisations(math.prod(shape), max(idle.ndim, len(shape)))
    trimmed = {tuple(side for side in sides if side > 1) or (1,) for sides in others}
    likest = sorted(trimmed, key=lambda sides: (abs(len(sides) - len(shape)), sides))
    return tuple(sides for sides in likest if policy.place(idle, sides) is not None)


def _fitting(pod: Pod, policy: Policy, shapes: Sequence[Shape]) -> Grant | None:
    placed = (policy.place(pod, shape) for shape in shapes if math.prod(shape) <= pod.free)
    return next((grant for grant in placed if grant is not None), None)


def _without_reservation(pod: Pod, policy: Policy, shapes: Sequence[Shape], ending: Sequence[int]) -> Pod:
    """The pod without the chips that a job will have once enough of those that run have ended."""
    trial = pod.copy()
    for running in ending:
        trial.release(running)
        grant = _fitting(trial, policy, shapes)
        if grant is not None:
            rest = pod.copy()
            rest.fail(grant.nodes.ravel().tolist())
            return rest
    return pod  # only a repair will give it a place
