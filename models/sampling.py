"""From logits to tokens: temperature, truncation, and the draw, with settings for each row as data.

A draw follows from the logits, the settings and the token's key alone, and the key from the names of its sequence and
its place in it (`sequence_keys`, `token_keys`). So whoever has the logits of a sequence can draw all its tokens again.

The order is Hugging Face's: temperature, top-k, top-p within what top-k left, min-p. Each keeps the tokens whose logit
is at least some threshold, so they are three searches for a threshold; tokens that tie with the last one that is kept
are kept too, where sorting would choose among them by their order.

Shapes: B rows, S places, R = B S, V vocabulary, C blocks of W neighbours in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "SOFTMAX",
    "Sampling",
    "Settings",
    "entropy",
    "log_probs",
    "redraw",
    "sample",
    "sequence_keys",
    "token_keys",
    "truncate",
]


class Settings(NamedTuple):
    """How each row samples, [B] each.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: int32, tokens that are kept, the likeliest ones; 0 keeps all.
        top_p: the likeliest tokens are kept until they have this much probability (Holtzman et al. 2020, nucleus
            sampling); 1 keeps all.
        min_p: tokens are kept that have at least this share of the likeliest token's probability (Nguyen et al. 2024);
            0 keeps all.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    def any_truncates(self) -> jax.Array:
        """Whether a row leaves tokens out, a bool."""
        return jnp.any(((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)) & (self.temperature > 0))


def sequence_keys(name_B3: jax.Array) -> jax.Array:
    """The keys of sequences, [B], by their seeds, prompts and samples, uint32."""

    def key(name_3: jax.Array) -> jax.Array:
        seed, prompt, sample = name_3
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), prompt), sample)

    return jax.vmap(key)(name_B3)


def token_keys(keys_B: jax.Array, place_B: jax.Array) -> jax.Array:
    """The keys of tokens, [B], each at a place of its own sequence, which the prompt is part of."""
    return jax.vmap(jax.random.fold_in)(keys_B, place_B)


