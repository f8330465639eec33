"""The step of a Llama of a billion parameters, compiled ahead of time for TPU slices; no TPU is needed, libtpu is.

    python scripts/bench_aot.py memory|pod|all [--json]

`memory`: temporaries of a device of v5p:4x4x4 (64 chips) against autodiff of a scan with the same model, mesh, batch,
optimizer and compiler, both with full remat. `pod`: the time to compile for v5p:16x16x16 (4,096 chips). The figures are
the TPU compiler's and the same everywhere; take the time to compile on an idle machine, where it is below the
processor time. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from meshsys.assemble import Assembly, assemble  # noqa: E402
from meshsys.config import load_config  # noqa: E402
from meshsys.mesh import make_mesh  # noqa: E402
from meshsys.planner import plan_of  # noqa: E402
from meshsys.planner.compile import devices_of  # noqa: E402
from meshsys.step import Step  # noqa: E402
from scripts.baselines.jobs import autodiff_step  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "llama_1b_v5p.yaml"
POD = (
    "mesh.topology=v5p:16x16x16", "mesh.axes={pipe: 16, data: 4, fsdp: 16, tensor: 4}",
    "data.batch_size=2048", "pipeline.microbatches=32",
)  # fmt: skip


def memory() -> Iterator[Row]:
    """Temporaries of the step against those of autodiff of a scan."""
    for microbatches, target in ((32, 0.6), (128, 0.35)):
        assembly, mesh = _on_mesh(f"pipeline.microbatches={microbatches}", f"data.batch_size={4 * microbatches}")
        figures = {}
        for what, step in (
            ("1f1b", Step(assembly, mesh)),
            ("autodiff of a scan", autodiff_step(assembly, mesh)),
        ):
            started = time.process_time()
            figures[what] = step.lower().compile().memory_analysis().temp_size_in_bytes / 2**20
            yield Row(f"{what}, M={microbatches}: temporaries", figures[what], "MiB")
            yield Row("  to lower and compile, processor time", time.process_time() - started, "s")
        predicted = plan_of(assembly).memory.temporaries / 2**20
        yield Row("  1f1b predicted, over compiled", predicted / figures["1f1b"], "x", 1.1, 0.9)
        ours, baseline = figures.values()
        yield Row("  1f1b over autodiff of a scan", ours / baseline, "x", target)


def pod() -> Iterator[Row]:
    """4,096 chips: from configuration to executable."""
    gc.collect()  # programs of a benchmark before this one leave it less memory
    started, busy = time.perf_counter(), time.process_time()
    assembly, mesh = _on_mesh(*POD)
    compiled = Step(assembly, mesh).lower().compile()
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    yield Row("1f1b on 4,096 chips: temporaries", compiled.memory_analysis().temp_size_in_bytes / 2**20, "MiB")
    yield Row("1f1b on 4,096 chips: configuration to executable", seconds, "s", 120)
    yield Row("  processor time", busy, "s")


def _on_mesh(*overrides: str) -> tuple[Assembly, Mesh]:
    assembly = assemble(load_config(CONFIG, overrides))
    return assembly, make_mesh(assembly.placement, devices_of(assembly.placement.topology))


BENCHMARKS = {
    "memory": (memory, "a device of v5p:4x4x4, Llama 1B"),
    "pod": (pod, "a device of v5p:16x16x16, Llama 1B"),
}


if __name__ == "__main__":
    # A program that comes from a cache has no compile time.
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(run(__doc__ or "", BENCHMARKS))
