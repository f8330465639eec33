"""What a value model minimises: the loss of each token, as a pure function of the value before it.

Shapes: B rows, S tokens of a row. All floats are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["ValueFields", "ValueLoss"]


class ValueFields(NamedTuple):
    """The constants of each token's loss. Where `sequence_ids_BS` is 0 the others may hold anything, NaN too.

    Attributes:
        sequence_ids_BS: int32, above 0 for the tokens that are learned; as in `meshsys.rl.objectives.TokenFields`.
        old_value_BS: the value that the update started from.
        return_BS: what the token and those after it brought.
    """

    sequence_ids_BS: jax.Array
    old_value_BS: jax.Array
    return_BS: jax.Array


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error, or that of the value held near the old one if it is larger (PPO's own code, 2017).

    Attributes:
        coefficient: of the loss, where it is added to that of a policy.
        clip: how far from the old value there is something to gain; None for any distance.
    """

    coefficient: float = 1.0
    clip: float | None = None

    def __call__(self, value_BS: jax.Array, fields: ValueFields) -> jax.Array:
        """The loss of each token, to be weighted and summed as a policy's; 0 where none is learned."""
        learned_BS = fields.sequence_ids_BS > 0
        value_BS, old_value_BS, return_BS = (
            jnp.where(learned_BS, x_BS, 0) for x_BS in (value_BS, fields.old_value_BS, fields.return_BS)
        )
        error_BS = jnp.square(value_BS - return_BS)
        if self.clip is not None:
            held_BS = jnp.clip(value_BS, old_value_BS - self.clip, old_value_BS + self.clip)
            error_BS = jnp.maximum(error_BS, jnp.square(held_BS - return_BS))
        return self.coefficient * 0.5 * error_BS
