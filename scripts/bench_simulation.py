"""What the simulator says of schedules for slow links, beside what the papers measured, and how fast it says it.

    python scripts/bench_simulation.py links|groups|speed|all [--json]

`links` is table 5 of CrossPipe (arXiv:2507.00217): 8 ranks in two regions, 16 microbatches in 1f1b's memory; times over
that of zb_h1 without delay, the paper's over its own. `groups` is Ada-Grouper's case (arXiv:2303.01675). `speed`
builds, validates and simulates 32 ranks x 512 microbatches. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from schedules.actions import Schedule  # noqa: E402
from schedules.costs import Costs, Link  # noqa: E402
from schedules.families import describe, make  # noqa: E402
from schedules.simulate import simulate  # noqa: E402
from schedules.validate import validate  # noqa: E402


@dataclass(frozen=True)
class Row:
    """One number, beside the paper's or a target that it may not pass."""

    what: str
    value: float
    paper: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        return self.at_most is None or self.value <= self.at_most


# Seconds a microbatch, by (latency, transfer) over the time of a forward.
_NAMES = ("1f1b", "zb_h1", "zbv", "cross_region", "cross_region_wave")
_TABLE_5 = {
    (0, 0): (0.151, 0.133, 0.118, 0.137, 0.119),
    (0.25, 2): (0.241, 0.230, 0.315, 0.177, 0.250),
    (2, 0.25): (0.242, 0.229, 0.314, 0.153, 0.148),
    (2, 2): (0.321, 0.309, 0.473, 0.196, 0.256),
}


def links() -> Iterator[Row]:
    """Makespans over that of zb_h1 without delay."""
    unit = None
    for (latency, transfer), paper in _TABLE_5.items():
        slow = (Link(3, 4, latency, transfer), Link(4, 3, latency, transfer))
        found = {}
        for name in _NAMES:
            part = 1 / describe(name).chunks
            costs = Costs(F=part, I=part, W=part, links=slow)
            schedule = _make(name, 8, 16, costs)
            found[name] = simulate(schedule, costs, "asynchronous").makespan
        unit = found["zb_h1"] if unit is None else unit
        best = min(_NAMES, key=lambda name: paper[_NAMES.index(name)])
        for name, seconds in zip(_NAMES, paper, strict=True):
            least = min(found.values()) / unit if name == best else None
            yield Row(f"latency {latency}, transfer {transfer}: {name}", found[name] / unit, seconds / 0.133, least)


def groups() -> Iterator[Row]:
    """Makespans where a transfer lasts as long as a forward, B twice as long."""
    costs = Costs(F=1, B=2, send=1)
    for group, target in ((1, 185.0), (2, 131.0), (4, None)):
        schedule = make("kfkb", ranks=8, microbatches=32, group=group)
        yield Row(f"kfkb, k={group}", simulate(schedule, costs, "asynchronous").makespan, at_most=target)


def speed() -> Iterator[Row]:
    """Seconds of processor time: build, validate, simulate both ways; per simulation at most 2, in all at most 5."""
    for name in ("1f1b", "zb_h1", "zbv", "cross_region"):
        begun = time.process_time()
        schedule = _make(name, 32, 512, Costs())
        validate(schedule)
        ready = time.process_time()
        yield Row(f"{name}: build and validate", ready - begun)
        for timing in ("lockstep", "asynchronous"):
            at = time.process_time()
            simulate(schedule, Costs(send=0.5, transfer=0.25), timing)  # type: ignore[arg-type]
            yield Row(f"{name}: simulate, {timing}", time.process_time() - at, at_most=2.0)
        yield Row(f"{name}: all", time.process_time() - begun, at_most=5.0)


def _make(name: str, ranks: int, microbatches: int, costs: Costs) -> Schedule:
    given = costs if describe(name).takes_costs else None
    return make(name, ranks=ranks, microbatches=microbatches, costs=given)


BENCHMARKS: dict[str, Callable[[], Iterator[Row]]] = {"links": links, "groups": groups, "speed": speed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--json", action="store_true", help="one JSON object, {benchmark: rows}")
    arguments = parser.parse_args()
    found = {}
    for name in BENCHMARKS if arguments.benchmark == "all" else [arguments.benchmark]:
        rows = list(BENCHMARKS[name]())
        found[name] = [asdict(row) | {"met": row.met} for row in rows]
        if arguments.json:
            continue
        print(f"\n{name}\n{'':48}{'value':>10}{'paper':>10}{'at most':>10}")
        for row in rows:
            cells = "".join("".rjust(10) if x is None else f"{x:10.3f}" for x in (row.value, row.paper, row.at_most))
            print(f"{row.what:48}{cells}{'' if row.met else '  FAIL'}")
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0 if all(row["met"] for rows in found.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
