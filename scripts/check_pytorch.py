"""Runs PyTorch's own schedule generators through our parser and simulator, beside our families of the same name.

    python scripts/check_pytorch.py interleaved|loops|v|all [--json]

Needs `pip install torch` (a build for CPU will do). Every schedule is exported as PyTorch's compute-only CSV, read,
validated and simulated, in lock step and with ranks that run freely, with several costs. Exits with 1 where one of
ours takes longer than PyTorch's.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from schedules.actions import Schedule, from_csv, split_backward  # noqa: E402
from schedules.costs import Costs  # noqa: E402
from schedules.families import make  # noqa: E402
from schedules.simulate import Timing, simulate  # noqa: E402
from schedules.validate import validate  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

RANKS, MICROBATCHES = (2, 4, 8), (8, 16, 17, 32)
COSTS = {"F=I=W": Costs(), "F=1, I=1.3, W=0.7": Costs(F=1, I=1.3, W=0.7), "with sends": Costs(send=0.25)}
TIMINGS: tuple[Timing, ...] = ("lockstep", "asynchronous")
# PyTorch's class, our family, chunks a rank.
GROUPS: dict[str, list[tuple[str, str, int]]] = {
    "interleaved": [("ScheduleInterleaved1F1B", "interleaved_1f1b", chunks) for chunks in (2, 4)],
    "loops": [("ScheduleLoopedBFS", "looped_bfs", 2)],
    "v": [("ScheduleZBVZeroBubble", "zbv", 2), ("ScheduleDualPipeV", "dualpipe_v", 2)],
}


def compare(group: str) -> Iterator[Row]:
    """Ours over PyTorch's makespan; what a class refuses to make is left out."""
    for theirs, family, chunks in GROUPS[group]:
        for backwards in ("full", "split"):
            ratios = []
            for ranks in RANKS:
                for microbatches in MICROBATCHES:
                    other = exported(theirs, ranks, chunks, microbatches)
                    if other is not None:
                        given = {} if group == "v" else {"chunks": chunks}
                        own = make(family, ranks=ranks, microbatches=microbatches, **given)
                        if backwards == "split":
                            own, other = split_backward(own), split_backward(other)
                        ratios += list(_ratios(own, other))
            if ratios:
                what = f"{theirs}, {chunks} chunks, {backwards} backwards"
                yield Row(f"{what}: comparisons", len(ratios), "")
                yield Row("  as long as ours", sum(abs(ratio - 1) < 1e-9 for ratio in ratios), "")
                yield Row("  the most that ours takes of PyTorch's", max(ratios), "x", 1.0 + 1e-9)
                yield Row("  the least", min(ratios), "x")


def exported(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule | None:
    """A schedule of PyTorch's, by way of its CSV; None where its class refuses the numbers."""
    from torch.distributed.pipelining import schedules

    def stage(index: int) -> Any:
        return SimpleNamespace(
            stage_index=index,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == ranks * chunks - 1,
            has_backward=True,
            submod=None,
            device="cpu",
        )

    try:
        # Only the numbers of the stages matter to the order; nothing runs.
        made = getattr(schedules, name)([stage(chunk * ranks) for chunk in range(chunks)], microbatches)
    except ValueError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        made._dump_csv(str(path), format="compute_only")
        schedule = from_csv(path.read_text(), name)
    validate(schedule, microbatches=microbatches)
    return schedule


def _ratios(own: Schedule, other: Schedule) -> Iterator[float]:
    for costs in COSTS.values():
        for timing in TIMINGS:
            yield simulate(own, costs, timing).makespan / simulate(other, costs, timing).makespan


_SIZES = f"{'/'.join(map(str, RANKS))} ranks, {'/'.join(map(str, MICROBATCHES))} microbatches"
BENCHMARKS = {group: (partial(compare, group), _SIZES) for group in GROUPS}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))
