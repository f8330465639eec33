"""Dropout that depends on the step's key, the layer, the sequence and the token's place alone.

So a batch that is cut into microbatches, or divided among devices, has the masks of the whole one.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Noise"]


class Noise(NamedTuple):
    """The randomness of one layer in one step.

    Attributes:
        key: of the layer in this step.
        sequence_B: each row's index in the global batch.
        place_S: which of a whole sequence's `length` places are here; None if all are.
    """

    key: jax.Array
    sequence_B: jax.Array
    place_S: jax.Array | None = None
    length: int = 0

    def drop(self, x: jax.Array, rate: float, name: str) -> jax.Array:
        """Zeroes elements of `x` [B, S, ...] at the rate and scales up the others.

        Args:
            name: tells the uses in a layer apart.
        """
        if rate == 0.0:
            return x
        key, place_S = jax.random.fold_in(self.key, zlib.crc32(name.encode())), self.place_S
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, self.sequence_B)
        shape = x.shape[1:] if place_S is None else (self.length, *x.shape[2:])
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(keys_B)
        if place_S is not None:
            keep = keep[:, place_S]
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
