"""Weights that several pipelines share: lent at the start of a step, their gradients given back at its end.

Both functions run inside `shard_map` over `pipe`. Shapes: V chunks that a rank owns, U that it runs, J layer places.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from schedules.stages import StageLayout

__all__ = ["borrow", "give_back"]


def borrow(owned: jax.Array, layout: StageLayout) -> jax.Array:
    """[V, J, ...] -> [U, J, ...]: with the chunks that the rank has from others."""
    if not layout.borrowed:
        return owned
    chunks = [*owned, *[jnp.zeros_like(owned[0])] * (layout.numbers.shape[1] - owned.shape[0])]
    rank = jax.lax.axis_index("pipe")
    for loan in layout.borrowed:
        arrived = jax.lax.ppermute(owned[loan.owner], "pipe", loan.pairs)
        borrows = jnp.isin(rank, jnp.array([borrower for _, borrower in loan.pairs]))
        chunks[loan.chunk] = jnp.where(borrows, arrived, chunks[loan.chunk])
    return jnp.stack(chunks)


def give_back(grads: jax.Array, layout: StageLayout) -> jax.Array:
    """[U, J, ...] -> [V, J, ...]: the gradient of each owned chunk with those of the stages that borrowed it."""
    owned = layout.table.shape[1]
    if not layout.borrowed:
        return grads
    totals = list(grads[:owned])
    for loan in layout.borrowed:
        back = [(borrower, lender) for lender, borrower in loan.pairs]
        totals[loan.owner] = totals[loan.owner] + jax.lax.ppermute(grads[loan.chunk], "pipe", back)
    # Where ranks own different numbers of chunks, one of the first V may be borrowed.
    owns = jnp.asarray(layout.table >= 0)[jax.lax.axis_index("pipe")]
    return jnp.where(owns.reshape(owns.shape + (1,) * (grads.ndim - 2)), jnp.stack(totals), 0)
