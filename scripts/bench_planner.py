"""Predicted memory against the compiler's, over schedules, remat policies, meshes and dtypes.

    python scripts/bench_planner.py cpu|v5p [--json] [--only TEXT]

Temporaries of a device as `meshsys plan` predicts them, over `memory_analysis()` of the compiled step: on fake CPU
devices, or for v5p:2x2x2 ahead of time (needs libtpu, no TPU). Exits with 1 if one is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Row:
    """One configuration, in bytes of temporaries on a device."""

    what: str
    predicted: int
    compiled: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.compiled

    @property
    def met(self) -> bool:
        return abs(self.ratio - 1) <= MOST_OFF


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


def measure(where: str, name: str) -> Row:
    config = configuration(where, name)
    assembly = assemble(config)
    mesh = make_mesh(assembly.placement, devices_of(assembly.placement.topology))
    found: Any = Step(assembly, mesh).lower().compile().memory_analysis()
    return Row(f"{name}, {config.model.dtype}", plan_of(assembly).memory.temporaries, found.temp_size_in_bytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=SIZES)
    parser.add_argument("--json", action="store_true", help="one JSON list")
    parser.add_argument("--only", metavar="TEXT", default="", help="the cases whose name has it")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    if not arguments.json:
        print(f"{'':48}{'predicted':>12}{'compiled':>12}{'ratio':>8}   target 0.90 to 1.10", flush=True)
    for name in CASES:
        if arguments.only in name:
            rows.append(measure(arguments.where, name))
            if not arguments.json:
                row = rows[-1]
                sizes = f"{row.predicted / 2**20:8.1f} MiB{row.compiled / 2**20:8.1f} MiB"
                print(f"{row.what:48}{sizes}{row.ratio:8.2f}   {'pass' if row.met else 'FAIL'}", flush=True)
    if arguments.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows], indent=2))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
