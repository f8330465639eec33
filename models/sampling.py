"""Decoding one sequence with a key-value cache of fixed size: two compiled programs, whatever the lengths.

Shapes: S tokens fed at once, T places in the cache, K key-value heads, H head_dim, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import Mask
from models.decoder import Batch, Decoder

__all__ = ["sample"]

_BLOCK = 64  # prompts and caches are padded to multiples of this, so that few programs are compiled


def sample(
    decoder: Decoder,
    params: Any,
    prompt: np.ndarray,
    *,
    max_tokens: int,
    temperature: float,
    key: jax.Array,
    stop: int,
) -> Iterator[int]:
    """Yields the tokens that follow a prompt, one by one, the stop token not included.

    Args:
        params: in canonical form.
        prompt: int32 [n], at least one token.
        temperature: 0 takes the likeliest token.
        stop: token that ends the text.
    """
    places = _round_up(len(prompt) + max_tokens)
    config = decoder.config
    shape = (config.layers, 1, places, config.num_kv_heads, config.size_of_head)
    cache = (jnp.zeros(shape, jnp.dtype(config.dtype)), jnp.zeros(shape, jnp.dtype(config.dtype)))
    padded = np.zeros((1, min(_round_up(len(prompt)), places)), np.int32)
    padded[0, : len(prompt)] = prompt
    logits, cache = _feed(decoder, params, cache, jnp.asarray(padded), jnp.int32(0), jnp.int32(len(prompt) - 1))
    for position in range(len(prompt), len(prompt) + max_tokens):
        token = int(_pick(logits, jnp.float32(temperature), jax.random.fold_in(key, position)))
        if token == stop:
            return
        yield token
        fed = jnp.full((1, 1), token, jnp.int32)
        logits, cache = _feed(decoder, params, cache, fed, jnp.int32(position), jnp.int32(0))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _feed(
    decoder: Decoder, params: Any, cache: tuple, tokens_1S: jax.Array, start: jax.Array, last: jax.Array
) -> tuple[jax.Array, tuple]:
    """Writes tokens into the cache at `start`; returns the logits [V] after the token number `last` of them."""
    places = cache[0].shape[2]
    positions = start + jnp.arange(tokens_1S.shape[1], dtype=jnp.int32)
    ones = jnp.ones_like(tokens_1S)
    weights = jnp.zeros(tokens_1S.shape, jnp.float32)
    batch = Batch(tokens_1S, tokens_1S, positions[None], ones, weights, jnp.zeros((1,), jnp.int32))
    # What the cache holds after a query's own place is padding, or not written yet.
    place = jnp.arange(places, dtype=jnp.int32)[None]
    context = decoder.prepare(batch)._replace(mask=Mask(positions[None], place, ones, jnp.ones_like(place)))

    def body(x: jax.Array, xs: tuple) -> tuple[jax.Array, tuple]:
        layer, keys, values, number = xs
        return decoder.layer_with_cache(layer, x, context, (keys, values, start), number)

    number = jnp.arange(decoder.config.layers, dtype=jnp.int32)
    x, cache = jax.lax.scan(body, decoder.embed(params["shared"], context), (params["layers"], *cache, number))
    x = jax.lax.dynamic_slice_in_dim(x, last, 1, axis=1)
    return decoder.logits(params["shared"], x)[0, 0], cache


@jax.jit
def _pick(logits_V: jax.Array, temperature: jax.Array, key: jax.Array) -> jax.Array:
    scaled = logits_V / jnp.maximum(temperature, 1e-6)
    return jnp.where(temperature > 0, jax.random.categorical(key, scaled), jnp.argmax(logits_V))


def _round_up(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
