"""A bucket of arrays as one program: cast, pack, exchange, put in order; on a flat mesh of the devices, block by block.

Shapes: N devices, G of a group, C units that each sends to each, T units of a destination block, n units of any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshsys.reshard.plan import LeafMove
from meshsys.reshard.routes import Exchange

__all__ = ["AXIS", "bits_dtype", "copy_blocks", "move_blocks", "update_blocks"]

AXIS = "device"

_BATCH_BYTES = 1 << 20  # arrays that send less share a collective, as each costs a rendezvous
_MOST_SLICES = 64  # rows that are picked one by one; more are gathered


def move_blocks(moves: Sequence[LeafMove], blocks: Sequence[jax.Array]) -> list[jax.Array]:
    """Destination blocks of source blocks, within a `shard_map` over `AXIS`."""
    results: dict[int, jax.Array] = {}
    last: jax.Array | None = None
    for batch in _batches(moves):
        taken = [blocks[leaf] for leaf in batch]
        if last is not None:  # one batch after another, so that the next one's buffers are the last one's
            *taken, _ = lax.optimization_barrier((*taken, last))
        moved = _move_batch([moves[leaf] for leaf in batch], taken)
        results.update(zip(batch, moved, strict=True))
        last = moved[-1]
    return [results[leaf] for leaf in range(len(moves))]


def copy_blocks(moves: Sequence[LeafMove], blocks: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Destination blocks, and the source blocks as bits, for `update_blocks`."""
    return move_blocks(moves, blocks), [_bits(block, move.wire) for move, block in zip(moves, blocks, strict=True)]


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
    now = [_bits(block, move.wire) for move, block in zip(moves, blocks, strict=True)]
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


def _batches(moves: Sequence[LeafMove]) -> list[list[int]]:
    batches: list[list[int]] = []
    open_: dict[tuple, tuple[list[int], int]] = {}
    for leaf, move in enumerate(moves):
        exchanges = tuple((exchange.kind, exchange.groups) for exchange in move.route.exchanges)
        rows = max((exchange.received for exchange in move.route.exchanges), default=0)
        size = move.unit_bytes * rows
        kind = exchanges, bits_dtype(move.wire)
        batch, filled = open_.get(kind, ([], 0))
        if move.pieces > 1 or not exchanges or filled + size > _BATCH_BYTES:
            batch, filled = [], 0
        if not batch:
            batches.append(batch)
        batch.append(leaf)
        if move.pieces == 1:
            open_[kind] = batch, filled + size
    return batches


def _move_batch(moves: Sequence[LeafMove], blocks: Sequence[jax.Array]) -> list[jax.Array]:
    if moves[0].pieces == 1:
        views = [_bits(_source_view(move, block), move.wire) for move, block in zip(moves, blocks, strict=True)]
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
        (moved,) = _exchange([move], [piece if is_bits else _bits(piece, move.wire)])
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
    """Destination views of the bits of source views; moves whose exchanges are of the same kinds and groups."""
    units = [_to_units(view) for view in views]
    pools: list[list[jax.Array]] = [[] for _ in moves]
    for number, exchange in enumerate(moves[0].route.exchanges):
        first = len(exchange.groups[0]) if exchange.kind == "all_to_all" else 1
        sends = [_pick(rows, move.route.exchanges[number].send) for move, rows in zip(moves, units, strict=True)]
        flat = [send.reshape(first, -1) for send in sends]
        received = _collective(exchange, flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1))
        ends = np.cumsum([send.shape[1] for send in flat])
        for pool, move, rows, part in zip(pools, moves, units, jnp.split(received, ends[:-1], axis=1), strict=True):
            pool.append(part.reshape(move.route.exchanges[number].received, *rows.shape[1:]))
    results = []
    for move, pool, rows in zip(moves, pools, units, strict=True):
        brought = sum(part.shape[0] for part in pool)
        last = int(move.route.pick.max())
        if last >= brought:
            pool = [*pool, rows]
        if last >= brought + rows.shape[0]:
            pool = [*pool, jnp.zeros_like(rows[:1])]
        picked = _pick(pool[0] if len(pool) == 1 else jnp.concatenate(pool), move.route.pick)
        results.append(_from_units(_cast_back(picked, move), move.geometry.destination_grid))
    return results


def _collective(exchange: Exchange, rows: jax.Array) -> jax.Array:
    """[G, x] of an all-to-all, else [1, x] -> [G, x], [1, x] of a ppermute."""
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


def bits_dtype(dtype: np.dtype) -> np.dtype:
    """Unsigned integers as wide as a dtype."""
    return np.dtype(f"uint{8 * dtype.itemsize}")


def _bits(array: jax.Array, wire: np.dtype) -> jax.Array:
    """Cast to the dtype of the way, as bits: no compiler widens those, and no NaN changes."""
    return lax.bitcast_convert_type(array.astype(wire), bits_dtype(wire))


def _cast_back(bits: jax.Array, move: LeafMove) -> jax.Array:
    return lax.bitcast_convert_type(bits, move.wire).astype(move.dtypes[1])
