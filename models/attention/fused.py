"""The backend's own attention kernels, where they can compute what is asked for.

On TPU, splash attention (Pallas): causal with segments, tokens in order, a multiple of 128 of them; a window if it is
the same in all layers (no traced value), and neither prefix nor trunk. The devices of the mesh axes that are left to
XLA must divide the key-value heads.

On GPU, cuDNN's attention through `jax.nn.dot_product_attention`: any mask, for which it needs a few bytes for each
query and key, but none for each head; bfloat16 or float16, no softcap, heads of at most 128 dimensions, a multiple of
8, and values as wide as keys.

Shapes: B batch, S queries, T keys, N query heads, K key-value heads, H dimensions of a query and key, V of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.attention.heads import can_divide, over_heads
from models.attention.masks import Mask, visible
from models.attention.scores import Scores

__all__ = ["attend_fused", "by_cudnn", "by_splash", "can_fuse", "on_platform", "platform"]

_LANES = 128


_assumed: ContextVar[str | None] = ContextVar("platform of what is traced", default=None)


@contextmanager
def on_platform(name: str) -> Iterator[None]:
    """What is traced within is for this platform; JAX's backend is not asked, and so not started."""
    token = _assumed.set(name)
    try:
        yield
    finally:
        _assumed.reset(token)


def platform() -> str:
    """What the program is for: as `on_platform` has it, the platform of the mesh that is bound around, or JAX's own."""
    if (assumed := _assumed.get()) is not None:
        return assumed
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def can_fuse(
    q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, mask: Mask, scores: Scores, in_order: bool
) -> bool:
    """Whether the backend has a kernel for this; see the module's docstring."""
    (_, S, _, H), (_, T, K, V) = q_BSNH.shape, v_BTKV.shape
    kind = platform()
    if kind == "tpu":
        causal = in_order and S == T and mask.prefix_B is None and mask.query_trunk_BS is None
        return causal and not isinstance(mask.window, jax.Array) and S % _LANES == 0 and can_divide(K)
    if kind in ("gpu", "cuda"):
        fits = not scores.softcap and H == V and H <= _LANES and H % 8 == 0
        return fits and v_BTKV.dtype in (jnp.bfloat16, jnp.float16) and can_divide(K)
    return False


def attend_fused(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, mask: Mask, scores: Scores) -> jax.Array:
    """See `models.attention.attend`; to be called where `can_fuse`."""
    return (by_splash if platform() == "tpu" else by_cudnn)(q_BSNH, k_BTKH, v_BTKV, mask, scores)


def by_splash(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, mask: Mask, scores: Scores) -> jax.Array:
    """With the TPU kernel; elsewhere in Pallas' interpreter, for tests."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S, window = q_BSNH.shape[1], int(mask.window or 0)
    seen = masks.LocalMask((S, S), (window - 1, 0), 0) if window else masks.CausalMask((S, S))
    block = next(size for size in (512, 256, 128) if S % size == 0)

    def kernel(q_BNSH: jax.Array, k_BKTH: jax.Array, v_BKTV: jax.Array, segments: Any) -> jax.Array:
        run = splash.make_splash_mha(
            masks.MultiHeadMask([seen] * q_BNSH.shape[1]),
            block_sizes=splash.BlockSizes(
                block_q=block,
                block_kv=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            attn_logits_soft_cap=scores.softcap or None,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name="context",
            interpret=platform() != "tpu",
        )
        return jax.vmap(run)(q_BNSH, k_BKTH, v_BKTV, segments)

    # The kernel does not scale. What is done to its arguments is done out here, where a remat policy sees it.
    q_BSNH = (q_BSNH.astype(jnp.float32) * scores.scale).astype(q_BSNH.dtype)
    q_BNSH, k_BKTH, v_BKTV = (jnp.swapaxes(x, 1, 2) for x in (q_BSNH, k_BTKH, v_BTKV))
    segments = splash.SegmentIds(mask.query_segment_BS, mask.key_segment_BT)
    out_BNSV = over_heads(kernel, 1, (q_BNSH, k_BKTH, v_BKTV), segments)
    return jnp.swapaxes(out_BNSV, 1, 2)


def by_cudnn(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKV: jax.Array, mask: Mask, scores: Scores) -> jax.Array:
    def kernel(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, seen_B1ST: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BSNH, k_BTKH, v_BTKH, mask=seen_B1ST, scale=scores.scale, implementation="cudnn"
        )

    seen_BST = visible(mask)
    looks_BS11 = seen_BST.any(2)[..., None, None]
    q_BSNH = jnp.where(looks_BS11, q_BSNH, jnp.zeros_like(q_BSNH))
    out_BSNV = over_heads(kernel, 2, (q_BSNH, k_BTKH, v_BTKV), seen_BST[:, None])
    return checkpoint_name(jnp.where(looks_BS11, out_BSNV, jnp.zeros_like(out_BSNV)), "context")
