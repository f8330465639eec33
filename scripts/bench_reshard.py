"""What resharding takes: bytes that cross, memory and time, beside `jax.device_put`.

    python scripts/bench_reshard.py fsdp_tensor|fsdp_tensor8|tensor_fsdp|fsdp_replicated|pipe_tensor|all [--json]

256 MiB of float32 in 32 arrays of 1024x2048 (as 8 stacks of 4 layers where they are by stage) on 8 fake CPU devices,
which share the machine's memory: `device_put` goes through the host, which costs nothing more here, and replicated
arrays share one copy; where layers are by stage, it comes after `StageLayout.to_layers`. The two run in turn on new
arrays, and medians are compared. The naive way is `jax.jit` of the
identity with the destination as output sharding.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# JAX reads these once, when its backend starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from meshsys.reshard import Resharder, plan_reshard  # noqa: E402
from schedules.stages import StageLayout, split_layers  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

ARRAYS, SHAPE, ROUNDS, BUCKET = 32, (1024, 2048), 7, 64 << 20
MOST_MOVED, MOST_TIME = 1.0, 0.7  # of the lower bound; of device_put's
PIPE, STACKED = 4, 4


def mesh(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))


def compare(
    source: Callable[[], NamedSharding], destination: Callable[[], NamedSharding], timed: bool
) -> Iterator[Row]:
    """Arrays that keep their shape."""
    before, after = [source()] * ARRAYS, [destination()] * ARRAYS
    make = jax.jit(lambda k: [jnp.full(SHAPE, k + i, jnp.float32) for i in range(ARRAYS)], out_shardings=before)
    yield from _rows(make, after, lambda tree: jax.device_put(tree, after), timed)
    shapes = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=before[0])
    naive = jax.jit(lambda x: x, out_shardings=after[0]).lower(shapes).compile().memory_analysis()
    yield Row("temporaries of the naive way, over an array", naive.temp_size_in_bytes / (np.prod(SHAPE) * 4), "x")


def stacked() -> Iterator[Row]:
    """Layers by stage that become layers by number."""
    layout = StageLayout(split_layers(STACKED, PIPE), tuple(range(PIPE)), PIPE)
    count, shape = ARRAYS // STACKED, (*layout.table.shape, *SHAPE)
    before = {"layers": {"mlp": [NamedSharding(mesh(pipe=PIPE, fsdp=2), P("pipe", None, None, "fsdp"))] * count}}
    after = {"layers": {"mlp": [NamedSharding(mesh(data=2, tensor=4), P(None, None, "tensor"))] * count}}
    make = jax.jit(
        lambda k: {"layers": {"mlp": [jnp.full(shape, k + i, jnp.float32) for i in range(count)]}}, out_shardings=before
    )
    yield from _rows(
        make, after, lambda tree: jax.device_put(layout.to_layers(tree), after), False, source_stages=layout
    )


def _rows(make: Callable, after: Any, other: Callable, timed: bool, **stages: StageLayout) -> Iterator[Row]:
    plan = plan_reshard(make(jnp.float32(0)), after, bucket_bytes=BUCKET, **stages)
    yield Row("bytes that cross, over the lower bound", plan.moved_bytes / plan.lower_bound_bytes, "x", MOST_MOVED)
    copy, in_place = Resharder(plan), Resharder(plan, "in_place")
    _same(copy(make(jnp.float32(1))), other(make(jnp.float32(1))))
    temporaries = max(program.memory_analysis().temp_size_in_bytes for program in in_place.compiled())
    live = _most_live(in_place, make(jnp.float32(0)))
    above = live + temporaries - max(plan.source_bytes, plan.destination_bytes)
    yield Row("in place, peak of a device above the larger tree, over a bucket", above / BUCKET, "x", 1.0)
    yield Row("  as planned", plan.extra_bytes / BUCKET, "x")
    yield Row("buckets", len(plan.buckets), "")
    ways = {"device_put": other, "copy": copy, "in place": in_place}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            tree = jax.block_until_ready(make(jnp.float32(number)))
            start = time.perf_counter()
            result = jax.block_until_ready(way(tree))
            times[name].append(time.perf_counter() - start)
            del tree, result
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    for name, seconds in medians.items():
        yield Row(f"time, {name}", seconds, "s")
    for name in ("copy", "in place"):
        ratio = medians[name] / medians["device_put"]
        yield Row(f"  {name} over device_put", ratio, "x", MOST_TIME if timed and name == "in place" else None)


def _same(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def _most_live(way: Callable, tree: Any) -> int:
    """Bytes of the arrays that live on the first device at once, looked at while it runs."""
    jax.block_until_ready(tree)
    done, most = threading.Event(), [0]

    def watch() -> None:
        while not done.wait(5e-4):
            most[0] = max(most[0], _live())

    most[0] = _live()
    watcher = threading.Thread(target=watch)
    watcher.start()
    result = way(tree)
    most[0] = max(most[0], _live())
    done.set()
    watcher.join()
    del result
    return most[0]


def _live() -> int:
    first = jax.devices()[0]
    blocks = {}
    for array in jax.live_arrays():
        with suppress(RuntimeError):  # deleted meanwhile
            for shard in array.addressable_shards:
                if shard.device == first:
                    blocks[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(blocks.values())


def _on(spec: P, **axes: int) -> Callable[[], NamedSharding]:
    return lambda: NamedSharding(mesh(**axes), spec)


FSDP, TENSOR = P("fsdp"), P(None, "tensor")
BENCHMARKS = {
    "fsdp_tensor": (
        partial(compare, _on(FSDP, fsdp=8), _on(TENSOR, tensor=4, data=2), True),
        "rows over fsdp 8 to columns over tensor 4, twice",
    ),
    "fsdp_tensor8": (
        partial(compare, _on(FSDP, fsdp=8), _on(TENSOR, tensor=8), False),
        "rows over fsdp 8 to columns over tensor 8",
    ),
    "tensor_fsdp": (
        partial(compare, _on(TENSOR, tensor=4, data=2), _on(FSDP, fsdp=8), False),
        "columns over tensor 4, twice, to rows over fsdp 8",
    ),
    "fsdp_replicated": (
        partial(compare, _on(FSDP, fsdp=8), _on(P(), data=8), False),
        "rows over fsdp 8 to all on every device",
    ),
    "pipe_tensor": (stacked, "layers over pipe 4, rows over fsdp 2, to columns over tensor 4, twice"),
}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))
