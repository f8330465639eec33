"""Which experts tokens go to, and what the router is taught besides.

Shapes: B sequences, S tokens of each, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import zigzag_order
from models.config import MoeConfig

__all__ = ["Routing", "keep_first", "largest_capacity", "load", "route", "router_loss"]


class Routing(NamedTuple):
    """What a router decided.

    Attributes:
        expert: the experts of each token, int32 [B, S, K], the best first.
        weight: what the outputs of those experts are multiplied by, float32 [B, S, K].
        share: every expert's score as a share of the token's scores, float32 [B, S, E].
        log_sum: the logarithm of the summed exponentials of the logits, float32 [B, S].
    """

    expert: jax.Array
    weight: jax.Array
    share: jax.Array
    log_sum: jax.Array


def route(logits_BSE: jax.Array, bias_E: jax.Array | None, moe: MoeConfig) -> Routing:
    """Scores of logits (float32), and the experts with the best of them.

    With groups, those whose two best experts score highest are looked at (DeepSeek-V3, Liu et al. 2024). The bias
    counts for what is best only.
    """
    if moe.router == "softmax":
        score_BSE = share_BSE = jax.nn.softmax(logits_BSE, axis=-1)
    else:
        score_BSE = jax.nn.sigmoid(logits_BSE)
        share_BSE = score_BSE / (score_BSE.sum(axis=-1, keepdims=True) + _TINY)
    expert_BSK = _best(jax.lax.stop_gradient(score_BSE), bias_E, moe)
    weight_BSK = _of_expert(score_BSE, expert_BSK)
    if moe.normalize:
        weight_BSK = weight_BSK / (weight_BSK.sum(axis=-1, keepdims=True) + _TINY)
    log_sum_BS = jax.nn.logsumexp(logits_BSE, axis=-1)
    return Routing(expert_BSK, weight_BSK * moe.scale, share_BSE, log_sum_BS)


_TINY = 1e-20  # no sum of sigmoids is 0 then


def _best(score_BSE: jax.Array, bias_E: jax.Array | None, moe: MoeConfig) -> jax.Array:
    if bias_E is not None:
        score_BSE = score_BSE + jax.lax.stop_gradient(bias_E)[None, None]
    if moe.top_groups < moe.groups:
        size = moe.experts // moe.groups
        grouped = score_BSE.reshape(*score_BSE.shape[:2], moe.groups, size)
        group_BSG = jax.lax.top_k(grouped, min(2, size))[0].sum(axis=-1)
        best = jax.lax.top_k(group_BSG, moe.top_groups)[1]
        open_BSG = (best[..., None] == _numbers(moe.groups)).any(axis=-2)
        grouped = jnp.where(open_BSG[..., None], grouped, -jnp.inf)
        score_BSE = grouped.reshape(score_BSE.shape)
    return jax.lax.top_k(score_BSE, moe.experts_per_token)[1]


def _of_expert(value_BSE: jax.Array, expert_BSK: jax.Array) -> jax.Array:
    """Each token's values of its experts, [B, S, K]: a sum, whose gradient needs no scatter."""
    chosen = expert_BSK[..., None] == _numbers(value_BSE.shape[-1])
    return jnp.where(chosen, value_BSE[:, :, None], jnp.zeros_like(value_BSE[:, :, None])).sum(axis=-1)


def _chosen(expert_BSK: jax.Array, counted_BS: jax.Array, experts: int) -> jax.Array:
    """1 where a counted token goes to an expert, int32 [B, S, E]."""
    chosen = (expert_BSK[..., None] == _numbers(experts)).any(axis=-2)
    return (chosen & counted_BS[..., None]).astype(jnp.int32)


def _numbers(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)[None, None, None]


