"""Keys and values of the tokens so far: arrays of fixed shape that all rows share as a ring.

A row is a sequence. All rows write at the same column, one column a step, and after the last column comes the first
again; a row's token number n is where the column was when it was written. So a step is one update in place for all
rows, whatever their lengths, and a row can begin at any time: its prompt goes into the columns before the current one.
A column's place in a row follows from the row's length alone, and what a row did not write has a negative place.

Shapes: B rows, S new tokens, T columns, K key-value heads, H size of a key, V size of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.attention import Mask
from models.config import ModelConfig

__all__ = ["CACHE_AXES", "KvCache", "LayerCache", "empty_cache"]

CACHE_AXES = ("batch", "kv_heads", None, None)
"""Logical axes of a layer's keys and values."""


class LayerCache(NamedTuple):
    """One layer's keys [B, K, T, H] and values [B, K, T, V], and the column from which new ones are written.

    The heads lead, so that a head's keys lie together: attention over [B, T, K, H] took 3 to 7 times as long on CPU.
    """

    keys_BKTH: jax.Array
    values_BKTV: jax.Array
    column: jax.Array

    def written(self, k_BSKH: jax.Array, v_BSKV: jax.Array) -> LayerCache:
        """With new keys and values; they must not reach beyond the last column."""

        def write(cache: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(cache, new.swapaxes(1, 2), self.column, axis=2)

        return self._replace(keys_BKTH=write(self.keys_BKTH, k_BSKH), values_BKTV=write(self.values_BKTV, v_BSKV))

    def seen(self) -> tuple[jax.Array, jax.Array]:
        """Keys [B, T, K, H] and values [B, T, K, V], as attention takes them."""
        return self.keys_BKTH.swapaxes(1, 2), self.values_BKTV.swapaxes(1, 2)


class KvCache(NamedTuple):
    """All layers' keys and values.

    Attributes:
        keys, values: a layer each.
        column: int32, where the next token goes.
        length_B: int32, tokens in each row.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    column: jax.Array
    length_B: jax.Array

    @property
    def places(self) -> int:
        """Columns: the longest row."""
        return self.keys[0].shape[2]

    def layer(self, number: int) -> LayerCache:
        return LayerCache(self.keys[number], self.values[number], self.column)

    def place_BT(self) -> jax.Array:
        """Each column's place in each row, int32 [B, T]; negative where the row has not written."""
        age_T = (self.column - 1 - jnp.arange(self.places, dtype=jnp.int32)) % self.places
        return self.length_B[:, None] - 1 - age_T[None]

    def mask(self, place_BS: jax.Array, segment_BS: jax.Array) -> Mask:
        """Who sees whom when the queries' own keys are written; see `Mask`."""
        place_BT = self.place_BT()
        return Mask(place_BS, place_BT, segment_BS, (place_BT >= 0).astype(jnp.int32))


def empty_cache(config: ModelConfig, rows: int, places: int) -> KvCache:
    """A cache of rows of length 0."""
    dtype, heads = jnp.dtype(config.dtype), config.num_kv_heads

    def layers(size: int) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((rows, heads, places, size), dtype) for _ in range(config.layers))

    length_B = jnp.zeros((rows,), jnp.int32)
    return KvCache(layers(config.size_of_head), layers(config.size_of_value), jnp.zeros((), jnp.int32), length_B)
