"""The whole model on one device: what every pipelined program must equal."""

from __future__ import annotations

from typing import Any

import jax

from models import Batch, Decoder
from tests.oracles.inputs import QUICK


def loss_and_gradients(decoder: Decoder, params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Any]:
    """The token-weighted mean loss of a global batch, and its gradient by plain autodiff."""

    def loss(params: Any) -> jax.Array:
        return decoder.loss_sum(params, batch, key) / batch.weights.sum()

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params)
