"""Placement policies: which jobs they can place at all, how fast they decide, and whether they ever give a chip twice.

    python scripts/bench_placement.py completion|decisions|operations|all [--json]

Jobs are those of RFold's generator. Completion rates are static: a job counts if the empty pod has a place for it.
Exits with 1 if a target is missed.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from meshsys.cluster import policies  # noqa: E402
from meshsys.cluster.config import ClusterConfig, WorkloadConfig  # noqa: E402
from meshsys.cluster.pod import Pod  # noqa: E402
from meshsys.cluster.workload import make_workload  # noqa: E402
from meshsys.torus import Topology  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

JOBS = 20_000
DECISIONS = 4_000
OPERATIONS = 100_000

# What RFold's own generator gives, as measured by others; their RFold of cubes of 8 is an upper bound.
RATES = {
    ("first_fit", None): 9.3,
    ("folding", None): 41.9,
    ("reconfig", 8): 32.6,
    ("rfold", 8): 80.0,
    ("reconfig", 4): 100.0,
    ("rfold", 4): 100.0,
}


def completion() -> Iterator[Row]:
    """Per cent of jobs that an empty pod has a place for."""
    shapes, counts = _jobs(JOBS)
    for (name, cube), wanted in RATES.items():
        rate = _rate(name, cube, shapes, counts)
        yield Row(_label(name, cube), rate, "%", wanted + 2, wanted - 2)
    for cube, least in ((None, 41.9), (8, 80.0), (4, 100.0)):
        yield Row(_label("best", cube), _rate("best", cube, shapes, counts), "%", at_least=least)


def decisions() -> Iterator[Row]:
    """Processor time of a decision while jobs come and go and the pod is nearly full."""
    for dims, cube, median, slow in (((16, 16, 16), 4, 1.0, 20.0), ((16, 24, 24), 4, None, 50.0)):
        for name in policies.names():
            spent = _decide(name, Pod(Topology(dims), cube), DECISIONS)
            ours = name == "best"
            what = f"{name} on {np.prod(dims)} chips"
            yield Row(f"{what}: median", float(np.median(spent)), "ms", median if ours else None)
            yield Row(f"{what}: p99", float(np.percentile(spent, 99)), "ms", slow if ours else None)


def operations() -> Iterator[Row]:
    """Places, releases, failures and repairs, with a book of who has which chip beside the pod's own."""
    for name in policies.names():
        begun = time.process_time()
        placed, wrong, unwired = _operate(name, OPERATIONS)
        yield Row(f"{name}: jobs placed", placed, "")
        yield Row(f"{name}: chips or links given twice, or kept", wrong, "", at_most=0)
        yield Row(f"{name}: placements that switches cannot join", unwired, "", at_most=0 if name == "best" else None)
        yield Row(f"{name}: processor time", time.process_time() - begun, "s")


def _jobs(count: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
    workload = make_workload(WorkloadConfig(jobs=count, seed=1), ClusterConfig(topology="16x16x16", cube=4))
    return list(workload.shapes), np.bincount(workload.shape)


def _rate(name: str, cube: int | None, shapes: list[tuple[int, ...]], counts: np.ndarray) -> float:
    policy, pod = policies.get(name), Pod(Topology((16, 16, 16)), cube)
    able = np.array([policy.possible(pod, shape) for shape in shapes])
    return float(100 * counts[able].sum() / counts.sum())


def _label(name: str, cube: int | None) -> str:
    return f"{name}, {f'cubes of {cube}' if cube else 'torus'}"


def _decide(name: str, pod: Pod, count: int) -> list[float]:
    policy, rng = policies.get(name), random.Random(1)
    shapes, counts = _jobs(JOBS)
    spent = []
    for job in range(1, count + 1):
        shape = rng.choices(shapes, counts)[0]
        begun = time.thread_time()
        grant = policy.place(pod, shape)
        spent.append(1e3 * (time.thread_time() - begun))
        if grant is not None:
            pod.take(job, grant)
        elif pod.jobs:
            pod.release(rng.choice(list(pod.jobs)))
    return spent


def _operate(name: str, count: int) -> tuple[int, int, int]:
    """Jobs placed, mistakes, and placements that are not wireable."""
    policy, rng = policies.get(name), random.Random(2)
    pod = Pod(Topology((16, 16, 16)), 4)
    shapes, counts = _jobs(JOBS)
    cumulative = np.cumsum(counts).tolist()
    chips, links = np.zeros(pod.size, np.int64), np.zeros(2 * pod.ndim * pod.size, np.int64)
    failed = np.zeros(pod.size, bool)
    placed = wrong = unwired = job = 0
    while count > 0:
        job += 1
        grant = policy.place(pod, rng.choices(shapes, cum_weights=cumulative)[0])
        count -= 1
        if grant is not None:
            nodes = grant.nodes.ravel()
            wrong += int(chips[nodes].any() or links[grant.links].any() or failed[nodes].any())
            wrong += int(len(np.unique(nodes)) != len(nodes))
            unwired += not grant.wireable
            pod.take(job, grant)
            chips[nodes], links[grant.links] = job, job
            placed += 1
        while pod.jobs and (grant is None or rng.random() < 0.2):
            gone = rng.choice(list(pod.jobs))
            chips[pod.jobs[gone].nodes], links[pod.jobs[gone].links] = 0, 0
            pod.release(gone)
            count -= 1
            if rng.random() < 0.7:
                break
        if rng.random() < 0.02:
            broken = rng.sample(range(pod.size), 3)
            pod.fail(broken)
            failed[broken] = True
        if rng.random() < 0.02 and failed.any():
            whole = rng.sample(np.flatnonzero(failed).tolist(), min(3, int(failed.sum())))
            pod.repair(whole)
            failed[whole] = False
    for gone in list(pod.jobs):
        pod.release(gone)
    pod.repair(range(pod.size))
    wrong += int(pod.free != pod.size or pod.owner.any() or pod.shared)
    return placed, wrong, unwired


BENCHMARKS = {
    "completion": (completion, f"16x16x16, {JOBS} jobs"),
    "decisions": (decisions, f"cubes of 4, {DECISIONS} decisions"),
    "operations": (operations, f"16x16x16, cubes of 4, {OPERATIONS} operations a policy"),
}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))
