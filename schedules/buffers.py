"""What waits in slots between the actions of a rank, while the program is traced.

Buffers are [slots, ...], for layers [slots, J, ...] (J layer places), or where layers are unrolled a tuple of J
buffers [slots, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from schedules.actions import Kind
from schedules.backward import Crossing, SplitBlock
from schedules.slots import Lifetime, TickTable

__all__ = ["LIFETIMES", "RECOMPUTE_LIFETIMES", "Buffers", "LifetimeKey", "blank", "get", "put"]

PyTree = Any
LifetimeKey = tuple[str, Kind, Kind]
"""A block's name ("first", "last", or a kind of layer's), the action that leaves a value, the last that reads it."""

LIFETIMES = ((Kind.F, Kind.I), (Kind.F, Kind.W), (Kind.I, Kind.W))
"""Residuals that I ends, residuals that W ends, stash."""

RECOMPUTE_LIFETIMES = ((Kind.F, Kind.R), (Kind.R, Kind.I), (Kind.R, Kind.W))
"""With R apart also residuals that R ends, and recomputed values that I ends or W ends."""


class Buffers:
    """Reads and writes the slots of a traced state; `state["buffers"][key]` has one buffer for each value.

    Args:
        blocks: the split blocks by name.
        lifetimes: the table's lifetime of each key.
        table: gives the number of slots.
        places: layer places of a chunk, by block; the ends have none.
        unroll: whether there is a buffer for each place.
        empty: what fills a slot at first.
    """

    def __init__(
        self,
        blocks: Mapping[str, SplitBlock],
        lifetimes: Mapping[LifetimeKey, Lifetime],
        table: TickTable,
        places: Mapping[str, int],
        unroll: bool,
        empty: float,
    ):
        self._blocks, self._lifetimes, self._table = blocks, lifetimes, table
        self._places, self._unroll, self._empty = places, unroll, empty

    def init(self) -> dict[LifetimeKey, list[Any]]:
        buffers: dict[LifetimeKey, list[Any]] = {}
        for key, lifetime in self._lifetimes.items():
            block, start, _ = key
            count = self._table.counts[lifetime]
            avals = [self._leaves(block, start)[i].aval for i in self._waiting(key)]
            if block in ("first", "last"):
                buffers[key] = [blank((count, *aval.shape), aval, self._empty) for aval in avals]
            elif self._unroll:
                buffers[key] = [
                    tuple(blank((count, *aval.shape), aval, self._empty) for _ in range(self._places[block]))
                    for aval in avals
                ]
            else:
                buffers[key] = [blank((count, self._places[block], *aval.shape), aval, self._empty) for aval in avals]
        return buffers

    def write(self, state: dict, row: dict, block: str, start: Kind, values: Sequence[Any], j: Any = None) -> None:
        """Puts what F (residuals), R (recomputed) or I (stash) leaves into its slots; j is the layer place."""
        for key, slot in zip(self._lifetimes, row["slots"], strict=True):
            if key[:2] == (block, start):
                pairs = zip(state["buffers"][key], self._waiting(key), strict=True)
                state["buffers"] = state["buffers"] | {key: [put(buffer, slot, j, values[i]) for buffer, i in pairs]}

    def read(
        self, state: dict, row: dict, block: str, start: Kind, reader: Kind, j: Any = None
    ) -> tuple[list[Any], list[tuple]]:
        """What the reader (R, I or W) takes of what F, R or I left, None for what it does not read; where it was."""
        leaves = self._leaves(block, start)
        values: list[Any] = [None] * len(leaves)
        places = []
        for key, slot in zip(self._lifetimes, row["slots"], strict=True):
            if key[:2] != (block, start):
                continue
            for position, i in enumerate(self._waiting(key)):
                if leaves[i].read_by(reader):
                    values[i] = get(state["buffers"][key][position], slot, j)
                    places.append((key, position, j))
        return values, places

    def settle(self, state: dict, places: Sequence[tuple], outputs: PyTree) -> PyTree:
        """Orders what was computed from buffers (`places`, of `read`) before whatever becomes of them.

        Without this barrier XLA copies every buffer in every branch of the switch, since it cannot tell that the
        reads come first.
        """
        entries = []
        for key, position, j in places:
            buffer = state["buffers"][key][position]
            entries.append(buffer[j] if isinstance(buffer, tuple) else buffer)
        outputs, entries = jax.lax.optimization_barrier((outputs, entries))
        for (key, position, j), entry in zip(places, entries, strict=True):
            buffers = list(state["buffers"][key])
            buffer = buffers[position]
            buffers[position] = (*buffer[:j], entry, *buffer[j + 1 :]) if isinstance(buffer, tuple) else entry
            state["buffers"] = state["buffers"] | {key: buffers}
        return outputs

    def _leaves(self, block: str, start: Kind) -> tuple[Crossing, ...]:
        split = self._blocks[block]
        return {Kind.F: split.residuals, Kind.R: split.recomputed, Kind.I: split.stash}[start]

    def _waiting(self, key: LifetimeKey) -> list[int]:
        """Which of the values that the first action leaves have this lifetime."""
        block, start, end = key
        leaves = enumerate(self._leaves(block, start))
        return [i for i, leaf in leaves if leaf.until is end]


def blank(shape: tuple[int, ...], like: Any, empty: float) -> jax.Array:
    """An array of a value's dtype in its memory space; `empty` fills it where it holds numbers that can be NaN."""
    array = jnp.full(shape, empty if jnp.issubdtype(like.dtype, jnp.inexact) else 0, like.dtype)
    return jax.device_put(array, jax.memory.Space.Host) if Crossing(like, "", True, True).on_host else array


def put(buffer: Any, slot: jax.Array, j: Any, value: jax.Array) -> Any:
    """The buffer with a value at a slot, and a layer place if j is not None."""
    if isinstance(buffer, tuple):
        return (*buffer[:j], put(buffer[j], slot, None, value), *buffer[j + 1 :])
    index = (slot,) if j is None else (slot, j)
    return jax.lax.dynamic_update_slice(
        buffer, value.reshape((1,) * len(index) + value.shape), _start(index, value.ndim)
    )


def get(buffer: Any, slot: jax.Array, j: Any = None) -> jax.Array:
    """The value at a slot, and a layer place if j is not None."""
    if isinstance(buffer, tuple):
        return get(buffer[j], slot)
    index = (slot,) if j is None else (slot, j)
    shape = buffer.shape[len(index) :]
    return jax.lax.dynamic_slice(buffer, _start(index, len(shape)), (1,) * len(index) + shape).reshape(shape)


def _start(index: tuple, rest: int) -> tuple[jax.Array, ...]:
    zero = jnp.zeros((), jnp.int32)
    return (*(jnp.asarray(i, jnp.int32) for i in index), *(zero,) * rest)
