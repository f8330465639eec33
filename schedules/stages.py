"""Which layers a stage holds, and the layout of their parameters on the `pipe` axis.

Shapes: L global layers, P ranks, V chunks a rank, J layer places a chunk (the most that any stage holds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from schedules.actions import Schedule

__all__ = ["StageLayout", "split_layers"]


def split_layers(layers: int, stages: int) -> tuple[range, ...]:
    """Divides layers 0..layers-1 among the stages, in order, as evenly as it goes.

    What is left over goes to the stages in the middle, since the first has the embedding and the last the head
    to run as well. With fewer layers than stages some stages hold none.
    """
    base, extra = divmod(layers, stages)
    middle_first = sorted(range(stages), key=lambda stage: (abs(stage - (stages - 1) / 2), stage))
    counts = [base] * stages
    for stage in middle_first[:extra]:
        counts[stage] += 1
    ends = np.cumsum(counts)
    return tuple(range(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True))


@dataclass(frozen=True)
class StageLayout:
    """Where each layer's parameters are.

    The canonical form of a stacked parameter is [L, ...]; the training form is [P, V, J, ...], sharded over `pipe`
    on its first axis. Places that no layer takes hold zeros.

    Attributes:
        layers: `layers[stage]` are the stage's global layer numbers.
        placement: `placement[stage]` is its rank.
    """

    layers: tuple[range, ...]
    placement: tuple[int, ...]
    ranks: int

    @classmethod
    def of(cls, schedule: Schedule, layers: int) -> StageLayout:
        return cls(split_layers(layers, schedule.stages), schedule.placement, schedule.ranks)

    @cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """`chunk_of[stage]`: its position among the stages of its rank."""
        return tuple(
            sum(owner == rank for owner in self.placement[:stage]) for stage, rank in enumerate(self.placement)
        )

    @cached_property
    def table(self) -> np.ndarray:
        """Global layer numbers, int32 [P, V, J], -1 in unused places."""
        places = max(1, max(len(layers) for layers in self.layers))
        table = np.full((self.ranks, 1 + max(self.chunk_of), places), -1, np.int32)
        for layers, rank, chunk in zip(self.layers, self.placement, self.chunk_of, strict=True):
            table[rank, chunk, : len(layers)] = layers
        return table

    def to_stages(self, stacked: Any) -> Any:
        """[L, ...] -> [P, V, J, ...] on every leaf."""
        used = jnp.asarray(self.table >= 0)

        def leaf(array: jax.Array) -> jax.Array:
            taken = array[np.maximum(self.table, 0)]
            return jnp.where(used.reshape(used.shape + (1,) * (array.ndim - 1)), taken, jnp.zeros_like(taken))

        return jax.tree.map(leaf, stacked)

    def to_layers(self, staged: Any) -> Any:
        """[P, V, J, ...] -> [L, ...] on every leaf."""
        flat = self.table.reshape(-1)
        position = np.argsort(np.where(flat < 0, flat.size, flat), kind="stable")[: int((flat >= 0).sum())]
        return jax.tree.map(lambda array: array.reshape(flat.size, *array.shape[3:])[position], staged)

    def kinds(self) -> Sequence[tuple[bool, int, bool]]:
        """What each stage runs: (embedding?, number of layers, head?)."""
        last = len(self.layers) - 1
        return [(stage == 0, len(layers), stage == last) for stage, layers in enumerate(self.layers)]
