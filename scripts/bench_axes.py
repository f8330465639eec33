"""Device orders: what collectives take by the closed forms, beside the order of JAX's `create_device_mesh`.

    python scripts/bench_axes.py predicted|compiled|all [--json]

`predicted`: over all slices of up to 512 chips of each TPU generation, and the usual mesh axes with sizes that fill the
slice. Both orders are judged by one model, for one traffic; where JAX has no order, ours alone is placed. `compiled`:
for those with an order of JAX the TPU compiler's strategies for a sum along each axis; needs libtpu (extra `tpu-aot`),
no TPU. Each takes minutes. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from meshsys.jax_order import jax_order  # noqa: E402
from meshsys.mesh import make_mesh  # noqa: E402
from meshsys.planner.compile import devices_of, missing_compiler  # noqa: E402
from meshsys.torus import Flow, Placement, Topology, Traffic, place  # noqa: E402
from meshsys.torus.generations import GENERATIONS  # noqa: E402
from meshsys.torus.groups import seconds  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

CHIPS = 512
GENERATION_NAMES = ("v4", "v5p", "v5e", "v6e", "ironwood")
COMPILED = ("v4", "v5p", "v5e", "v6e")  # for the others the compiler does not say
SPLITS = (("data", "tensor"), ("fsdp", "tensor"), ("pipe", "fsdp", "tensor"))
TENSOR, PIPE = (1, 2, 4, 8, 16, 32, 64), (2, 4, 8, 16)
# A step of a model of 7 billion parameters, in bytes: gradients and weights of a device's part, activations in each of
# 32 layers, and what a pipeline of 32 microbatches sends.
FLOWS = {
    "data": (Flow("all-reduce", ("data",), 4e9),),
    "fsdp": (Flow("all-gather", ("fsdp",), 2e9), Flow("reduce-scatter", ("fsdp",), 4e9)),
    "tensor": (Flow("all-reduce", ("tensor",), 64e6, 128),),
    "pipe": (Flow("rotate", ("pipe",), 16e6, 140),),
}


def predicted() -> Iterator[Row]:
    """Times of a step's collectives, ours over JAX's."""
    for name in GENERATION_NAMES:
        ratios, searches, only_ours = [], [], 0
        for topology, axes in _cases(name):
            traffic = _traffic(axes)
            started = time.process_time()
            ours = place(topology, axes, traffic)
            searches.append(time.process_time() - started)
            theirs = jax_order(topology, axes)
            if isinstance(theirs, str):
                only_ours += 1
            else:
                ratios.append(_seconds(ours, traffic) / _seconds(theirs, traffic))
        worse = sum(ratio > 1 + 1e-9 for ratio in ratios)
        yield Row(f"{name}: meshes on which both have an order", len(ratios), "")
        yield Row("  ours is slower", worse, "", at_most=0)
        yield Row("  ours is faster", sum(ratio < 1 - 1e-9 for ratio in ratios), "")
        yield Row("  the most that it takes of JAX's time", max(ratios), "x", at_most=1 + 1e-9)
        yield Row("  geometric mean", math.exp(float(np.mean(np.log(ratios)))), "x")
        yield Row("  the least", min(ratios), "x")
        yield Row("  JAX has no order", only_ours, "")
        yield Row("  the longest search, processor time", max(searches), "s", at_most=1)


def compiled() -> Iterator[Row]:
    """Sums for which the TPU compiler goes along several dimensions at once, on meshes for which both have an order."""
    if missing := missing_compiler(Topology.parse("v5p:4x4x4")):
        print(missing, file=sys.stderr)
        return
    for name in COMPILED:
        meshes = fewer = more = 0
        totals = np.zeros(2, int)
        for topology, axes in _cases(name):
            theirs = jax_order(topology, axes)
            if isinstance(theirs, str) or list(topology.shape) != sorted(topology.shape):
                continue
            ours = place(topology, axes, _traffic(axes))
            found = [_several(order, axes) for order in (ours, theirs)]
            meshes += 1
            totals += found
            fewer += found[0] < found[1]
            more += found[0] > found[1]
        yield Row(f"{name}: meshes on which both have an order", meshes, "")
        yield Row("  sums over several dimensions, ours", int(totals[0]), "", at_least=int(totals[1]))
        yield Row("  sums over several dimensions, create_device_mesh's", int(totals[1]), "")
        yield Row("  meshes with fewer than create_device_mesh", fewer, "", at_most=0)
        yield Row("  meshes with more", more, "")


def _cases(name: str) -> Iterator[tuple[Topology, dict[str, int]]]:
    for shape in _shapes(name):
        topology = Topology(shape, name)
        for split in SPLITS:
            for axes in _sizes(split, topology.size):
                yield topology, axes


def _shapes(name: str) -> list[tuple[int, ...]]:
    """All up to `CHIPS`; cubes in every arrangement."""
    kind = GENERATIONS[name]
    found = set(kind.shapes)
    for sides in itertools.product(range(4, CHIPS // 16 + 1, 4), repeat=3 if kind.cubes else 0):
        if math.prod(sides) <= CHIPS and kind.admits(sides):
            found.add(sides)
    return sorted(found, key=lambda shape: (math.prod(shape), shape))


def _sizes(split: tuple[str, ...], devices: int) -> Iterator[dict[str, int]]:
    for pipe in PIPE if "pipe" in split else (1,):
        for tensor in TENSOR:
            rest, over = divmod(devices, pipe * tensor)
            if not over and rest:
                sizes = {"pipe": pipe, split[-2]: rest, "tensor": tensor}
                yield {axis: sizes[axis] for axis in split}


def _traffic(axes: Mapping[str, int]) -> Traffic:
    return tuple(flow for axis in axes for flow in FLOWS[axis])


def _seconds(placement: Placement, traffic: Traffic) -> float:
    total = sum(seconds(placement, flow) for flow in traffic)
    return total or 1.0  # one device


def _several(placement: Placement, axes: Mapping[str, int]) -> int:
    """How many of the axes have a sum whose strategy has several phases, one a dimension."""
    return sum(_phases(placement, axis) > 1 for axis, size in axes.items() if size > 1)


def _phases(placement: Placement, axis: str) -> int:
    """Phases of the compiler's strategy for a sum along an axis."""
    mesh = make_mesh(placement, _devices(placement.topology))
    every = PartitionSpec(*mesh.axis_names)
    rest = PartitionSpec(*(None if name == axis else name for name in mesh.axis_names))
    x = jax.ShapeDtypeStruct((*placement.shape, 1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, every))
    step = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=every, out_specs=rest))
    text = step.lower(x).compile().as_text() or ""
    return max(map(int, re.findall(r'"collective_algorithm_config":\{[^}]*phases:(\d+)', text)), default=0)


@cache
def _devices(topology: Topology) -> tuple[jax.Device, ...]:
    return tuple(devices_of(topology))


BENCHMARKS = {
    "predicted": (predicted, f"slices up to {CHIPS} chips, {'; '.join(', '.join(split) for split in SPLITS)}"),
    "compiled": (compiled, f"slices up to {CHIPS} chips, shorter dimensions first; bfloat16 sums of 2 MiB"),
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))
