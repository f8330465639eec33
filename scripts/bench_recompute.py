"""Where recomputation costs least: on the critical path, inside I, or in an action of its own, R; and what auto takes.

    python scripts/bench_recompute.py simulated|measured|all [--json]

The schedule is zb_h1 and the policy full remat. Simulated times are in forwards of one layer, by FLOPs of the model's
actions. Measured times are medians of interleaved rounds on fake CPU devices, best taken on an idle machine; `auto`
has the memory that R takes.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# JAX reads these once, when its backend starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402

from meshsys.remat_choice import RematSpace, choose_remat  # noqa: E402
from models import ModelConfig  # noqa: E402
from schedules.actions import Schedule  # noqa: E402
from schedules.families import make  # noqa: E402
from schedules.recompute import add_recompute  # noqa: E402
from schedules.simulate import Timing, simulate  # noqa: E402
from scripts.baselines import Size, schedule_job  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

SIZE = Size(ModelConfig(layers=8, d_model=256, heads=4, kv_heads=2, d_ff=688, vocab_size=512), sequences=2, length=128)
MICROBATCHES, ROUNDS = 16, 7
RANKS = (4, 8)  # of what is simulated
TIMINGS: tuple[Timing, ...] = ("lockstep", "asynchronous")


def simulated() -> Iterator[Row]:
    """Makespans with everything kept, recomputed inside I, and in R; each R where it costs least in its timing."""
    for ranks in RANKS:
        schedule = make("zb_h1", ranks=ranks, microbatches=MICROBATCHES)
        space = _space(schedule)
        inside, apart = (space.costs(space.uniform(way)) for way in (space.full, space.full_apart))
        for timing in TIMINGS:
            what = f"P={ranks}, M={MICROBATCHES}, {timing}"
            kept = simulate(schedule, space.costs(space.uniform(0)), timing).makespan
            on_path = simulate(schedule, inside, timing).makespan
            in_bubbles = simulate(add_recompute(schedule, apart, timing), apart, timing).makespan
            yield Row(f"{what}: no remat", kept, "")
            yield Row("  full inside I, over no remat", on_path / kept, "x")
            yield Row("  full in R, over no remat", in_bubbles / kept, "x")
            yield Row("  R over inside I", in_bubbles / on_path, "x", 1.0)


def measured() -> Iterator[Row]:
    """A step's seconds (loss and gradients), and the ratios of times of one round; temporaries are the compiler's."""
    schedule = make("zb_h1", ranks=SIZE.ranks, microbatches=MICROBATCHES)
    space = _space(schedule)
    ways = space.uniform(space.full_apart)
    choice = choose_remat(space, space.outcome(ways, 0, 0).bytes)
    apart = add_recompute(schedule, space.costs(ways))
    jobs = {
        "no remat": schedule_job(SIZE, MICROBATCHES, schedule),
        "full inside I": schedule_job(SIZE, MICROBATCHES, schedule, remat="full"),
        "full in R": schedule_job(SIZE, MICROBATCHES, apart, remat="full"),
        "auto": schedule_job(SIZE, MICROBATCHES, choice.schedule, remat=choice.remats),
    }
    compiled = {name: job.compile() for name, job in jobs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(ROUNDS + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled[name](*job.arguments))
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    for name in jobs:
        yield Row(f"{name}, M={MICROBATCHES}", statistics.median(seconds[name]), "s")
        yield Row("  temporaries", compiled[name].memory_analysis().temp_size_in_bytes / 2**20, "MiB")
    inside = "full inside I"
    for name, other in (("full in R", inside), ("auto", inside), ("auto", "full in R"), ("auto", "no remat")):
        ratios = [mine / its for mine, its in zip(seconds[name], seconds[other], strict=True)]
        yield Row(f"{name} over {other}", statistics.median(ratios), "x")


def _space(schedule: Schedule) -> RematSpace:
    return RematSpace([schedule], None, SIZE.model, SIZE.sequences, SIZE.length)


BENCHMARKS = {"simulated": (simulated, str(SIZE)), "measured": (measured, str(SIZE))}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))
