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

_FEW = 4  # queries, up to which keys are those of a cache


def attend_plain(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, mask: Mask, scores: Scores) -> jax.Array:
    """See `models.attention.attend`."""
    B, S, N, H = q_BSNH.shape
    _, T, K, V = v_BTKV.shape
    seen_BST = visible(mask)
    looks_BS11 = seen_BST.any(2)[..., None, None]
    q_BSNH = jnp.where(looks_BS11, q_BSNH, jnp.zeros_like(q_BSNH))
    if S > _FEW or S == T:
        # A weight of 0 does not help against a value that is not finite. Over a cache it would be a copy of all of it.
        seen_BT11 = seen_BST.any(1)[..., None, None]
        k_BTKH, v_BTKV = (jnp.where(seen_BT11, x, jnp.zeros_like(x)) for x in (k_BTKH, v_BTKV))
    out_BSKGV = _by_matmuls(q_BSNH.reshape(B, S, K, N // K, H), k_BTKH, v_BTKV, seen_BST, scores)
    out_BSNV = out_BSKGV.reshape(B, S, N, V).astype(v_BTKV.dtype)
    return checkpoint_name(jnp.where(looks_BS11, out_BSNV, jnp.zeros_like(out_BSNV)), "context")


def _by_matmuls(
    q_BSKGH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, seen_BST: jax.Array, scores: Scores
) -> jax.Array:
    # Heads before the sequence: XLA for CPU has fast matmuls for that order alone, and caches lie so.
    q_BKSGH, k_BKTH, v_BKTV = (jnp.swapaxes(x, 1, 2) for x in (q_BSKGH, k_BTKH, v_BTKV))
    score_BKSGT = product("BKSGH,BKTH->BKSGT", q_BKSGH, k_BKTH)
    weight_BKSGT, total_BKSG1 = _softmax(score_BKSGT, seen_BST[:, None, :, None], scores)
    # Divided after the product, as there are fewer outputs than weights.
    out_BKSGV = product("BKSGT,BKTV->BKSGV", weight_BKSGT.astype(v_BTKV.dtype), v_BKTV) / total_BKSG1
    return jnp.swapaxes(out_BKSGV, 1, 2)


def _softmax(product: jax.Array, seen: jax.Array, scores: Scores) -> tuple[jax.Array, jax.Array]:
    """Exponentials, less the largest, and their sum over the keys."""
    score = jnp.where(seen, scores.of(product)[0], HIDDEN)
    weight = jnp.exp(score - jax.lax.stop_gradient(score.max(-1, keepdims=True)))
    return weight, weight.sum(-1, keepdims=True)
