"""What a compiled schedule costs, against autodiff of a scan and against one device.

    python scripts/bench_pipeline.py memory|families|flops|time|compile|all [--json]

Runs on fake CPU devices. Memory, FLOPs and program size are XLA's own numbers, the same on every machine; wall
times are medians of interleaved rounds, best taken on an idle one. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

# JAX reads these once, when its backend starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402

from models import ModelConfig  # noqa: E402
from scripts.baselines import Job, Size, accumulate_job, autodiff_job, schedule_job, stage_jobs  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

SMALL = Size(ModelConfig(layers=8, d_model=256, heads=4, d_ff=1024, vocab_size=1024), sequences=2, length=64)
# Llama's proportions, and microbatches whose activations are larger than a stage's gradients.
ACTIVE = Size(
    ModelConfig(layers=16, d_model=192, heads=3, kv_heads=1, d_ff=512, vocab_size=512), sequences=16, length=128
)
# As wide as the first transformers were: more of what a layer recomputes is what its weight gradients read.
WIDE = replace(ACTIVE, model=replace(ACTIVE.model, kv_heads=3, d_ff=768))
# Four layers a rank, two for each chunk of a V. What no schedule saves, such as the stash of one microbatch, is little
# beside the residuals of sequences of this length.
DEEP = replace(ACTIVE, model=replace(ACTIVE.model, layers=32), sequences=8, length=256, ranks=8)
ROUNDS = 7


def memory() -> Iterator[Row]:
    """Temporary memory of a device, from XLA's buffer assignment."""

    def row(what: str, job: Job) -> Row:
        return Row(what, job.compile().memory_analysis().temp_size_in_bytes / 2**20, "MiB")

    few = row("1f1b, no remat, M=8", schedule_job(ACTIVE, 8))
    many = row("1f1b, no remat, M=64", schedule_job(ACTIVE, 64))
    yield from (few, many, Row("  M=64 over M=8", many.value / few.value, "x", 1.05))
    for size, microbatches, target in ((ACTIVE, 32, 0.65), (ACTIVE, 128, 0.35), (WIDE, 32, 0.65), (WIDE, 128, 0.35)):
        which = f"full remat, M={microbatches}" + (", wide" if size is WIDE else "")
        baselines = [
            row(f"autodiff of a scan, layers {form}, {which}", job)
            for form, job in (
                ("unrolled", autodiff_job(size, microbatches, remat="full", unroll=True)),
                ("scanned", autodiff_job(size, microbatches, remat="full", unroll=False)),
            )
        ]
        yield from baselines
        least = min(baseline.value for baseline in baselines)
        # Full backwards are what a configuration with full remat gets.
        for what, split, at_most in (("full backwards", False, target), ("I and W apart", True, None)):
            ours = row(f"1f1b, {what}, {which}", schedule_job(size, microbatches, remat="full", split=split))
            yield from (ours, Row("  over the smaller autodiff of a scan", ours.value / least, "x", at_most))


def families() -> Iterator[Row]:
    """Temporary memory of a device under schedules that hold fewer activations than 1f1b."""

    def temporaries(schedule: str) -> float:
        return schedule_job(DEEP, 32, schedule).compile().memory_analysis().temp_size_in_bytes / 2**20

    base = temporaries("1f1b")
    yield Row("1f1b, M=32", base, "MiB")
    for schedule, target in (("zb_h1", None), ("zbv", None), ("v_half", 0.60), ("v_min", 0.48)):
        found = temporaries(schedule)
        yield Row(f"{schedule}, M=32", found, "MiB")
        yield Row("  over 1f1b", found / base, "x", target)


def flops() -> Iterator[Row]:
    """F + I + W of a stage, each compiled alone, against one `value_and_grad` of it; from XLA's cost analysis."""
    for remat in ("none", "full", "dots", "names:context,mlpwi_0"):
        for kind in ("first", "middle", "last"):
            count = {
                name: job.compile().cost_analysis()["flops"] for name, job in stage_jobs(SMALL, kind, remat).items()
            }
            parts = count["F"] + count["I"] + count["W"]
            for name, value in count.items():
                yield Row(f"{remat}, {kind}: {name}", value / 1e6, "MFLOP")
            yield Row("  F + I + W over value_and_grad", parts / count["value_and_grad"], "x", 1.02)


def wall() -> Iterator[Row]:
    """A step's seconds (loss and gradients) in interleaved rounds, and the ratios of times of one round."""
    microbatches = 32
    # Unrolled layers are the faster form of both baselines.
    jobs = {
        "1f1b": schedule_job(SMALL, microbatches),
        "1f1b, layers scanned": schedule_job(SMALL, microbatches, unroll=False),
        "zb_h1": schedule_job(SMALL, microbatches, "zb_h1"),
        "autodiff of a scan, no remat": autodiff_job(SMALL, microbatches),
        "autodiff of a scan, full remat": autodiff_job(SMALL, microbatches, remat="full"),
        "one device, accumulation": accumulate_job(SMALL, microbatches),
    }
    compiled = {name: job.compile() for name, job in jobs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(ROUNDS + 1):
        for name, job in jobs.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            jax.block_until_ready(compiled[name](*job.arguments))
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
    for name in jobs:
        yield Row(f"{name}, M={microbatches}", statistics.median(seconds[name]), "s")
        yield Row("  processor time", statistics.median(cpu_seconds[name]), "s")
    scan = min(
        (name for name in jobs if name.startswith("autodiff")), key=lambda name: statistics.median(seconds[name])
    )
    for name in ("1f1b", "zb_h1"):
        for other, target in ((scan, 0.85), ("one device, accumulation", 1.0)):
            ratios = [mine / its for mine, its in zip(seconds[name], seconds[other], strict=True)]
            yield Row(f"{name} over {other}", statistics.median(ratios), "x", target)


def compilation() -> Iterator[Row]:
    """Size of the optimized program, and the time from Python function to executable."""
    few, many = 8, 256
    seconds: dict[int, list[float]] = {few: [], many: []}
    modules = {}
    for _ in range(3):
        for microbatches in (few, many):
            job = schedule_job(SMALL, microbatches)
            start = time.perf_counter()
            compiled = job.compile()
            seconds[microbatches].append(time.perf_counter() - start)
            modules[microbatches] = compiled.runtime_executable().hlo_modules()[0]
    instructions = {m: sum(" = " in line for line in module.to_string().splitlines()) for m, module in modules.items()}
    size = {m: len(module.as_serialized_hlo_module_proto()) / 2**20 for m, module in modules.items()}
    times = {m: statistics.median(values) for m, values in seconds.items()}
    for what, unit, value in (("instructions", "", instructions), ("size", "MiB", size), ("compile time", "s", times)):
        yield Row(f"1f1b, M={few}: {what}", value[few], unit)
        yield Row(f"1f1b, M={many}: {what}", value[many], unit)
        yield Row(f"  M={many} over M={few}", value[many] / value[few], "x", 1.1)


BENCHMARKS = {
    "memory": (memory, str(ACTIVE)),
    "families": (families, str(DEEP)),
    "flops": (flops, str(SMALL)),
    "time": (wall, str(SMALL)),
    "compile": (compilation, str(SMALL)),
}


if __name__ == "__main__":
    # A program that comes from a cache has no compile time.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(run(__doc__ or "", BENCHMARKS))