def sample(
    logits_BV: jax.Array, settings: Settings, keys_B: jax.Array, any_truncates: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draws a token for each row.

    Args:
        logits_BV: float32.
        keys_B: a key for each row, used for nothing else.
        any_truncates: `settings.any_truncates()`, for loops that find it out once.

    Returns:
        The tokens, int32 [B], and their log-probabilities under the distribution that they were drawn from, float32
        [B]. For temperature 0, where that would always be 0, they are those under the logits' own softmax.
    """
    greedy_B = settings.temperature == 0
    top_B1 = logits_BV.max(-1, keepdims=True)
    likeliest_B = jax.lax.cond(
        jnp.any(greedy_B), lambda: _first(logits_BV == top_B1), lambda: jnp.zeros(greedy_B.shape, jnp.int32)
    )
    divisor_B1 = jnp.where(greedy_B, 1.0, settings.temperature)[:, None]
    scaled_BV = logits_BV / divisor_B1 - top_B1 / divisor_B1  # a quotient's order is that of the logits
    any_truncates = settings.any_truncates() if any_truncates is None else any_truncates
    kept_BV = jax.lax.cond(any_truncates, truncate, lambda scaled_BV, _: scaled_BV, scaled_BV, settings)
    kept_BV = jnp.where(greedy_B[:, None], scaled_BV, kept_BV)
    drawn_B, norm_B = _draw(kept_BV, keys_B)
    token_B = jnp.where(greedy_B, likeliest_B, drawn_B)
    return token_B, jnp.take_along_axis(kept_BV, token_B[:, None], axis=1)[:, 0] - norm_B


@dataclass(frozen=True)
class Sampling:
    """How all tokens are sampled: the same settings for every row; see `Settings`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def settings(self, rows: int) -> Settings:
        """The same as data, for so many rows."""

        def column(value: float, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
            return jnp.full((rows,), value, dtype)

        top_k = column(self.top_k, jnp.int32)
        return Settings(column(self.temperature), top_k, column(self.top_p), column(self.min_p))


SOFTMAX = Sampling()
"""Draws from the model's own distribution."""


def log_probs(logits_BSV: jax.Array, tokens_BS: jax.Array, sampling: Sampling) -> jax.Array:
    """What `sample` gives for tokens that it has drawn, float32 [B, S], differentiable by the logits.

    A token that the distribution no longer keeps counts as one that it keeps, so that its log-probability stays finite
    while the policy moves on. Which tokens are kept has no gradient.
    """
    logits_BSV = _scaled(logits_BSV, tokens_BS, sampling)
    picked_BS = jnp.take_along_axis(logits_BSV, tokens_BS[..., None], axis=-1)[..., 0]
    return picked_BS - jax.nn.logsumexp(logits_BSV, axis=-1)


def entropy(logits_BSV: jax.Array, tokens_BS: jax.Array, sampling: Sampling) -> jax.Array:
    """The entropy of each of the distributions of `log_probs`, in nats, float32 [B, S], differentiable alike."""
    logits_BSV = _scaled(logits_BSV, tokens_BS, sampling)
    finite_BSV = jnp.where(jnp.isfinite(logits_BSV), logits_BSV, 0.0)  # 0 times infinity would be NaN
    mean_BS = jnp.sum(jax.nn.softmax(logits_BSV, axis=-1) * finite_BSV, -1)
    return jax.nn.logsumexp(logits_BSV, axis=-1) - mean_BS


def _scaled(logits_BSV: jax.Array, tokens_BS: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits of the distributions that tokens are drawn from."""
    if sampling.temperature:
        logits_BSV = logits_BSV / sampling.temperature if sampling.temperature != 1 else logits_BSV
        if sampling.truncates:
            logits_BSV = jnp.where(_kept(logits_BSV, tokens_BS, sampling), logits_BSV, -jnp.inf)
    return logits_BSV


def redraw(
    logits_BSV: jax.Array, name_B3: jax.Array, place_BS: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """What `sample` draws at every place of sequences.

    Args:
        name_B3: as `sequence_keys` takes them.
        place_BS: int32, the places that the tokens are drawn for.

    Returns:
        The tokens, int32 [B, S], and their log-probabilities, float32 [B, S].
    """
    batch, length, vocabulary = logits_BSV.shape
    keys_R = token_keys(jnp.repeat(sequence_keys(name_B3), length), place_BS.reshape(-1))
    token_R, log_prob_R = sample(logits_BSV.reshape(-1, vocabulary), sampling.settings(batch * length), keys_R)
    return token_R.reshape(batch, length), log_prob_R.reshape(batch, length)


def _kept(scaled_BSV: jax.Array, tokens_BS: jax.Array, sampling: Sampling) -> jax.Array:
    """Which tokens truncation keeps, the given ones among them."""
    vocabulary = scaled_BSV.shape[-1]
    rows_RV = jax.lax.stop_gradient(scaled_BSV).reshape(-1, vocabulary)
    settings = sampling.settings(rows_RV.shape[0])
    kept_RV = jnp.isfinite(truncate(rows_RV - rows_RV.max(-1, keepdims=True), settings))
    drawn_RV = jnp.arange(vocabulary, dtype=jnp.int32)[None] == tokens_BS.reshape(-1, 1)
    return (kept_RV | drawn_RV).reshape(scaled_BSV.shape)


def truncate(scaled_BV: jax.Array, settings: Settings) -> jax.Array:
    """Logits, already divided by the temperature, with minus infinity for what top-k, top-p and min-p leave out."""
    # Computed again where it is read, a logit could round otherwise and miss the threshold that it is.
    scaled_BV = jax.lax.optimization_barrier(scaled_BV)
    vocabulary = scaled_BV.shape[1]
    top_B = scaled_BV.max(-1)
    count_B = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocabulary), vocabulary)

    def many_enough(threshold_B: jax.Array) -> jax.Array:
        return jnp.sum(scaled_BV >= threshold_B[:, None], -1, dtype=jnp.int32) >= count_B

    by_count_B = _largest_threshold(many_enough, scaled_BV)
    mass_BV = jnp.where(scaled_BV >= by_count_B[:, None], jnp.exp(scaled_BV - top_B[:, None]), 0.0)
    enough_B = settings.top_p * mass_BV.sum(-1)

    def heavy_enough(threshold_B: jax.Array) -> jax.Array:
        return jnp.where(scaled_BV >= threshold_B[:, None], mass_BV, 0.0).sum(-1) >= enough_B

    by_mass_B = jnp.where(settings.top_p < 1, _largest_threshold(heavy_enough, scaled_BV), -jnp.inf)
    by_share_B = jnp.where(settings.min_p > 0, top_B + jnp.log(settings.min_p), -jnp.inf)
    threshold_B = jnp.minimum(jnp.maximum(jnp.maximum(by_count_B, by_mass_B), by_share_B), top_B)
    return jnp.where(scaled_BV >= threshold_B[:, None], scaled_BV, -jnp.inf)


def _largest_threshold(is_low: Callable[[jax.Array], jax.Array], scaled_BV: jax.Array) -> jax.Array:
    """The largest float32 threshold of each row that is still low enough, [B]; that of the smallest logit is.

    Bisection over the floats in their order takes 32 passes, which is several times faster than sorting a vocabulary.
    """

    def body(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds
        # The mean, rounded up, without overflow.
        middle_B = (low_B >> 1) + (high_B >> 1) + ((low_B | high_B) & 1)
        is_low_B = is_low(_from_order(middle_B))
        return jnp.where(is_low_B, middle_B, low_B), jnp.where(is_low_B, high_B, middle_B - 1)

    bounds = _to_order(scaled_BV.min(-1)), _to_order(scaled_BV.max(-1))
    return _from_order(jax.lax.fori_loop(0, 32, body, bounds)[0])


def _to_order(x: jax.Array) -> jax.Array:
    """float32 as int32 of the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_order(order: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)


def _draw(logits_BV: jax.Array, keys_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens by their softmax, int32 [B], and its log-normaliser [B]; the largest logit of a row is 0.

    Gumbel's maximum (Gumbel 1954) chooses a block of the vocabulary by its mass and then a token within it: the same
    distribution as over the vocabulary at once, with C + W random numbers a row in place of C W.
    """
    vocabulary = logits_BV.shape[1]
    width = 1 << (max(vocabulary - 1, 1).bit_length() + 1) // 2
    blocks = -(-vocabulary // width)
    padding = ((0, 0), (0, blocks * width - vocabulary))
    logits_BCW = jnp.pad(logits_BV, padding, constant_values=-np.inf).reshape(-1, blocks, width)
    mass_BC = jnp.exp(logits_BCW).sum(-1)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (blocks + width,), jnp.float32))(keys_B)
    block_B = jnp.argmax(jnp.log(mass_BC) + noise[:, :blocks], -1).astype(jnp.int32)
    logits_BW = jnp.take_along_axis(logits_BCW, block_B[:, None, None], axis=1)[:, 0]
    offset_B = jnp.argmax(logits_BW + noise[:, blocks:], -1).astype(jnp.int32)
    return block_B * width + offset_B, jnp.log(mass_BC.sum(-1))


def _first(is_true_BV: jax.Array) -> jax.Array:
    """The first true column of each row, int32 [B]; the last one where none is. Faster than `argmax` on CPU."""
    number_V = jnp.arange(is_true_BV.shape[1], dtype=jnp.int32)
    return jnp.where(is_true_BV, number_V[None], number_V[-1]).min(-1)