def router_loss(
    routing: Routing, counted_BS: jax.Array, weights_BS: jax.Array, moe: MoeConfig, axis: str | None
) -> jax.Array:
    """The losses of `MoeConfig`, summed over sequences, float32; a sequence counts as its tokens' weights together.

    Args:
        counted_BS: which tokens there are; the others are padding.
        weights_BS: float32.
        axis: a manual mesh axis that divides the sequences. Each device returns its tokens' share of the loss and the
            sum over devices is the loss; so is that of gradients, as what is summed here has none.
    """
    counted = counted_BS.astype(jnp.float32)
    tokens_B = jnp.maximum(_sum_over(counted.sum(axis=1), axis), 1.0)
    per_token_B = _sum_over(jax.lax.stop_gradient(weights_BS).sum(axis=1), axis) / tokens_B
    total = jnp.zeros((), jnp.float32)
    if moe.aux_loss:
        chosen_BE = _chosen(routing.expert, counted_BS, moe.experts).sum(axis=1).astype(jnp.float32)
        frequency_BE = _sum_over(chosen_BE, axis) * (moe.experts / moe.experts_per_token) / tokens_B[:, None]
        share_BE = (routing.share * counted[..., None]).sum(axis=1)
        total += moe.aux_loss * (per_token_B * (frequency_BE * share_BE).sum(axis=1)).sum()
    if moe.z_loss:
        square_B = (jnp.square(routing.log_sum) * counted).sum(axis=1)
        total += moe.z_loss * (per_token_B * square_B).sum()
    return total


def load(routing: Routing, counted_BS: jax.Array, moe: MoeConfig) -> jax.Array:
    """How many tokens chose each expert beyond the mean of all experts, float32 [E]."""
    tokens_E = _chosen(routing.expert, counted_BS, moe.experts).sum(axis=(0, 1)).astype(jnp.float32)
    return tokens_E - tokens_E.mean()


def keep_first(expert_BSK: jax.Array, counted_BS: jax.Array, moe: MoeConfig, axis: str | None) -> jax.Array:
    """Which choices are within their expert's capacity, bool [B, S, K]: the first ones in each sequence.

    An expert takes `ceil(capacity_factor K tokens / E)` of a sequence's tokens, whatever the microbatch.

    Args:
        axis: a manual mesh axis that divides the sequences as `models.attention.zigzag_order` does.
    """
    chosen_BSE, parts = _chosen(expert_BSK, counted_BS, moe.experts), _parts(axis)
    if axis is None or parts == 1:
        whole_BSE = chosen_BSE
        before_BSE = jnp.cumsum(whole_BSE, axis=1) - whole_BSE
    else:
        places = zigzag_order(parts * chosen_BSE.shape[1], parts)
        whole_BSE = jax.lax.all_gather(chosen_BSE, axis, axis=1, tiled=True)[:, np.argsort(places)]
        own_S = jnp.asarray(places.reshape(parts, -1))[jax.lax.axis_index(axis)]
        before_BSE = (jnp.cumsum(whole_BSE, axis=1) - whole_BSE)[:, own_S]
    tokens_B = _sum_over(counted_BS.sum(axis=1, dtype=jnp.int32), axis)
    capacity_B = jnp.asarray(_capacities(whole_BSE.shape[1], moe))[tokens_B]
    return (_of_expert(before_BSE, expert_BSK) < capacity_B[:, None, None]) & counted_BS[..., None]


def largest_capacity(length: int, moe: MoeConfig, axis: str | None) -> int:
    """The most tokens that an expert takes of `length` of a sequence, all it has on a device."""
    return min(length, int(_capacities(length * _parts(axis), moe)[-1]))


def _capacities(length: int, moe: MoeConfig) -> np.ndarray:
    """Of an expert, by how many tokens a sequence has, int32 [length + 1]."""
    share = moe.capacity_factor * moe.experts_per_token * np.arange(length + 1) / moe.experts
    return np.ceil(share.round(6)).astype(np.int32)  # rounded, so that 1.1 * 10 is 11


def _parts(axis: str | None) -> int:
    return 1 if axis is None else jax.lax.axis_size(axis)


def _sum_over(value: jax.Array, axis: str | None) -> jax.Array:
    # XLA cannot partition a sum over manual axes of size 1 beside automatic ones.
    return jax.lax.psum(value, axis) if _parts(axis) > 1 else value
