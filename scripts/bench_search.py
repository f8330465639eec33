"""What `meshsys schedule search` finds, beside what no schedule could beat.

    python scripts/bench_search.py uneven|equal|free|chunks|long|all [--json]

Makespans are the simulator's, the same on every machine; processor time is this one's. Exits with 1 if a target is
missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from schedules.costs import Costs  # noqa: E402
from schedules.search import Question, search  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

UNEVEN = Costs(F=1, I=1.3, W=0.7)
HALVES = Costs(F=0.5, I=0.65, W=0.35)


def uneven() -> Iterator[Row]:
    """Twice 1f1b's activations, and its own; split 1f1b takes 140."""
    yield from _rows("cap 16", Question(8, 32, UNEVEN, 16), 110, seconds=60)
    yield from _rows("cap 8", Question(8, 32, UNEVEN, 8), 117, seconds=60)


def equal() -> Iterator[Row]:
    """Where zb_h1 cannot be beaten."""
    yield from _rows("cap 8", Question(8, 32, Costs(), 8), 103)
    yield from _rows("cap 16", Question(8, 32, Costs(), 16), 103)


def free() -> Iterator[Row]:
    """Ranks that run freely; zb_h1 and zb_h2 take 107.2, and with transfers zb_h2 takes 110."""
    for cap, target in ((8, 107.2), (12, 104.4), (16, 103.0)):
        yield from _rows(f"cap {cap}", Question(8, 32, UNEVEN, cap, "asynchronous"), target + 1e-6)
    yield from _rows("cap 16, transfers of 0.5", Question(8, 32, Costs(send=0.5), 16, "asynchronous"), 106.5)


def chunks() -> Iterator[Row]:
    """Two stages a rank."""
    yield from _rows("cap 8", Question(8, 32, HALVES, 8, chunks=2))


def long() -> Iterator[Row]:
    """Far beyond the exact methods; zb_h2 takes 2026.9."""
    yield from _rows("cap 64", Question(32, 512, UNEVEN, 64, seconds=5), 1800)


def _rows(what: str, question: Question, target: float | None = None, seconds: float | None = None) -> Iterator[Row]:
    begun = time.process_time()
    answer = search(question)
    spent = time.process_time() - begun
    assert max(answer.timeline.peak_activations) <= question.memory_cap
    yield Row(f"{what}: makespan ({answer.method})", answer.makespan, "", target)
    yield Row(f"{what}: lower bound{', proved optimal' if answer.optimal else ''}", answer.lower_bound, "")
    yield Row(f"{what}: processor time", spent, "s", seconds)


COSTS = "F=1, I=1.3, W=0.7"
BENCHMARKS = {
    "uneven": (uneven, f"lock step, {COSTS}, 8 ranks, 32 microbatches"),
    "equal": (equal, "lock step, F=I=W=1, 8 ranks, 32 microbatches"),
    "free": (free, f"asynchronous, {COSTS}, 8 ranks, 32 microbatches"),
    "chunks": (chunks, f"lock step, {COSTS} over two stages a rank, 8 ranks, 32 microbatches"),
    "long": (long, f"lock step, {COSTS}, 32 ranks, 512 microbatches"),
}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))
