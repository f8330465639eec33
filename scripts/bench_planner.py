"""Predicted memory against the compiler's, over schedules, remat policies, meshes and dtypes.

    python scripts/bench_planner.py cpu|v5p|all [--json]

Temporaries of a device as `meshsys plan` predicts them, over `memory_analysis()` of the compiled step: on fake CPU
devices, or for v5p:2x2x2 ahead of time (needs libtpu, no TPU). Exits with 1 if one is off by more than 10 %.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

# JAX reads these once, when its backend starts. Unoptimised code has the same buffers.
os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402

from meshsys.assemble import assemble  # noqa: E402
from meshsys.config import Config  # noqa: E402
from meshsys.mesh import make_mesh  # noqa: E402
from meshsys.planner import plan_of  # noqa: E402
from meshsys.planner.compile import devices_of  # noqa: E402
from meshsys.step import Step  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

MOST_OFF = 0.10

# name: (schedule, remat, microbatches, mesh axes, other options of the model and the pipeline)
CASES: dict[str, tuple[str, str, int, dict[str, int], dict[str, Any]]] = {
    "1f1b": ("1f1b", "none", 8, {"pipe": 4}, {}),
    "1f1b, full": ("1f1b", "full", 8, {"pipe": 4}, {}),
    "gpipe, full, data": ("gpipe", "full", 8, {"pipe": 2, "data": 4}, {}),
    "gpipe, data": ("gpipe", "none", 4, {"pipe": 2, "data": 2}, {}),
    "interleaved, dots, tensor": ("interleaved_1f1b", "dots", 4, {"pipe": 2, "data": 2, "tensor": 2}, {}),
    "zb_h1, data": ("zb_h1", "none", 8, {"pipe": 4, "data": 2}, {}),
    "zb_h1, dots, tensor, tied": ("zb_h1", "dots", 8, {"pipe": 2, "data": 2, "tensor": 2}, {"tie_embeddings": True}),
    "1f1b, names, fsdp": ("1f1b", "names:context,mlpwi_0", 8, {"pipe": 2, "fsdp": 4}, {}),
    "1f1b, full, fsdp": ("1f1b", "full", 4, {"pipe": 2, "fsdp": 4}, {}),
    "interleaved, full, all axes, tied": (
        "interleaved_1f1b", "full", 4, {"pipe": 2, "fsdp": 2, "tensor": 2}, {"tie_embeddings": True},
    ),
    "1f1b, dots, fsdp in every tick": ("1f1b", "dots", 4, {"pipe": 2, "fsdp": 4}, {"fsdp_gather": "tick"}),
    "zb_h1, names, fsdp, tied": ("zb_h1", "names:context", 8, {"pipe": 4, "fsdp": 2}, {"tie_embeddings": True}),
    "no pipeline, full": ("1f1b", "full", 4, {"fsdp": 2, "tensor": 2}, {}),
}  # fmt: skip
SIZES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "cpu": (
        "2x2x2",
        {"layers": 4, "d_model": 256, "heads": 4, "kv_heads": 2, "d_ff": 704, "vocab_size": 1024},
        {"sequence_length": 128, "batch_size": 64},
    ),
    "v5p": (
        "v5p:2x2x2",
        {"layers": 4, "d_model": 1024, "heads": 8, "kv_heads": 4, "d_ff": 2816, "vocab_size": 8192},
        {"sequence_length": 512, "batch_size": 64},
    ),
}
# On CPU XLA computes bfloat16 in float32; a v5p is given both.
FLOAT32_ON_V5P = ("1f1b", "zb_h1, dots, tensor, tied", "1f1b, full, fsdp")


def configuration(where: str, name: str) -> Config:
    schedule, remat, microbatches, axes, options = CASES[name]
    topology, model, data = SIZES[where]
    pipeline = {"schedule": schedule, "remat": remat, "microbatches": microbatches}
    dtype = "float32" if where == "cpu" or name in FLOAT32_ON_V5P else "bfloat16"
    for option, value in options.items():
        (pipeline if option == "fsdp_gather" else (model := dict(model)))[option] = value
    return Config.model_validate(
        {
            "run": {"name": "bench"},
            "model": model | {"dtype": dtype},
            "data": data,
            "mesh": {"topology": topology, "axes": axes},
            "pipeline": pipeline,
        }
    )


def ratios(where: str) -> Iterator[Row]:
    """Temporaries of each case, predicted and compiled."""
    for name in CASES:
        config = configuration(where, name)
        assembly = assemble(config)
        mesh = make_mesh(assembly.placement, devices_of(assembly.placement.topology))
        found: Any = Step(assembly, mesh).lower().compile().memory_analysis()
        predicted, compiled = plan_of(assembly).memory.temporaries, found.temp_size_in_bytes
        what = f"{name}, {config.model.dtype}"
        yield Row(f"{what}: predicted", predicted / 2**20, "MiB")
        yield Row(f"{what}: compiled", compiled / 2**20, "MiB")
        yield Row("  predicted over compiled", predicted / compiled, "x", 1 + MOST_OFF, 1 - MOST_OFF)


BENCHMARKS = {where: (partial(ratios, where), f"a device of {topology}") for where, (topology, _, _) in SIZES.items()}


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(run(__doc__ or "", BENCHMARKS))
