"""How scores come from products of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

__all__ = ["HIDDEN", "Scores", "product"]

HIDDEN = -1e30  # the score of what is not seen; finite, so that a query which may look nowhere gives no NaN


@dataclass(frozen=True)
class Scores:
    """`softcap tanh(scale q k / softcap)`, or `scale q k` where softcap is 0."""

    scale: float
    softcap: float

    def of(self, product: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """Scores, and their derivatives by the products."""
        score = product * self.scale
        if not self.softcap:
            return score, self.scale
        capped = jnp.tanh(score / self.softcap)
        return capped * self.softcap, (1 - jnp.square(capped)) * self.scale


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum with float32 sums and result."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
