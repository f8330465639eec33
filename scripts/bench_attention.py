"""What attention costs: block by block against all scores at once, over a cache, and over a divided sequence.

    python scripts/bench_attention.py memory|time|cache|ring|all [--json]

Memory is the compiler's figure for loss and gradients on CPU, the same on every machine. Times are medians of the
ratios of interleaved rounds, best taken on an idle machine. The ring's work is counted in pairs of blocks. Exits with
1 if a target is missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX reads it once, when its backend starts
# As a script, Python looks beside this file; the packages are one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from models.attention import Mask, attend, causal_mask, zigzag_order  # noqa: E402
from models.attention.blocks import active, mask_blocks  # noqa: E402
from scripts.bench_table import Row, run  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
CACHE = (16, 1024, 8)  # sequences, keys, heads
ROUNDS = 5
SIZE = f"{HEADS} heads, {KV_HEADS} of keys, of {HEAD_DIM} dimensions, float32, causal, one sequence"


def memory() -> Iterator[Row]:
    """Temporaries of loss and gradients."""
    before = None
    for length in (512, 1024, 2048, 4096, 8192):
        found = {}
        for way in ("plain", "blockwise"):
            found[way] = _compile(length, way).memory_analysis().temp_size_in_bytes / 2**20
            yield Row(f"{way}, {length} tokens", found[way], "MiB")
        yield Row("  blockwise over plain", found["blockwise"] / found["plain"], "x", at_most=0.3)
        if before:
            yield Row("  blockwise over half the tokens", found["blockwise"] / before, "x", at_most=2.2)
        before = found["blockwise"]


def wall() -> Iterator[Row]:
    """Seconds of loss and gradients."""
    # Blocks between the documents that are packed into a row are left out.
    for length, documents in ((128, 1), (256, 1), (512, 1), (1024, 1), (2048, 1), (2048, 4)):
        rng = np.random.default_rng(0)
        q, k, v = (
            jnp.asarray(rng.normal(size=(1, length, heads, HEAD_DIM)), jnp.float32)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        segments = jnp.repeat(jnp.arange(1, documents + 1, dtype=jnp.int32), length // documents)[None]
        ways = {way: _compile(length, way) for way in ("plain", "blockwise")}
        calls = {way: _call(compiled, q, k, v, segments) for way, compiled in ways.items()}
        yield from _compared(f"{length} tokens" + (f", {documents} documents" if documents > 1 else ""), calls)


def cache() -> Iterator[Row]:
    """One token of each sequence over a cache, against the cache's size."""
    batch, keys, heads = CACHE
    q, k = (jax.ShapeDtypeStruct((batch, n, heads, HEAD_DIM), jnp.float32) for n in (1, keys))
    ints = [jax.ShapeDtypeStruct((batch, n), jnp.int32) for n in (1, keys, 1, keys)]
    token = jax.jit(lambda q, k, v, *ints: attend(q, k, v, Mask(*ints), scale=0.1)).lower(q, k, k, *ints).compile()
    size = 2 * k.size * 4 / 2**20
    temporaries = token.memory_analysis().temp_size_in_bytes / 2**20
    yield Row("keys and values", size, "MiB")
    yield Row("temporaries", temporaries, "MiB")
    yield Row("  over keys and values", temporaries / size, "x", at_most=0.1)


def ring() -> Iterator[Row]:
    """Pairs of blocks that the busiest device computes, added up over the steps of the ring, over an even share."""
    for devices in (2, 4, 8, 16):
        length = 1024 * devices
        for name, order, target in (
            ("zigzag", zigzag_order(length, devices), 1.05), ("contiguous", np.arange(length), None)
        ):  # fmt: skip
            work = _pairs(order, devices, block=64)
            yield Row(f"{name}, {devices} devices", work.max(1).sum() / (work.sum() / devices), "x", at_most=target)


def _pairs(order: np.ndarray, devices: int, block: int) -> np.ndarray:
    """[step, device]: what `models.attention.ring` computes."""
    parts = np.asarray(order, np.int32).reshape(devices, 1, -1)
    halves = [parts[..., half::2] for half in range(2)]  # which travel in opposite directions

    def count(queries: np.ndarray, keys: np.ndarray) -> int:
        arrays = (queries, keys, np.ones_like(queries), np.ones_like(keys))
        return int(active(mask_blocks(Mask(*map(jnp.asarray, arrays)), block, block)).sum())

    each = range(devices)
    table = [[[count(parts[q], half[k]) for k in each] for q in each] for half in halves]
    return np.array(
        [[table[0][d][(d - step) % devices] + table[1][d][(d + step) % devices] for d in each] for step in each]
    )


def _compile(length: int, way: str) -> jax.stages.Compiled:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return attend(q, k, v, causal_mask(segments), scale=HEAD_DIM**-0.5, implementation=way).sum()

    shapes = (jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*shapes, segments).compile()


def _call(compiled: jax.stages.Compiled, *arguments: jax.Array) -> Callable[[], None]:
    return lambda: jax.block_until_ready(compiled(*arguments))


def _compared(what: str, calls: dict[str, Callable[[], None]]) -> Iterator[Row]:
    """Milliseconds of each, and the ratio of the second to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        yield Row(f"{name}, {what}", 1000 * statistics.median(times), "ms")
    first, second = seconds
    ratios = [mine / its for mine, its in zip(seconds[second], seconds[first], strict=True)]
    yield Row(f"  {second} over {first}", statistics.median(ratios), "x")


BENCHMARKS = {
    "memory": (memory, SIZE),
    "time": (wall, SIZE),
    "cache": (cache, f"{CACHE[0]} sequences, {CACHE[1]} keys of {CACHE[2]} heads of {HEAD_DIM} dimensions"),
    "ring": (ring, "1024 causal tokens a device, blocks of 64"),
}


if __name__ == "__main__":
    sys.exit(run(__doc__ or "", BENCHMARKS))
