"""The parts of a decoder layer, as flax modules.

Shapes: B batch, S sequence, D d_model, F d_ff, N query heads, K key-value heads, H size of a query's head, V size of a
value's head, R rank of a latent, T keys.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.attention import Mask, attend
from models.config import LatentAttention, ModelConfig
from models.dropout import Noise
from models.kv_cache import LayerCache
from models.parallel import WHOLE, ManualAxes
from models.parameters import parameter, projected
from models.rotary import Rotary, rotate

__all__ = ["ACTIVATIONS", "Attention", "Mlp", "RmsNorm", "Seen"]


class Seen(NamedTuple):
    """What attention in one layer goes by.

    Attributes:
        mask: who sees whom.
        rotary: tables of the positions; None where a layer has none.
    """

    mask: Mask
    rotary: Rotary | None


class RmsNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale (Zhang and Sennrich 2019), computed in float32.

    Attributes:
        axes: logical names of the dimensions, the last ones, that are normalised together.
    """

    config: ModelConfig
    axes: tuple[str, ...] = ("norm",)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, count = self.config, len(self.axes)
        init = nn.initializers.zeros_init() if config.norm_plus_one else nn.initializers.ones_init()
        scale = parameter(self, "scale", init, x.shape[-count:], self.axes).astype(jnp.float32)
        scale = scale.reshape((1,) * (x.ndim - count) + scale.shape)
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(x32), axis=tuple(range(-count, 0)), keepdims=True)
        x32 = x32 * jax.lax.rsqrt(mean + config.norm_epsilon)
        return (x32 * (1.0 + scale if config.norm_plus_one else scale)).astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023), or latent attention (DeepSeek-V2), with rotary positions."""

    config: ModelConfig
    manual: ManualAxes = WHOLE

    @nn.compact
    def __call__(
        self, x_BSD: jax.Array, seen: Seen, noise: Noise | None = None, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attends within the sequence, or over a cache that the new keys and values are written to first.

        Returns:
            The output [B, S, D], and the cache as it is then.
        """
        config, latent = self.config, self.config.latent
        q_BSNH, k_BTKH, v_BTKV = (
            self._latent(latent, x_BSD, seen, noise) if latent else self._grouped(x_BSD, seen, noise)
        )
        q_BSNH = checkpoint_name(q_BSNH, "query_proj")
        k_BTKH = checkpoint_name(k_BTKH, "key_proj")
        v_BTKV = checkpoint_name(v_BTKV, "value_proj")
        if cache is not None:
            cache = cache.written(k_BTKH, v_BTKV)
            k_BTKH, v_BTKV = cache.seen()
        scale = config.attention_scale or config.size_of_head**-0.5
        context_BSNV = attend(
            q_BSNH,
            k_BTKH,
            v_BTKV,
            seen.mask,
            scale=scale,
            softcap=config.attention_softcap,
            implementation=config.attention,
            axis=self.manual.context,
            in_order=cache is None,
        )
        N, V, D = config.heads, config.size_of_value, config.d_model
        y_BSD = projected(self, "out", context_BSNV, ((N, V), (D,)), (("heads", "head_dim"), ("embed",)), noise)
        if config.attention_bias == "all":
            y_BSD = self._biased(y_BSD, "out_bias", ("norm",))
        return checkpoint_name(y_BSD, "out_proj"), cache

    def _grouped(self, x_BSD: jax.Array, seen: Seen, noise: Noise | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        D, N, K, H = config.d_model, config.heads, config.num_kv_heads, config.size_of_head

        def heads(name: str, count: int, axis: str) -> jax.Array:
            axes = (("embed",), (axis, "head_dim"))
            y = projected(self, name, x_BSD, ((D,), (count, H)), axes, noise)
            return y if config.attention_bias == "none" else self._biased(y, f"{name}_bias", axes[1])

        def turned(x: jax.Array, name: str, axis: str) -> jax.Array:
            if config.qk_norm != "none":
                axes = ("head_dim",) if config.qk_norm == "head" else (axis, "head_dim")
                x = RmsNorm(config, axes, name=f"{name}_norm")(x)
            return x if seen.rotary is None else rotate(x, seen.rotary)

        query, key = heads("query", N, "heads"), heads("key", K, "kv_heads")
        value = heads("value", K, "kv_heads")
        return turned(query, "query", "heads"), turned(key, "key", "kv_heads"), value

    def _latent(
        self, latent: LatentAttention, x_BSD: jax.Array, seen: Seen, noise: Noise | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        config, (D, N) = self.config, (self.config.d_model, self.config.heads)
        H, V, R = config.size_of_head, config.size_of_value, latent.kv_rank
        per_head = ("heads", "head_dim")
        if latent.query_rank:
            sizes = (D,), (latent.query_rank,)
            query = projected(self, "query_down", x_BSD, sizes, (("embed",), ("latent",)))
            query = RmsNorm(config, name="query_norm")(query)
            query = projected(self, "query_up", query, ((latent.query_rank,), (N, H)), (("latent",), per_head))
        else:
            query = projected(self, "query", x_BSD, ((D,), (N, H)), (("embed",), per_head), noise)
        down = projected(self, "kv_down", x_BSD, ((D,), (R + latent.rope_dim,)), (("embed",), ("latent",)))
        shared, key_BSH = jnp.split(down, [R], axis=-1)
        shared = RmsNorm(config, name="kv_norm")(shared)
        both = projected(self, "kv_up", shared, ((R,), (N, latent.nope_dim + V)), (("latent",), per_head))
        key, value = jnp.split(both, [latent.nope_dim], axis=-1)
        rope_key = key_BSH[:, :, None]
        plain, rotated = jnp.split(query, [latent.nope_dim], axis=-1)
        if seen.rotary is not None:
            rotated, rope_key = rotate(rotated, seen.rotary), rotate(rope_key, seen.rotary)
        rope_key = jnp.broadcast_to(rope_key, (*key.shape[:3], latent.rope_dim))
        return jnp.concatenate([plain, rotated], -1), jnp.concatenate([key, rope_key], -1), value

    def _biased(self, y: jax.Array, name: str, axes: tuple[str, ...]) -> jax.Array:
        bias = parameter(self, name, nn.initializers.zeros_init(), y.shape[2:], axes)
        return y + bias.astype(y.dtype)[None, None]


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Mlp(nn.Module):
    """A gated feed-forward network (Shazeer 2020, GLU variants)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BSD: jax.Array, noise: Noise | None = None) -> jax.Array:
        config, (D, F) = self.config, (self.config.d_model, self.config.d_ff)

        def product(name: str, x: jax.Array, sizes: tuple[int, int], axes: tuple[str, str]) -> jax.Array:
            y = projected(self, name, x, (sizes[:1], sizes[1:]), (axes[:1], axes[1:]), noise)
            if config.mlp_bias:
                of = "norm" if axes[1] == "embed" else axes[1]
                bias = parameter(self, f"{name}_bias", nn.initializers.zeros_init(), sizes[1:], (of,))
                y = y + bias.astype(y.dtype)[None, None]
            return y

        gate_BSF = checkpoint_name(product("gate", x_BSD, (D, F), ("embed", "mlp")), "mlpwi_0")
        up_BSF = checkpoint_name(product("up", x_BSD, (D, F), ("embed", "mlp")), "mlpwi_1")
        hidden_BSF = ACTIVATIONS[config.activation](gate_BSF) * up_BSF
        return checkpoint_name(product("down", hidden_BSF, (F, D), ("mlp", "embed")), "mlpwo")
