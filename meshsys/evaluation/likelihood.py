"""How likely a model finds texts: the negative log-likelihood of their tokens.

Shapes: B rows, S positions, D d_model, V vocabulary, C positions of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshsys.data.conversations import Example
from meshsys.data.whole_rows import Queue, best_fit, rows_of
from models import Batch, Decoder

__all__ = ["perplexity", "total_loss", "windows"]

_LOGITS = 1 << 24  # that are in memory at a time


def windows(ids: np.ndarray, context: int) -> list[Example]:
    """A document as examples of at most `context` + 1 tokens, in which each token but the first is a target once.

    Examples overlap by half, so that a target has at least half a context before it, or all that there is.
    """
    overlap = context // 2
    found, done = [], 1
    while done < len(ids):
        first = max(0, done - 1 - overlap) if done > 1 else 0
        last = min(first + context + 1, len(ids))
        learned = np.zeros(last - first, np.bool_)
        learned[done - first :] = True
        found.append(Example(ids[first:last], learned))
        done = last
    return found


def total_loss(
    decoder: Decoder, params: Any, examples: Sequence[Example], *, context: int, batch: int
) -> tuple[float, int]:
    """The sum of the negative log-likelihood of what is learned in the examples, in nats, and the number of tokens.

    Args:
        examples: of at most `context` + 1 tokens; several share a row, and do not see one another.
        batch: rows of a step.
    """
    ordered = sorted(examples, key=lambda example: -len(example.ids))  # rows are fuller so
    loss, tokens, queue = 0.0, 0, Queue()
    while queue.waiting or queue.following < len(ordered):
        placed, queue = best_fit(ordered, queue, batch, context)
        rows = rows_of(placed, context)
        arrays = rows.tokens_BS, rows.targets_BS, rows.positions_BS, rows.segment_ids_BS, rows.weights_BS, rows.index_B
        losses_BS = np.asarray(_losses(decoder, params, Batch(*map(jnp.asarray, arrays))))
        loss += float(losses_BS.sum(dtype=np.float64))
        tokens += int(rows.weights_BS.sum())
    return loss, tokens


@partial(jax.jit, static_argnums=0)
def _losses(decoder: Decoder, params: Any, batch: Batch) -> jax.Array:
    """Negative log-likelihoods times weights, float32 [B, S]; logits are made a few positions at a time."""
    x_BSD, _ = decoder.hidden(params, decoder.prepare(batch))
    B, S = batch.tokens.shape
    most = max(1, _LOGITS // (B * decoder.config.vocab_size))
    chunk = max(size for size in range(1, S + 1) if S % size == 0 and size <= most)

    def chunks(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(B, S // chunk, chunk, *x.shape[2:]), 1, 0)

    def loss(one: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits_BCV = decoder.logits(params["shared"], one[0])
        picked_BC = jnp.take_along_axis(logits_BCV, one[1][..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits_BCV, axis=-1) - picked_BC

    losses_BS = jnp.moveaxis(jax.lax.map(loss, (chunks(x_BSD), chunks(batch.targets))), 0, 1).reshape(B, S)
    return jnp.where(batch.weights > 0, losses_BS * batch.weights, 0.0)


def perplexity(loss: float, tokens: int) -> float:
    """The exponential of the mean; infinite where that is too large for a float."""
    try:
        return math.exp(loss / tokens)
    except OverflowError:
        return math.inf
