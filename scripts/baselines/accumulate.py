"""Gradient accumulation on one device: a scan over microbatches of `value_and_grad` of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from models import Batch, Decoder

__all__ = ["accumulate"]

PyTree = Any


def accumulate(decoder: Decoder, *, remat: str = "none", unroll: bool = False) -> Callable:
    """The function `(params, batch, scale) -> (loss, grads)`, to be jitted.

    Args:
        remat: "none", or "full" to keep each layer's input alone.
        unroll: whether the layers are separate code or a scan.

    In the function's arguments, `params` are `decoder.init`'s with layers [L, ...]; `batch` leaves are
    [M, sequences, ...]; `scale` is a float32 scalar that multiplies the loss.
    """
    layers = decoder.config.layers
    # In a scan nothing can merge the recomputation with the forward, so it needs no barriers.
    layer = decoder.layer if remat == "none" else jax.checkpoint(decoder.layer, prevent_cse=unroll)

    def loss(params: PyTree, microbatch: Batch, scale: jax.Array) -> jax.Array:
        context = decoder.prepare(microbatch)
        x = decoder.embed(params["shared"], context)
        numbers = jnp.arange(layers, dtype=jnp.int32)
        if unroll:
            for one, number in zip(params["layers"], numbers, strict=True):
                x, _ = layer(one, x, context, number)
        else:
            each = params["layers"], numbers
            x, _ = jax.lax.scan(lambda x, xs: (layer(xs[0], x, context, xs[1])[0], None), x, each)
        return scale * decoder.head(params["shared"], x, context)

    def function(params: PyTree, batch: Batch, scale: jax.Array) -> tuple[jax.Array, PyTree]:
        if unroll:
            # Separate arrays, so that a layer's gradients are added to its own and not to a slice of all.
            separate = tuple(jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(layers))
            params = params | {"layers": separate}

        def step(total: PyTree, microbatch: Batch) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, microbatch, scale)), None

        zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
        (total, grads), _ = jax.lax.scan(step, zeros, batch)
        if unroll:
            grads = grads | {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads["layers"])}
        return total, grads

    return function
