"""Attention in memory that grows with the sequence and not with its square, on one device.

Shapes: B batch, S queries, T keys, N query heads, K key-value heads, H dimensions of a query and key, V of a value.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.attention import blocks
from models.attention.masks import Mask
from models.attention.scores import Scores

__all__ = ["attend_blockwise"]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend_blockwise(
    q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, mask: Mask, scores: Scores, block: int
) -> jax.Array:
    """See `models.attention.attend`; blocks have at most `block` queries and keys.

    Besides its arguments the backward reads the output, and float32 [B, S, N]; both are named "context".
    """
    return _forward(q_BSNH, k_BTKH, v_BTKV, mask, scores, block)[0]


def _forward(
    q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, mask: Mask, scores: Scores, block: int
) -> tuple[jax.Array, Any]:
    (_, S, *_), (*_, K, V) = q_BSNH.shape, v_BTKV.shape
    q, k, v = blocks.query_blocks(q_BSNH, K, block), blocks.key_blocks(k_BTKH, block), blocks.key_blocks(v_BTKV, block)
    running = blocks.absorb(blocks.start(q, V), q, k, v, blocks.mask_blocks(mask, block, block), scores)
    out, norm = (blocks.from_query_blocks(x, S) for x in blocks.finish(running))
    out_BSNV, norm_BSN = checkpoint_name(out.astype(v_BTKV.dtype), "context"), checkpoint_name(norm, "context")
    return out_BSNV, (q_BSNH, k_BTKH, v_BTKV, mask, out_BSNV, norm_BSN)


def _backward(scores: Scores, block: int, residuals: Any, d_out_BSNV: jax.Array) -> tuple:
    q_BSNH, k_BTKH, v_BTKV, mask, out_BSNV, norm_BSN = residuals
    (_, S, *_), (_, T, K, _) = q_BSNH.shape, k_BTKH.shape
    queries = blocks.backward(q_BSNH, out_BSNV, norm_BSN, d_out_BSNV, K, block)
    k, v = blocks.key_blocks(k_BTKH, block), blocks.key_blocks(v_BTKV, block)
    zeros = blocks.Gradients(*(jnp.zeros(x.shape, jnp.float32) for x in (queries.q_IBKQGH, k, v)))
    dq, dk, dv = blocks.gradients(zeros, queries, k, v, blocks.mask_blocks(mask, block, block), scores)
    d_q, d_k, d_v = blocks.from_query_blocks(dq, S), blocks.from_key_blocks(dk, T), blocks.from_key_blocks(dv, T)
    return d_q.astype(q_BSNH.dtype), d_k.astype(k_BTKH.dtype), d_v.astype(v_BTKV.dtype), None


attend_blockwise.defvjp(_forward, _backward)
