"""Attention over masks that are data: one function, several ways to compute it.

Shapes: B batch, S queries, T keys, N query heads, K key-value heads (N is a multiple of K), H dimensions of a query and
key, V dimensions of a value.
"""

from __future__ import annotations

from typing import Literal

import jax

from models.attention.blockwise import attend_blockwise
from models.attention.masks import Mask
from models.attention.plain import attend_plain
from models.attention.ring import attend_ring
from models.attention.scores import Scores

__all__ = ["Implementation", "attend"]

Implementation = Literal["auto", "plain", "blockwise", "fused"]

_BLOCK = 128  # queries and keys in a block, at most
_LONG = 256  # keys from which blocks are faster than all scores at once


def attend(
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKV: jax.Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float = 0.0,
    implementation: Implementation = "auto",
    axis: str | None = None,
) -> jax.Array:
    """Softmax attention with grouped heads, scores and softmax in float32.

    A query that may look nowhere gives 0, whatever it holds, and has the gradient 0. Keys and values that no query
    sees may hold anything too, but for a handful of queries over a cache, which must be finite.

    Args:
        scale: multiplies the products of queries and keys.
        softcap: c in `c tanh(scores / c)` (Gemma 2); 0 is none.
        implementation: how to compute it; all give the same. `plain` has all scores in memory, `blockwise` a block of
            them, `auto` takes the faster.
        axis: a manual mesh axis over which the sequence is divided, None if it is not; places in the mask are then
            counted over all devices, and it is computed blockwise. The backward has collectives over the axis too.

    Returns:
        [B, S, N, V] in the dtype of the values.

    Raises:
        ValueError: the axis has an odd number of devices, or leaves each an odd number of tokens.
    """
    scores, keys = Scores(scale, softcap), k_BTKH.shape[1]
    if axis is not None and jax.lax.axis_size(axis) > 1:
        return attend_ring(q_BSNH, k_BTKH, v_BTKV, mask, scores, _BLOCK, axis)
    long = keys >= _LONG and q_BSNH.shape[1] >= 16
    if implementation == "blockwise" or (implementation == "auto" and long):
        return attend_blockwise(q_BSNH, k_BTKH, v_BTKV, mask, scores, _BLOCK)
    return attend_plain(q_BSNH, k_BTKH, v_BTKV, mask, scores)
