"""Attention with all scores in memory at once, differentiated by JAX.

Shapes: B batch, S queries, T keys, N query heads, K key-value heads, G query heads a key-value head (N = K G),
H dimensions of a query and key, V dimensions of a value; 1 stands for any of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.attention.masks import Mask, visible
from models.attention.scores import HIDDEN, Scores, product

__all__ = ["attend_plain"]

_FEW = 4  # queries, up to which it takes longer to read a key than to compute with it


def attend_plain(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, mask: Mask, scores: Scores) -> jax.Array:
    """See `models.attention.attend`."""
    B, S, N, H = q_BSNH.shape
    _, T, K, V = v_BTKV.shape
    seen_BST = visible(mask)
    looks_BS11 = seen_BST.any(2)[..., None, None]
    q_BSNH = jnp.where(looks_BS11, q_BSNH, jnp.zeros_like(q_BSNH))
    answer = _once if S <= _FEW and S < T else _by_matmuls
    out_BSKGV = answer(q_BSNH.reshape(B, S, K, N // K, H), k_BTKH, v_BTKV, seen_BST, scores)
    out_BSNV = out_BSKGV.reshape(B, S, N, V).astype(v_BTKV.dtype)
    return checkpoint_name(jnp.where(looks_BS11, out_BSNV, jnp.zeros_like(out_BSNV)), "context")


def _by_matmuls(
    q_BSKGH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, seen_BST: jax.Array, scores: Scores
) -> jax.Array:
    # A weight of 0 does not help against a value that is not finite.
    seen_BT11 = seen_BST.any(1)[..., None, None]
    k_BTKH, v_BTKV = (jnp.where(seen_BT11, x, jnp.zeros_like(x)) for x in (k_BTKH, v_BTKV))
    # Heads before the sequence: XLA for CPU has fast matmuls for that order alone.
    q_BKSGH, k_BKTH, v_BKTV = (jnp.swapaxes(x, 1, 2) for x in (q_BSKGH, k_BTKH, v_BTKV))
    score_BKSGT = product("BKSGH,BKTH->BKSGT", q_BKSGH, k_BKTH)
    weight_BKSGT, total_BKSG1 = _softmax(score_BKSGT, seen_BST[:, None, :, None], -1, scores)
    # Divided after the product, as there are fewer outputs than weights.
    out_BKSGV = product("BKSGT,BKTV->BKSGV", weight_BKSGT.astype(v_BTKV.dtype), v_BKTV) / total_BKSG1
    return jnp.swapaxes(out_BKSGV, 1, 2)


def _once(q_BSKGH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, seen_BST: jax.Array, scores: Scores) -> jax.Array:
    """Reads keys and values once and as they lie; a matmul copies them, the whole cache for every token."""
    wide_BTKH, wide_BTKV = k_BTKH.astype(jnp.float32), v_BTKV.astype(jnp.float32)
    score_BSTKG = (q_BSKGH.astype(jnp.float32)[:, :, None] * wide_BTKH[:, None, :, :, None]).sum(-1)
    weight_BSTKG, total_BS1KG = _softmax(score_BSTKG, seen_BST[..., None, None], 2, scores)
    out_BSKGV = (weight_BSTKG[..., None] * wide_BTKV[:, None, :, :, None]).sum(2)
    return out_BSKGV / total_BS1KG[:, :, 0, ..., None]


def _softmax(product: jax.Array, seen: jax.Array, axis: int, scores: Scores) -> tuple[jax.Array, jax.Array]:
    """Exponentials, less the largest, and their sum along the axis of the keys."""
    score = jnp.where(seen, scores.of(product)[0], HIDDEN)
    weight = jnp.exp(score - jax.lax.stop_gradient(score.max(axis, keepdims=True)))
    return weight, weight.sum(axis, keepdims=True)
