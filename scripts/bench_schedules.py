"""What schedules cost on paper, and how long it takes to find that out.

    python scripts/bench_schedules.py makespan|memory|links|regions|size|all [--json]

All but `size` are counts, the same on every machine; `size` is processor time. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from schedules.actions import Kind, Schedule, split_backward  # noqa: E402
from schedules.costs import Costs, Link  # noqa: E402
from schedules.families import describe, make, names  # noqa: E402
from schedules.search import Question, lower_bound  # noqa: E402
from schedules.simulate import simulate  # noqa: E402
from schedules.slots import Lifetime, build_table  # noqa: E402
from schedules.validate import validate  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

RANKS, MICROBATCHES = 8, 32
LONG_RANKS, LONG_MICROBATCHES = 32, 512
LESS_MEMORY = {"v_half": 0.60, "v_min": 0.48}


def makespan() -> Iterator[Row]:
    """Lock-step time; F, I and W of 1/P of the model take a unit each."""
    targets = {"zb_h1": 106.0, "zb_h2": 104.0, "zbv": 102.0}
    for name in names():
        schedule = _split(name, RANKS, MICROBATCHES)
        costs = Costs.per_rank(schedule)
        found = simulate(schedule, costs)
        yield Row(name, found.makespan, "", targets.get(name))
        held = max(found.peak_activations)
        if name in targets or name in LESS_MEMORY:
            chunks = schedule.depth // RANKS
            bound = lower_bound(Question(RANKS, MICROBATCHES, costs, memory_cap=held, chunks=chunks))
            yield Row(f"  no schedule with {held:g} activations takes less than", bound, "")


def memory() -> Iterator[Row]:
    """The most that a rank holds, over 1f1b's, as the simulator counts and as the compiled program has slots for."""
    one = _split("1f1b", RANKS, MICROBATCHES)
    for name in names():
        schedule = _split(name, RANKS, MICROBATCHES)
        target = LESS_MEMORY.get(name, 1.0 if name in ("zb_h1", "zbv") else None)
        held, base = (max(simulate(each, Costs()).peak_activations) for each in (schedule, one))
        yield Row(f"{name}: activations, F to W", held / base, "x", target)
        for what, start, end in (("F to W", Kind.F, Kind.W), ("F to I", Kind.F, Kind.I)):
            slots, base = (_slots(each, start, end) for each in (schedule, one))
            yield Row(f"  slots, {what}", slots / base, "x", target if end is Kind.W else None)
        yield Row("  slots, I to W, in microbatches of 1/P of the model", _slots(schedule, Kind.I, Kind.W), "")


def links() -> Iterator[Row]:
    """Ranks that run freely, full backwards of two units, and transfers as long as a forward."""
    for group, target in ((1, None), (2, 131.0), (4, None)):
        schedule = make("kfkb", ranks=RANKS, microbatches=MICROBATCHES, group=group)
        found = simulate(schedule, Costs(send=1), "asynchronous")
        yield Row(f"kfkb, group={group}, {max(found.peak_activations):g} activations", found.makespan, "", target)


# CrossPipe's table 5 (arXiv:2507.00217), case 1: seconds a microbatch by latency and transfer over a forward.
TABLE_5 = {
    (0, 0): {"1f1b": 0.151, "zb_h1": 0.133, "zbv": 0.118, "cross_region": 0.137, "cross_region_wave": 0.119},
    (0.25, 2): {"1f1b": 0.241, "zb_h1": 0.230, "zbv": 0.315, "cross_region": 0.177, "cross_region_wave": 0.250},
    (2, 0.25): {"1f1b": 0.242, "zb_h1": 0.229, "zbv": 0.314, "cross_region": 0.153, "cross_region_wave": 0.148},
    (2, 2): {"1f1b": 0.321, "zb_h1": 0.309, "zbv": 0.473, "cross_region": 0.196, "cross_region_wave": 0.256},
}


def regions() -> Iterator[Row]:
    """Two regions of four ranks and a slow link between them; times over zb_h1's without delay, and the paper's.

    The target is that the paper's best schedule is the best one here.
    """
    base = None
    for (latency, transfer), paper in TABLE_5.items():
        slow = tuple(Link(*pair, latency, transfer) for pair in ((3, 4), (4, 3)))
        found = {}
        for name in paper:
            unit = 1 / describe(name).chunks
            costs = Costs(F=unit, I=unit, W=unit, links=slow)
            given = costs if describe(name).takes_costs else None
            schedule = make(name, ranks=RANKS, microbatches=16, costs=given)
            found[name] = simulate(schedule, costs, "asynchronous").makespan
        base = found["zb_h1"] if base is None else base
        best = min(paper, key=paper.__getitem__)
        for name, time_found in found.items():
            what = f"latency {latency:g}, transfer {transfer:g}: {name} (paper {paper[name] / 0.133:.2f})"
            yield Row(what, time_found / base, "x", min(found.values()) / base if name == best else None)


def size() -> Iterator[Row]:
    """Build, validate, lay out in ticks, simulate."""
    for name in names():
        start = time.process_time()
        schedule = _split(name, LONG_RANKS, LONG_MICROBATCHES)
        validate(schedule)
        simulate(schedule, Costs.per_rank(schedule))
        yield Row(name, time.process_time() - start, "s", 5.0)


def _split(name: str, ranks: int, microbatches: int) -> Schedule:
    return split_backward(make(name, ranks=ranks, microbatches=microbatches))


def _slots(schedule: Schedule, start: Kind, end: Kind) -> float:
    """Buffer slots of the compiled program, each as large as a stage's share of the model."""
    lifetime = Lifetime(frozenset(range(schedule.stages)), start, end)
    return build_table(schedule, [lifetime]).counts[lifetime] * schedule.ranks / schedule.depth


AT = f"{RANKS} ranks, {MICROBATCHES} microbatches"
BENCHMARKS = {
    "makespan": (makespan, AT),
    "memory": (memory, AT),
    "links": (links, AT),
    "regions": (regions, f"{RANKS} ranks, 16 microbatches"),
    "size": (size, f"{LONG_RANKS} ranks, {LONG_MICROBATCHES} microbatches"),
}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))
