"""Attention of blocks of queries to blocks of keys: the arithmetic that blockwise and ring attention share.

The forward is the online softmax of Rabe and Staats (2021), the backward that of FlashAttention (Dao et al. 2022),
which computes the scores again from the logarithm of each query's sum of exponentials. Only the pairs of blocks in
which somebody may see something are computed: they are listed from the mask, so one program serves every mask
and does the work of the one that it is given.

Shapes: B batch, S queries, T keys, K key-value heads, G query heads a key-value head, H dimensions of a query and key,
V dimensions of a value. In blocks: I blocks of Q queries, J blocks of U keys; blocks lead, so that each is contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.attention.masks import Mask, visible
from models.attention.scores import HIDDEN, Scores, product

__all__ = [
    "Backward",
    "Gradients",
    "Running",
    "absorb",
    "active",
    "backward",
    "finish",
    "from_key_blocks",
    "from_query_blocks",
    "gradients",
    "key_blocks",
    "mask_blocks",
    "query_blocks",
    "start",
]

_LOWEST = -1e20  # below every real score, and so far above `HIDDEN` that the exponential of the difference is 0
_FAR = 2**29  # beyond every place and segment; the difference of two such is an int32 too
_NO_QUERY, _NO_KEY = -1, -2  # segments of what fills up the last block: they see nobody, nobody sees them


class Running(NamedTuple):
    """The softmax over the keys so far, float32.

    Attributes:
        top_IBKQG: the largest score.
        total_IBKQG: sum of the exponentials of the scores less the largest.
        out_IBKQGV: sum of the values weighted by these exponentials.
    """

    top_IBKQG: jax.Array
    total_IBKQG: jax.Array
    out_IBKQGV: jax.Array


def key_blocks(x_BTK: jax.Array, block: int) -> jax.Array:
    """[B, T, K, ...] -> [J, B, K, U, ...]."""
    return jnp.swapaxes(_split(x_BTK, block), 2, 3)


def query_blocks(x_BSN: jax.Array, kv_heads: int, block: int) -> jax.Array:
    """[B, S, N, ...] -> [I, B, K, Q, G, ...]."""
    B, S, N, *rest = x_BSN.shape
    return key_blocks(x_BSN.reshape(B, S, kv_heads, N // kv_heads, *rest), block)


def from_key_blocks(x_JBKU: jax.Array, length: int) -> jax.Array:
    """[J, B, K, U, ...] -> [B, T, K, ...]; `length` is T."""
    J, B, K, U, *rest = x_JBKU.shape
    return jnp.moveaxis(x_JBKU, 2, 3).swapaxes(0, 1).reshape(B, J * U, K, *rest)[:, :length]


def from_query_blocks(x_IBKQG: jax.Array, length: int) -> jax.Array:
    """[I, B, K, Q, G, ...] -> [B, S, N, ...]; `length` is S."""
    x_BSKG = from_key_blocks(x_IBKQG, length)
    B, S, K, G, *rest = x_BSKG.shape
    return x_BSKG.reshape(B, S, K * G, *rest)


def mask_blocks(mask: Mask, query_block: int, key_block: int) -> Mask:
    """Places and segments as [I, B, Q] and [J, B, U]."""
    return mask._replace(
        query_place_BS=_split(mask.query_place_BS, query_block),
        key_place_BT=_split(mask.key_place_BT, key_block),
        query_segment_BS=_split(mask.query_segment_BS, query_block, _NO_QUERY),
        key_segment_BT=_split(mask.key_segment_BT, key_block, _NO_KEY),
        query_trunk_BS=None if mask.query_trunk_BS is None else _split(mask.query_trunk_BS, query_block),
    )


def _split(x_BS: jax.Array, block: int, fill: int = 0) -> jax.Array:
    """[B, S, ...] -> [I, B, Q, ...]: as few blocks of at most `block` as it takes, of one size, the last filled up."""
    B, S, *rest = x_BS.shape
    count = math.ceil(S / block)
    size = math.ceil(S / count)
    x_BS = jnp.pad(x_BS, [(0, 0), (0, count * size - S), *[(0, 0)] * len(rest)], constant_values=fill)
    return jnp.moveaxis(x_BS.reshape(B, count, size, *rest), 1, 0)


def start(q_IBKQGH: jax.Array, values: int) -> Running:
    """Of queries that have seen nothing; `values` is V."""
    shape = q_IBKQGH.shape[:-1]
    return Running(
        jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, values), jnp.float32)
    )


def absorb(
    running: Running, q_IBKQGH: jax.Array, k_JBKUH: jax.Array, v_JBKUV: jax.Array, mask: Mask, scores: Scores
) -> Running:
    """The softmax with these keys too; `mask` is in blocks."""

    def step(i: jax.Array, j: jax.Array, running: Running) -> Running:
        k_BKUH, v_BKUV, seen_BQU = _seen_keys(k_JBKUH, v_JBKUV, mask, i, j)
        score_BKQGU, _ = scores.of(product("BKQGH,BKUH->BKQGU", _take(q_IBKQGH, i), k_BKUH))
        score_BKQGU = jnp.where(seen_BQU[:, None, :, None], score_BKQGU, HIDDEN)
        old_BKQG, total_BKQG, out_BKQGV = (_take(x, i) for x in running)
        top_BKQG = jnp.maximum(old_BKQG, score_BKQGU.max(-1))
        weight_BKQGU = jnp.exp(score_BKQGU - top_BKQG[..., None])
        shrink_BKQG = jnp.exp(old_BKQG - top_BKQG)
        new_BKQGV = product("BKQGU,BKUV->BKQGV", weight_BKQGU.astype(v_BKUV.dtype), v_BKUV)
        return Running(
            _put(running.top_IBKQG, i, top_BKQG),
            _put(running.total_IBKQG, i, total_BKQG * shrink_BKQG + weight_BKQGU.sum(-1)),
            _put(running.out_IBKQGV, i, out_BKQGV * shrink_BKQG[..., None] + new_BKQGV),
        )

    return _over_pairs(mask, step, running)


def finish(running: Running) -> tuple[jax.Array, jax.Array]:
    """The output IBKQGV, float32, and the logarithm of the sum of exponentials IBKQG.

    Where a query may look nowhere they are 0 and infinity, from which `gradients` makes all its weights 0.
    """
    looks = running.total_IBKQG > 0
    total = jnp.where(looks, running.total_IBKQG, 1.0)
    return running.out_IBKQGV / total[..., None], jnp.where(looks, running.top_IBKQG + jnp.log(total), jnp.inf)


class Gradients(NamedTuple):
    """Of queries, keys and values, float32, in blocks."""

    q_IBKQGH: jax.Array
    k_JBKUH: jax.Array
    v_JBKUV: jax.Array


class Backward(NamedTuple):
    """What the backward reads of the queries, in blocks.

    Attributes:
        q_IBKQGH: the queries.
        d_out_IBKQGV: the gradient of the output.
        norm_IBKQG: the logarithm of the sum of exponentials over all keys, float32.
        drift_IBKQG: the inner product of the output and its gradient, float32.
    """

    q_IBKQGH: jax.Array
    d_out_IBKQGV: jax.Array
    norm_IBKQG: jax.Array
    drift_IBKQG: jax.Array


def backward(
    q_BSNH: jax.Array, out_BSNV: jax.Array, norm_BSN: jax.Array, d_out_BSNV: jax.Array, kv_heads: int, block: int
) -> Backward:
    """Queries that looked nowhere, and their gradients, count as 0, whatever they are."""
    looks_BSN1 = jnp.isfinite(norm_BSN)[..., None]
    q_BSNH, d_out_BSNV = (jnp.where(looks_BSN1, x, jnp.zeros_like(x)) for x in (q_BSNH, d_out_BSNV))
    drift_BSN = (out_BSNV.astype(jnp.float32) * d_out_BSNV.astype(jnp.float32)).sum(-1)
    return Backward(*(query_blocks(x, kv_heads, block) for x in (q_BSNH, d_out_BSNV, norm_BSN, drift_BSN)))


def gradients(
    grads: Gradients,
    queries: Backward,
    k_JBKUH: jax.Array,
    v_JBKUV: jax.Array,
    mask: Mask,
    scores: Scores,
) -> Gradients:
    """Adds what these keys contribute to the gradients."""

    def step(i: jax.Array, j: jax.Array, grads: Gradients) -> Gradients:
        q_BKQGH, d_out_BKQGV, norm_BKQG, drift_BKQG = (_take(x, i) for x in queries)
        k_BKUH, v_BKUV, seen_BQU = _seen_keys(k_JBKUH, v_JBKUV, mask, i, j)
        score_BKQGU, slope_BKQGU = scores.of(product("BKQGH,BKUH->BKQGU", q_BKQGH, k_BKUH))
        weight_BKQGU = jnp.exp(jnp.where(seen_BQU[:, None, :, None], score_BKQGU, HIDDEN) - norm_BKQG[..., None])
        d_weight_BKQGU = product("BKQGV,BKUV->BKQGU", d_out_BKQGV, v_BKUV)
        d_product_BKQGU = weight_BKQGU * (d_weight_BKQGU - drift_BKQG[..., None]) * slope_BKQGU
        d_product_BKQGU = d_product_BKQGU.astype(q_BKQGH.dtype)
        return Gradients(
            _add(grads.q_IBKQGH, i, product("BKQGU,BKUH->BKQGH", d_product_BKQGU, k_BKUH)),
            _add(grads.k_JBKUH, j, product("BKQGU,BKQGH->BKUH", d_product_BKQGU, q_BKQGH)),
            _add(grads.v_JBKUV, j, product("BKQGU,BKQGV->BKUV", weight_BKQGU.astype(v_BKUV.dtype), d_out_BKQGV)),
        )

    return _over_pairs(mask, step, grads)


def _seen_keys(
    k_JBKUH: jax.Array, v_JBKUV: jax.Array, mask: Mask, i: jax.Array, j: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values of a block, zero where no query of the other sees them, and who sees whom."""
    seen_BQU = visible(
        mask._replace(
            query_place_BS=_take(mask.query_place_BS, i),
            key_place_BT=_take(mask.key_place_BT, j),
            query_segment_BS=_take(mask.query_segment_BS, i),
            key_segment_BT=_take(mask.key_segment_BT, j),
            query_trunk_BS=None if mask.query_trunk_BS is None else _take(mask.query_trunk_BS, i),
        )
    )
    # A weight of 0 does not help against a value that is not finite.
    seen_B1U1 = seen_BQU.any(1)[:, None, :, None]
    k_BKUH, v_BKUV = (jnp.where(seen_B1U1, x, jnp.zeros_like(x)) for x in (_take(k_JBKUH, j), _take(v_JBKUV, j)))
    return k_BKUH, v_BKUV, seen_BQU


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, index, 0)


