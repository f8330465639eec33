"""Who may look where, as data: one program serves causal, windowed, packed and prefix masks.

Shapes: B batch, S queries, T keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Mask", "causal_mask", "visible"]


class Mask(NamedTuple):
    """A query sees the keys of its own segment, and of the one that this branches off from, that are not after it, not
    beyond the window, or in the prefix.

    Attributes:
        query_place_BS, key_place_BT: int32, the place of each token in its row. Places need not ascend.
        query_segment_BS, key_segment_BT: int32; tokens see their own segment alone. 0 is padding.
        window: int32 scalar, how many places back a query sees, its own included; 0 or None is no limit. It may be
            traced, as layers differ.
        prefix_B: int32, every query of the row sees all keys of its segment at places below this, whatever the window
            (prefix LM, Raffel et al. 2020); None is no prefix.
        query_trunk_BS: int32, another segment whose keys a query sees as if they were of its own: the beginning that
            several continuations in a row share. Places then are those within a sequence, its beginning included, so
            that branches have the same ones. 0 is none; None is none of any.
    """

    query_place_BS: jax.Array
    key_place_BT: jax.Array
    query_segment_BS: jax.Array
    key_segment_BT: jax.Array
    window: jax.Array | int | None = None
    prefix_B: jax.Array | None = None
    query_trunk_BS: jax.Array | None = None


def causal_mask(
    segment_ids_BS: jax.Array, window: jax.Array | int | None = None, prefix_B: jax.Array | None = None
) -> Mask:
    """The mask of whole rows that attend to themselves, places from 0 on."""
    segment_BS = segment_ids_BS.astype(jnp.int32)
    place_BS = jnp.broadcast_to(jnp.arange(segment_BS.shape[1], dtype=jnp.int32), segment_BS.shape)
    return Mask(place_BS, place_BS, segment_BS, segment_BS, window, prefix_B)


def visible(mask: Mask) -> jax.Array:
    """Whether each query may look at each key, bool [B, S, T]."""
    distance_BST = mask.query_place_BS[:, :, None] - mask.key_place_BT[:, None, :]
    seen_BST = distance_BST >= 0
    if mask.window is not None:
        window = jnp.asarray(mask.window, jnp.int32)
        seen_BST &= (window == 0) | (distance_BST < window)
    if mask.prefix_B is not None:
        seen_BST |= (mask.key_place_BT < mask.prefix_B[:, None])[:, None, :]
    key_segment_B1T = mask.key_segment_BT[:, None, :]
    shared_BST = mask.query_segment_BS[:, :, None] == key_segment_B1T
    if mask.query_trunk_BS is not None:
        trunk_BS1 = mask.query_trunk_BS[:, :, None]
        shared_BST |= (trunk_BS1 == key_segment_B1T) & (trunk_BS1 > 0)
    return seen_BST & shared_BST
