"""A bucket of arrays as one program: cast, pack, exchange, put in order; on a flat mesh of the devices, block by block.

Shapes: N devices, G of a group, C units that each sends to each, T units of a destination block, n units of any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshsys.reshard.batches import IN_FLIGHT, batches
from meshsys.reshard.leaf import LeafMove
from meshsys.reshard.routes import Exchange

__all__ = ["AXIS", "copy_blocks", "move_blocks", "update_blocks"]

AXIS = "device"

_MOST_SLICES = 64  # rows that are picked one by one; more are gathered


def move_blocks(moves: Sequence[LeafMove], blocks: Sequence[jax.Array]) -> list[jax.Array]:
    """Destination blocks of source blocks, within a `shard_map` over `AXIS`."""
    results: dict[int, jax.Array] = {}
    ends: list[jax.Array] = []
    for batch in batches(moves):
        taken = [blocks[leaf] for leaf in batch]
        if len(ends) >= IN_FLIGHT:  # its buffers are then those of the one that has ended
            *taken, _ = lax.optimization_barrier((*taken, ends[-IN_FLIGHT]))
        moved = _move_batch([moves[leaf] for leaf in batch], taken)
        results.update(zip(batch, moved, strict=True))
        ends.append(moved[-1])
    return [results[leaf] for leaf in range(len(moves))]


def copy_blocks(moves: Sequence[LeafMove], blocks: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Destination blocks, and the source blocks as bits, for `update_blocks`."""
    return move_blocks(moves, blocks), [_bits(block, move) for move, block in zip(moves, blocks, strict=True)]


