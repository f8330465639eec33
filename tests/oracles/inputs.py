"""Batches and parameters that leave nothing at its default: no scale is 1, no weight is uniform."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import Batch, Decoder

QUICK = {"xla_backend_optimization_level": 0}
"""`jax.jit(..., compiler_options=QUICK)` compiles in half the time."""


def random_batch(sequences: int, length: int, vocab: int, seed: int = 0) -> Batch:
    """Several segments a row, positions starting at 0 in each, padding, uneven weights, a row without weight."""
    rng = np.random.default_rng(seed)
    segments = np.sort(rng.integers(1, 4, (sequences, length)), axis=1)
    segments[::3, -2:] = 0
    starts = np.array([[list(row).index(segment) for segment in row] for row in segments])
    weights = rng.choice([0.0, 0.25, 1.0, 2.0], (sequences, length)) * (segments > 0)
    weights[1::5] = 0.0
    return Batch(
        tokens=jnp.asarray(rng.integers(0, vocab, (sequences, length)), jnp.int32),
        targets=jnp.asarray(rng.integers(0, vocab, (sequences, length)), jnp.int32),
        positions=jnp.asarray(np.arange(length) - starts, jnp.int32),
        segment_ids=jnp.asarray(segments, jnp.int32),
        weights=jnp.asarray(weights, jnp.float32),
        sequence=jnp.arange(sequences, dtype=jnp.int32),
    )


def random_parameters(decoder: Decoder, seed: int = 0) -> Any:
    """Drawn by numpy: compiling an initializer takes longer than most tests."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.1, 0.3, leaf.shape), leaf.dtype), shapes)
