"""Parameters and batches that no data stands behind: shapes for what is compiled, random tokens for what is timed.

Shapes: B sequences, S their length; leading axes may come before them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import Batch, Decoder

__all__ = ["abstract_batch", "abstract_layer", "abstract_params", "random_batch"]

PyTree = Any


def abstract_params(decoder: Decoder) -> PyTree:
    """Shapes of {"shared": ..., "layers": [L, ...]} in the dtypes that the decoder computes with."""
    return jax.eval_shape(lambda key: decoder.cast(decoder.init(key)), jax.eval_shape(jax.random.key, 0))


def abstract_layer(decoder: Decoder, params: PyTree, parts: frozenset[str] = frozenset()) -> PyTree:
    """Shapes of one layer's parameters: what every layer has, and these parts."""
    everywhere = decoder.config.layers
    layers = {
        name: part
        for name, part in params["layers"].items()
        if name in parts or len(decoder.holders[name]) == everywhere
    }
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def abstract_batch(*shape: int, sharding: Any = None) -> Batch:
    """The shapes of a batch [..., B, S]."""

    def struct(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    ints = struct(jnp.int32, *shape)
    return Batch(ints, ints, ints, ints, struct(jnp.float32, *shape), struct(jnp.int32, *shape[:-1]))


def random_batch(vocab_size: int, *shape: int) -> Batch:
    """A batch [..., B, S] of random tokens, each sequence a document of its own."""
    tokens, targets = jnp.asarray(np.random.default_rng(0).integers(0, vocab_size, (2, *shape), np.int32))
    return Batch(
        tokens,
        targets,
        positions=jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), shape),
        segment_ids=jnp.ones(shape, jnp.int32),
        weights=jnp.ones(shape, jnp.float32),
        sequence=jnp.arange(np.prod(shape[:-1]), dtype=jnp.int32).reshape(shape[:-1]),
    )