def update_blocks(
    moves: Sequence[LeafMove],
    blocks: Sequence[jax.Array],
    sent: Sequence[jax.Array],
    results: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
    """Brings destination blocks up to date by the pieces in which any device's block differs from what was sent.

    Args:
        sent: the source blocks as they were sent last, as bits.
        results: the destination blocks that came of them.

    Returns:
        The results, what is now sent, and the number of pieces that differed.
    """
    now = [_bits(block, move) for move, block in zip(moves, blocks, strict=True)]
    differ = [_differ(*each) for each in zip(moves, now, sent, strict=True)]
    ends = np.cumsum([move.pieces for move in moves])
    differ = jnp.split(lax.psum(jnp.concatenate(differ).astype(jnp.int32), AXIS) > 0, ends[:-1])
    updated: list[jax.Array] = []
    for move, bits, result, which in zip(moves, now, results, differ, strict=True):
        if updated:
            bits, _ = lax.optimization_barrier((bits, updated[-1]))
        order, count = jnp.argsort(~which), jnp.sum(which, dtype=jnp.int32)
        view = _destination_view(move, result)
        view = _piecewise(move, _source_view(move, bits), view, count, order.__getitem__, is_bits=True)
        updated.append(view.reshape(move.destination.block))
    return updated, now, jnp.sum(jnp.concatenate(differ), dtype=jnp.int32)


def _differ(move: LeafMove, now: jax.Array, sent: jax.Array) -> jax.Array:
    """Of each piece, whether it holds another bit, bool [pieces]."""
    dim, size = _cut_dim(move)
    view = _source_view(move, now) != _source_view(move, sent)
    before = math.prod(view.shape[: 2 * dim + 1])
    return jnp.any(view.reshape(before, move.pieces, size * math.prod(view.shape[2 * dim + 2 :])), axis=(0, 2))


def _move_batch(moves: Sequence[LeafMove], blocks: Sequence[jax.Array]) -> list[jax.Array]:
    if moves[0].pieces == 1:
        views = [_packed(_source_view(move, block), move) for move, block in zip(moves, blocks, strict=True)]
        moved = _exchange(moves, views)
        return [result.reshape(move.destination.block) for move, result in zip(moves, moved, strict=True)]
    (move,), (block,) = moves, blocks
    out = jnp.zeros(move.destination.block, move.dtypes[1])
    out = _piecewise(move, _source_view(move, block), _destination_view(move, out), move.pieces, lambda i: i)
    return [out.reshape(move.destination.block)]


def _piecewise(
    move: LeafMove,
    view: jax.Array,
    out: jax.Array,
    count: int | jax.Array,
    which: Callable[[jax.Array], jax.Array],
    is_bits: bool = False,
) -> jax.Array:
    """Moves pieces `which(0)`, ..., `which(count - 1)` of a source view, or of its bits, into a destination view."""
    dim, size = _cut_dim(move)
    axis = 2 * dim + 1

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        at = which(i) * size
        piece = lax.dynamic_slice_in_dim(view, at, size, axis)
        (moved,) = _exchange([move], [piece if is_bits else _packed(piece, move)])
        return lax.dynamic_update_slice_in_dim(out, moved, at, axis)

    return lax.fori_loop(0, count, body, out)


def _cut_dim(move: LeafMove) -> tuple[int, int]:
    """The dimension of a unit that is cut, and the size of a piece in it."""
    dim = next((k for k, size in enumerate(move.geometry.unit) if size % move.pieces == 0), 0)
    return dim, move.geometry.unit[dim] // move.pieces


def _source_view(move: LeafMove, block: jax.Array) -> jax.Array:
    """[g0, u0, g1, u1, ...]: grid and unit in each dimension."""
    return block.reshape(_interleaved(move.geometry.source_grid, move.geometry.unit))


def _destination_view(move: LeafMove, block: jax.Array) -> jax.Array:
    return block.reshape(_interleaved(move.geometry.destination_grid, move.geometry.unit))


def _interleaved(grid: Sequence[int], unit: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for pair in zip(grid, unit, strict=True) for size in pair)


def _exchange(moves: Sequence[LeafMove], views: Sequence[jax.Array]) -> list[jax.Array]:
    """Destination views of source views, packed or as bits; moves whose exchanges are of the same kinds and groups."""
    units = [_Units(view) for view in views]
    pools: list[list[jax.Array]] = [[] for _ in moves]
    for number, exchange in enumerate(moves[0].route.exchanges):
        own = [move.route.exchanges[number] for move in moves]
        sends = [each.pick(one.send) for each, one in zip(units, own, strict=True)]
        for pool, one, send, part in zip(pools, own, sends, _together(exchange, sends), strict=True):
            pool.append(part.reshape(one.received, *send.shape[1:]))
    return [_assembled(*each) for each in zip(moves, units, pools, strict=True)]


def _assembled(move: LeafMove, own: _Units, pool: list[jax.Array]) -> jax.Array:
    """The destination view of what the exchanges brought and of what was there."""
    brought, last = sum(part.shape[0] for part in pool), int(move.route.pick.max())
    if not pool and last < own.count:
        picked = own.pick(move.route.pick)
    else:
        if last >= brought:
            pool = [*pool, own.rows]
        if last >= brought + own.count:
            pool = [*pool, jnp.zeros_like(own.rows[:1])]
        picked = _pick(pool[0] if len(pool) == 1 else jnp.concatenate(pool), move.route.pick)
    return _from_units(_cast_back(picked, move), move.geometry.destination_grid)


class _Units:
    """The units of a view [g0, u0, g1, u1, ...]."""

    def __init__(self, view: jax.Array):
        self._view = view
        self._grid, self._unit = view.shape[::2], view.shape[1::2]
        self.count = math.prod(self._grid)

    @cached_property
    def rows(self) -> jax.Array:
        """[n, u0, u1, ...]."""
        view = self._view
        units = view.transpose([*range(0, view.ndim, 2), *range(1, view.ndim, 2)])
        return units.reshape(-1, *self._unit)

    def pick(self, table: np.ndarray) -> jax.Array:
        """[k, u0, u1, ...]: those of a device's line in a table [N, k]."""
        line = table[0]
        in_order = np.array_equal(line, np.arange(self.count))
        if np.any(table != line) or in_order or len(line) > _MOST_SLICES:
            return _pick(self.rows, table)
        return jnp.stack([self._one(np.unravel_index(one, self._grid)) for one in line])

    def _one(self, at: Sequence[int]) -> jax.Array:
        starts = [start for one in at for start in (int(one), 0)]
        ends = [end for one, size in zip(at, self._unit, strict=True) for end in (int(one) + 1, size)]
        return lax.slice(self._view, starts, ends).reshape(self._unit)


def _together(exchange: Exchange, sends: Sequence[jax.Array]) -> list[jax.Array]:
    """Sends rows of several arrays, [G C, ...] of an all-to-all, else [C, ...], by one collective."""
    if len(sends) == 1:
        return [_collective(exchange, sends[0])]
    first = len(exchange.groups[0]) if exchange.kind == "all_to_all" else 1
    flat = [send.reshape(first, -1) for send in sends]
    ends = np.cumsum([send.shape[1] for send in flat])
    return jnp.split(_collective(exchange, jnp.concatenate(flat, axis=1)), ends[:-1], axis=1)


def _collective(exchange: Exchange, rows: jax.Array) -> jax.Array:
    """Over the first dimension."""
    if exchange.kind == "ppermute":
        return lax.ppermute(rows, AXIS, exchange.groups)
    groups = None if len(exchange.groups) == 1 else exchange.groups
    if exchange.kind == "all_to_all":
        return lax.all_to_all(rows, AXIS, 0, 0, axis_index_groups=groups, tiled=True)
    return lax.all_gather(rows, AXIS, axis_index_groups=groups, tiled=True)


def _pick(rows: jax.Array, table: np.ndarray) -> jax.Array:
    """[n, ...] -> [k, ...]: the rows of a device's line in a table [N, k]."""
    if np.any(table != table[0]):
        own = jnp.asarray(table, jnp.int32)[lax.axis_index(AXIS)]
        return rows.at[own].get(mode="promise_in_bounds")
    line = table[0]
    if len(line) == rows.shape[0] and np.array_equal(line, np.arange(len(line))):
        return rows
    if len(line) <= _MOST_SLICES:
        return jnp.stack([rows[one] for one in line])
    return rows.at[line].get(mode="promise_in_bounds")


def _to_units(view: jax.Array) -> jax.Array:
    """[g0, u0, g1, u1, ...] -> [n, u0, u1, ...]."""
    units = view.transpose([*range(0, view.ndim, 2), *range(1, view.ndim, 2)])
    return units.reshape(-1, *view.shape[1::2])


def _from_units(units: jax.Array, grid: Sequence[int]) -> jax.Array:
    """[n, u0, u1, ...] -> [g0, u0, g1, u1, ...]."""
    dims = len(grid)
    return units.reshape(*grid, *units.shape[1:]).transpose([at for k in range(dims) for at in (k, dims + k)])


def _packed(array: jax.Array, move: LeafMove) -> jax.Array:
    """Cast to the dtype of the way; a narrow one as bits, as compilers widen such numbers, which changes NaNs."""
    return _bits(array, move) if move.wire.itemsize < 4 else array.astype(move.wire)


def _bits(array: jax.Array, move: LeafMove) -> jax.Array:
    """Cast to the dtype of the way, as bits, which are equal where NaNs are."""
    array = array.astype(move.wire)
    return array if move.bits == move.wire else lax.bitcast_convert_type(array, move.bits)


def _cast_back(packed: jax.Array, move: LeafMove) -> jax.Array:
    array = packed if packed.dtype == move.wire else lax.bitcast_convert_type(packed, move.wire)
    return array.astype(move.dtypes[1])
