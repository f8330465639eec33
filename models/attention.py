"""Attention over masks that are data: one function, several ways to compute it.

Shapes: B batch, S queries, T keys, N query heads, K key-value heads, G query heads a key-value head (N = K G),
H dimensions of a query and key, V dimensions of a value.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from models.masks import Mask, causal_mask, visible

__all__ = ["Implementation", "Mask", "attend", "causal_mask", "visible"]

Implementation = Literal["auto", "plain", "blockwise", "fused"]

_HIDDEN = -1e30  # finite, so that a query which may look nowhere gives no NaN


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

    A query that may look nowhere gives 0, whatever it holds.

    Args:
        scale: multiplies the scores.
        softcap: c in `c tanh(scores / c)`; 0 is none.
        implementation: how to compute it; all give the same.
        axis: a manual mesh axis over which the sequence is divided; places in the mask are then global.

    Returns:
        [B, S, N, V] in the dtype of the values.
    """
    if axis is not None or implementation not in ("auto", "plain"):
        raise NotImplementedError(f"implementation={implementation}, axis={axis}")
    return _plain(q_BSNH, k_BTKH, v_BTKV, mask, scale, softcap)


def _plain(
    q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, mask: Mask, scale: float, softcap: float
) -> jax.Array:
    """All scores at once, differentiated by JAX."""
    B, S, N, H = q_BSNH.shape
    K = k_BTKH.shape[2]
    seen_BST = visible(mask)
    looks_BS11 = seen_BST.any(-1)[:, :, None, None]
    q_BSKGH = jnp.where(looks_BS11, q_BSNH, jnp.zeros_like(q_BSNH)).reshape(B, S, K, N // K, H)
    scores = jnp.einsum("BSKGH,BTKH->BKGST", q_BSKGH, k_BTKH, preferred_element_type=jnp.float32) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen_BST[:, None, None], scores, _HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTKV.dtype)
    out_BSKGV = jnp.einsum("BKGST,BTKV->BSKGV", weights, v_BTKV)
    out_BSNV = out_BSKGV.reshape(B, S, N, v_BTKV.shape[-1])
    return jnp.where(looks_BS11, out_BSNV, jnp.zeros_like(out_BSNV))
