"""Attention over masks that are data: one function, several ways to compute it.

Shapes: B batch, S queries, T keys, N query heads, K key-value heads (N is a multiple of K), H dimensions of a query and
key, V dimensions of a value.
"""

from __future__ import annotations

from typing import Literal

import jax

from models.attention.blockwise import attend_blockwise
from models.attention.fused import attend_fused, can_fuse, platform
from models.attention.masks import Mask
from models.attention.plain import attend_plain
from models.attention.ring import attend_ring
from models.attention.scores import Scores

__all__ = ["Implementation", "attend"]

Implementation = Literal["auto", "plain", "blockwise", "fused"]

_BLOCK, _WIDE = 128, 512  # queries and keys in a block, at most, on CPU and elsewhere
_LONG, _MANY = 512, 16  # keys and queries from which blocks are faster than all scores at once
_ENDLESS = 1 << 22  # keys from which nothing could hold what is computed anyway, and pairs of blocks are past int32


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
    in_order: bool = False,
) -> jax.Array:
    """Softmax attention with grouped heads, scores and softmax in float32.

    A query that may look nowhere gives 0, whatever it holds, and has the gradient 0. Keys and values that no query
    sees may hold anything too, but for a handful of queries over a cache, which must be finite.

    Args:
        scale: multiplies the products of queries and keys.
        softcap: c in `c tanh(scores / c)` (Gemma 2); 0 is none.
        implementation: how to compute it; all give the same. `plain` has all scores in memory, `blockwise` a block of
            them, `fused` is the backend's own kernel, and `blockwise` where it has none for this; see
            `models.attention.fused`. `auto` takes the fastest.
        axis: a manual mesh axis over which the sequence is divided, None if it is not; places in the mask are then
            counted over all devices, and it is computed blockwise. The backward has collectives over the axis too.
        in_order: the mask's places are 0, 1, 2, ..., of queries and of keys, unless it has a trunk. The kernel for TPU
            skips what is after a query, and has to know that before it sees the data.

    Returns:
        [B, S, N, V] in the dtype of the values, with the name "context" for remat policies. With that saved, nothing
        of attention is computed again.

    Raises:
        ValueError: the axis has an odd number of devices, or leaves each an odd number of tokens.
    """
    operands, scores = (q_BSNH, k_BTKH, v_BTKV), Scores(scale, softcap)
    block = _BLOCK if platform() == "cpu" else _WIDE
    if axis is not None and jax.lax.axis_size(axis) > 1:
        return attend_ring(*operands, mask, scores, block, axis)
    if implementation in ("auto", "fused") and can_fuse(*operands, mask, scores, in_order):
        return attend_fused(*operands, mask, scores)
    queries, keys = q_BSNH.shape[1], k_BTKH.shape[1]
    long = queries >= _MANY and _LONG <= keys < _ENDLESS
    if implementation in ("blockwise", "fused") or (implementation == "auto" and long):
        return attend_blockwise(*operands, mask, scores, block)
    return attend_plain(*operands, mask, scores)