def _add(x: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    return _put(x, index, _take(x, index) + value)


# --- Which pairs of blocks ----------------------------------------------------------------------------------------


def _over_pairs(mask: Mask, step: Callable[[jax.Array, jax.Array, Any], Any], carry: Any) -> Any:
    """Folds `step(i, j, carry)` over the pairs of blocks in which somebody may see something."""
    active_IJ = active(mask)
    order = jnp.argsort(~active_IJ.ravel(), stable=True)
    keys = active_IJ.shape[1]
    # Never more than all pairs: for who reads the program, and not the mask.
    rounds = jax.lax.min(active_IJ.sum(dtype=jnp.int32), jnp.int32(active_IJ.size))
    # The number of rounds is data, so this is a `while`, inside which no remat policy keeps anything.
    return jax.lax.fori_loop(0, rounds, lambda n, carry: step(order[n] // keys, order[n] % keys, carry), carry)


def active(mask: Mask) -> jax.Array:
    """Whether somebody may see something, bool [I, J]; `mask` is in blocks.

    It goes by the least and greatest place and segment of each block, so it may be true where nobody does.
    """
    query_low, query_high = _range(mask.query_place_BS, mask.query_segment_BS >= 0)
    key_low, key_high = _range(mask.key_place_BT, mask.key_segment_BT >= 0)
    seen_IJB = _each(jnp.greater_equal, query_high, key_low)
    if mask.window is not None:
        window = jnp.asarray(mask.window, jnp.int32)
        seen_IJB &= (window == 0) | (_each(jnp.subtract, query_low, key_high) < window)
    if mask.prefix_B is not None:
        seen_IJB |= (key_low < mask.prefix_B[None])[None]
    keys = _range(mask.key_segment_BT, mask.key_segment_BT > 0)
    shared_IJB = _overlap(_range(mask.query_segment_BS, mask.query_segment_BS > 0), keys)
    if mask.query_trunk_BS is not None:
        shared_IJB |= _overlap(_range(mask.query_trunk_BS, mask.query_trunk_BS > 0), keys)
    # Padding has a range of its own: it is often at the end of a row, far from 1.
    shared_IJB |= _each(jnp.logical_and, (mask.query_segment_BS == 0).any(-1), (mask.key_segment_BT == 0).any(-1))
    return (seen_IJB & shared_IJB).any(-1)


def _range(x_IBQ: jax.Array, counted_IBQ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Least and greatest of what is counted, [I, B]; where nothing is, `_FAR` and `-_FAR`."""
    return jnp.where(counted_IBQ, x_IBQ, _FAR).min(-1), jnp.where(counted_IBQ, x_IBQ, -_FAR).max(-1)


def _overlap(x: tuple[jax.Array, jax.Array], y: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Whether ranges have something in common, [I, J, B]."""
    return _each(jnp.less_equal, x[0], y[1]) & _each(jnp.greater_equal, x[1], y[0])


def _each(function: Callable[[jax.Array, jax.Array], jax.Array], x_IB: jax.Array, y_JB: jax.Array) -> jax.Array:
    """[I, J, B]: of every block of queries and every block of keys."""
    return function(x_IB[:, None], y_JB[None])
