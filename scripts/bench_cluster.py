"""What the cluster simulator says of policies, beside the targets; and how long it takes.

    python scripts/bench_cluster.py reconfig|load|saturated|philly|all [--json]

Figures other than times are the same on every machine. `philly` needs the trace ../shared/traces/philly_trace.csv, or
the path in PHILLY_TRACE. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from meshsys.cluster.config import ClusterConfig, MigrationConfig, PolicyConfig, WorkloadConfig  # noqa: E402
from meshsys.cluster.metrics import Metrics, measure  # noqa: E402
from meshsys.cluster.simulator import simulate  # noqa: E402
from meshsys.cluster.workload import make_workload  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

CUBES = ClusterConfig(topology="16x16x16", cube=4)
SEEDS = (1, 2, 3)
TRACE = os.environ.get("PHILLY_TRACE", str(Path(__file__).resolve().parents[2] / "shared/traces/philly_trace.csv"))


def load() -> Iterator[Row]:
    """RFold's queue, then ours, without and with what it may do to running jobs."""
    for queue in ("fcfs", "backfill"):
        for found in _seeds("", WorkloadConfig(jobs=1500, load=0.4), placement="rfold", queue=queue):
            yield from _times(found)
    for found in _seeds("alone", WorkloadConfig(jobs=1500, load=0.4), placement="best", queue="easy", interrupt=0):
        yield from _times(found)
    for found in _seeds("", WorkloadConfig(jobs=1500, load=0.4), placement="best", queue="easy"):
        yield from _times(found, p50=0.6, p99=400)
        yield Row(f"{found.name}: placements that cannot be wired", found.wireability_violations, "", 0)
        yield Row(f"{found.name}: longest wait", found.waiting.longest_hours, "h")


def reconfig() -> Iterator[Row]:
    """RFold's own comparison; what its repository plots, p50 5.52 and 0.47 h, lies between loads of 0.1 and 0.2."""
    workload = WorkloadConfig(jobs=1500, load=0.15)
    ratios = []
    for plain, folded in zip(
        _seeds("", workload, placement="reconfig", queue="fcfs"),
        _seeds("", workload, placement="rfold", queue="fcfs"),
        strict=True,
    ):
        for found in (plain, folded):
            yield from _times(found)
        ratios.append(plain.jct_p50_hours / folded.jct_p50_hours)
    yield Row("p50 of reconfig over rfold, the middle of 3 seeds", sorted(ratios)[1], "x", at_least=5)


def saturated() -> Iterator[Row]:
    """64 jobs wait at any time; durations are cut to a week."""
    for generator, target in (("tpu_v4", 85.0), ("rfold", 80.0)):
        workload = WorkloadConfig(generator=generator, jobs=1200, load="saturated", longest_hours=168)  # type: ignore[arg-type]
        cases: list[tuple[str, dict[str, Any], float | None]] = [
            ("", dict(placement="rfold", queue="backfill"), None),
            ("alone", dict(placement="best", queue="easy", interrupt=0), None),
            ("", dict(placement="best", queue="easy"), target),
            ("migration", dict(placement="best", queue="easy", migration=MigrationConfig(jobs=32)), None),
        ]
        for note, options, least in cases:
            for found in _seeds(note, workload, **options):
                name = f"{generator}: {found.name}"
                yield Row(f"{name}: utilised", 100 * found.utilisation.mean, "%", at_least=least)
                if least is not None:
                    starved = found.jobs - found.refused - found.finished
                    yield Row(f"{name}: jobs that never ended", starved, "", 0)
                    yield Row(f"{name}: longest wait", found.waiting.longest_hours, "h")


def philly() -> Iterator[Row]:
    """The whole trace, one core."""
    if not Path(TRACE).is_file():
        print(f"{TRACE} is absent; set PHILLY_TRACE", file=sys.stderr)
        return
    begun = time.process_time()
    workload = make_workload(WorkloadConfig(generator="trace", path=TRACE, format="philly"), CUBES)
    yield Row("reading the trace: processor time", time.process_time() - begun, "s")
    for placement, queue in (("first_fit", "fcfs"), ("best", "easy")):
        options = PolicyConfig(placement=placement, queue=queue)
        begun = time.process_time()
        found = measure(simulate(CUBES, workload, options), options)
        yield Row(f"{found.name}: processor time", time.process_time() - begun, "s", 180)
        yield Row(f"{found.name}: decision, median", found.decision_ms_p50, "ms", 1)
        yield Row(f"{found.name}: decision, p99", found.decision_ms_p99, "ms", 20)


def _seeds(note: str, workload: WorkloadConfig, **options: Any) -> Iterator[Metrics]:
    for seed in SEEDS:
        policy = PolicyConfig(**options)
        policy = policy.model_copy(update={"name": f"{policy.label}{f' {note}' if note else ''}, seed {seed}"})
        made = _workload(workload.model_copy(update={"seed": seed}))
        yield measure(simulate(CUBES, made, policy), policy)


@lru_cache
def _workload(config: WorkloadConfig) -> Any:
    return make_workload(config, CUBES)


def _times(found: Metrics, p50: float | None = None, p99: float | None = None) -> Iterator[Row]:
    yield Row(f"{found.name}: JCT p50", found.jct_p50_hours, "h", p50)
    yield Row(f"{found.name}: JCT p99", found.jct_p99_hours, "h", p99)


BENCHMARKS = {
    "reconfig": (reconfig, "RFold's mix, 16x16x16, cubes of 4, Philly durations, offered load 0.15, 1500 jobs"),
    "load": (load, "RFold's mix, 16x16x16, cubes of 4, Philly durations, offered load 0.4, 1500 jobs"),
    "saturated": (saturated, "16x16x16, cubes of 4, Philly durations up to a week, 1200 jobs, 64 of them waiting"),
    "philly": (philly, "111,539 jobs on 4096 chips"),
}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))
