"""The parts of a decoder layer, as flax modules.

Shapes: B batch, S sequence, D d_model, F d_ff, N query heads, K key-value heads, G query heads a key-value
head (N = K G), H head_dim, T keys.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.config import ModelConfig

__all__ = ["Attention", "Mlp", "RmsNorm", "dropout", "parameter", "rotary_table"]

_scaled = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(-2, -1))
_scaled_2d = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
_scaled_out = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=-1)


def rotary_table(positions_BS: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles, [B, S, H/2] each, float32 (Su et al. 2021)."""
    half = config.size_of_head // 2
    frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BS[..., None].astype(jnp.float32) * frequency[None, None]
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x_BSNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of each head, the halves convention of Hugging Face checkpoints."""
    first, second = jnp.split(x_BSNH, 2, axis=-1)
    cos, sin = cos[:, :, None].astype(x_BSNH.dtype), sin[:, :, None].astype(x_BSNH.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def dropout(x_BSD: jax.Array, rate: float, key: jax.Array | None, sequence_B: jax.Array) -> jax.Array:
    """Drops elements by a mask that depends on the key and the sequence's index in the global batch alone."""
    if rate == 0.0 or key is None:
        return x_BSD
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, sequence_B)
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1.0 - rate, x_BSD.shape[1:]))(keys_B)
    return jnp.where(keep, x_BSD / (1.0 - rate), jnp.zeros_like(x_BSD))


def parameter(module: Any, name: str, init: Any, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
    """A module's parameter with its logical axis names, in the configured dtype."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.dtype(module.config.param_dtype))


class RmsNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale (Zhang and Sennrich 2019), computed in float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        scale_D = parameter(self, "scale", nn.initializers.ones_init(), (x_BSD.shape[-1],), ("norm",))
        x32 = x_BSD.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.config.norm_epsilon)
        return (x32 * inverse * scale_D.astype(jnp.float32)[None, None]).astype(x_BSD.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie et al. 2023)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BSD: jax.Array,
        rotary: tuple[jax.Array, jax.Array],
        bias_BST: jax.Array,
        cache: Any = None,
    ) -> tuple[jax.Array, Any]:
        """Attends within the sequence, or over a cache.

        Args:
            rotary: tables of the queries' positions.
            bias_BST: added to the scores, float32: 0 where a query may look, very negative elsewhere.
            cache: None, or `(keys_BTKH, values_BTKH, start)`: the new keys and values are written at `start`.

        Returns:
            The output [B, S, D], and the keys and values that were attended to.
        """
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        D, N, K, H = config.d_model, config.heads, config.num_kv_heads, config.size_of_head

        def weight(name: str, init: Any, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
            return parameter(self, name, init, shape, axes).astype(dtype)

        query = weight("query", _scaled, (D, N, H), ("embed", "heads", "head_dim"))
        key = weight("key", _scaled, (D, K, H), ("embed", "kv_heads", "head_dim"))
        value = weight("value", _scaled, (D, K, H), ("embed", "kv_heads", "head_dim"))
        out = weight("out", _scaled_out, (N, H, D), ("heads", "head_dim", "embed"))

        q_BSNH = checkpoint_name(_rotate(jnp.einsum("BSD,DNH->BSNH", x_BSD, query), *rotary), "query_proj")
        k_BTKH = checkpoint_name(_rotate(jnp.einsum("BSD,DKH->BSKH", x_BSD, key), *rotary), "key_proj")
        v_BTKH = checkpoint_name(jnp.einsum("BSD,DKH->BSKH", x_BSD, value), "value_proj")
        if cache is not None:
            keys, values, start = cache
            k_BTKH = jax.lax.dynamic_update_slice_in_dim(keys, k_BTKH, start, axis=1)
            v_BTKH = jax.lax.dynamic_update_slice_in_dim(values, v_BTKH, start, axis=1)
        context_BSNH = checkpoint_name(_attend(q_BSNH, k_BTKH, v_BTKH, bias_BST), "context")
        y_BSD = checkpoint_name(jnp.einsum("BSNH,NHD->BSD", context_BSNH, out), "out_proj")
        return y_BSD, (k_BTKH, v_BTKH)


def _attend(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, bias_BST: jax.Array) -> jax.Array:
    """Softmax attention; scores and softmax in float32."""
    B, S, N, H = q_BSNH.shape
    K = k_BTKH.shape[2]
    q_BSKGH = (q_BSNH * H**-0.5).reshape(B, S, K, N // K, H)
    scores = jnp.einsum("BSKGH,BTKH->BKGST", q_BSKGH, k_BTKH, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores + bias_BST[:, None, None], axis=-1).astype(v_BTKH.dtype)
    return jnp.einsum("BKGST,BTKH->BSKGH", weights, v_BTKH).reshape(B, S, N, H)


class Mlp(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        config, dtype = self.config, jnp.dtype(self.config.dtype)

        def weight(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> jax.Array:
            return parameter(self, name, _scaled_2d, shape, axes).astype(dtype)

        gate = weight("gate", (config.d_model, config.d_ff), ("embed", "mlp"))
        up = weight("up", (config.d_model, config.d_ff), ("embed", "mlp"))
        down = weight("down", (config.d_ff, config.d_model), ("mlp", "embed"))
        gate_BSF = checkpoint_name(x_BSD @ gate, "mlpwi_0")
        up_BSF = checkpoint_name(x_BSD @ up, "mlpwi_1")
        return checkpoint_name((jax.nn.silu(gate_BSF) * up_BSF) @ down, "mlpwo")
