"""Runs a plan: bucket by bucket, in place, as a copy, or only what changed since the last time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from meshsys.errors import ConfigError
from meshsys.reshard.geometry import Side
from meshsys.reshard.leaf import LeafMove
from meshsys.reshard.plan import ReshardPlan
from meshsys.reshard.program import AXIS, copy_blocks, move_blocks, update_blocks

__all__ = ["Mode", "Resharded", "Resharder"]

PyTree = Any

Mode = Literal["in_place", "copy", "delta"]

_DELTA_BYTES = 256 << 10


@dataclass(frozen=True)
class Resharded:
    """What a run took.

    Attributes:
        seconds: until every array was there; the first run compiles besides, which is not in it.
        changed: with "delta" the share of the pieces that were sent, else 1.
    """

    seconds: float
    changed: float = 1.0


class Resharder:
    """Moves trees of arrays by a plan.

    Arrays that a plan keeps (same blocks on the same devices, same dtype) are handed on: the result shares their
    memory, so a program that is given one of the two to donate takes both.

    Args:
        mode: "copy" leaves the source as it is. "in_place" frees each bucket's source once its result is there, so
            that the peak is `plan.peak_bytes`; the source is consumed. "delta" sends only those pieces that differ on
            any device from what was sent last; the result before is consumed, and what was sent (a tree as large as
            the source, in the dtype of the way) is kept.
        delta_bytes: of a block on one device that are compared and sent as a piece, at most as far as it divides.

    Attributes:
        last: what the last run took.
    """

    def __init__(self, plan: ReshardPlan, mode: Mode = "copy", *, delta_bytes: int = _DELTA_BYTES):
        if mode not in ("in_place", "copy", "delta"):
            raise ConfigError(f"mode={mode} is not a way to reshard; use in_place, copy or delta")
        self.plan, self.mode = plan, mode
        self.last: Resharded | None = None
        self._mesh = Mesh(np.asarray(plan.devices, object), (AXIS,))
        self._programs: dict[tuple, jax.stages.Compiled] = {}
        self._pieces = [_for_delta(move, delta_bytes) for move in plan.moves] if mode == "delta" else list(plan.moves)
        self._sent: dict[int, jax.Array] = {}
        self._results: dict[int, jax.Array] = {}

    def __call__(self, tree: PyTree) -> PyTree:
        """The tree in the plan's other layout.

        Raises:
            ConfigError: the tree is another one than was planned for.
        """
        leaves = self._checked(tree)
        update = bool(self._sent)
        programs = [self._compiled(bucket, update) for bucket in self.plan.buckets]
        start = time.perf_counter()
        results: list[Any] = list(leaves)
        changed: list[Any] = []
        uses = Counter(map(id, leaves))  # an array may be in a tree twice, as tied embeddings are
        for bucket, program in zip(self.plan.buckets, programs, strict=True):
            moves = [self._pieces[leaf] for leaf in bucket]
            blocks = [self._flat(leaves[leaf], self.plan.moves[leaf].source) for leaf in bucket]
            moved, counts = self._run(bucket, program, blocks)
            changed.append(counts)
            for leaf, move, array in zip(bucket, moves, moved, strict=True):
                results[leaf] = _arranged(array, move.destination.shape, move.destination.sharding)
            if self.mode == "in_place":
                jax.block_until_ready(moved)
                del blocks
                for leaf in bucket:
                    uses[id(leaves[leaf])] -= 1
                    if not uses[id(leaves[leaf])]:
                        leaves[leaf].delete()
        for leaf, move in enumerate(self.plan.moves):
            if move.kept:
                results[leaf] = _arranged(leaves[leaf], move.destination.shape, move.destination.sharding)
        jax.block_until_ready(results)
        total = sum(self._pieces[leaf].pieces for bucket in self.plan.buckets for leaf in bucket)
        self.last = Resharded(time.perf_counter() - start, sum(map(int, changed)) / total if total else 0.0)
        return jax.tree.unflatten(self.plan.treedef, results)

    def compiled(self) -> tuple[jax.stages.Compiled, ...]:
        """The programs of the plan's buckets, for their compiler figures."""
        return tuple(self._compiled(bucket) for bucket in self.plan.buckets)

    def _run(self, bucket: Sequence[int], program: Any, blocks: list[jax.Array]) -> tuple[list[jax.Array], Any]:
        """The bucket's results, and how many pieces were sent for them."""
        pieces: Any = sum(self._pieces[leaf].pieces for leaf in bucket)
        if self.mode != "delta":
            return program(blocks), pieces
        if bucket[0] not in self._sent:
            moved, sent = program(blocks)
        else:
            before = [self._sent[leaf] for leaf in bucket], [self._results[leaf] for leaf in bucket]
            moved, sent, count = program(blocks, *before)
            pieces = count.addressable_shards[0].data
        self._sent.update(zip(bucket, sent, strict=True))
        self._results.update(zip(bucket, moved, strict=True))
        return moved, pieces

    def _compiled(self, bucket: Sequence[int], update: bool = False) -> jax.stages.Compiled:
        moves = [self._pieces[leaf] for leaf in bucket]
        key = (update, *(move.key for move in moves))
        if key not in self._programs:
            self._programs[key] = self._compile(moves, update)
        return self._programs[key]

    def _compile(self, moves: list[LeafMove], update: bool) -> jax.stages.Compiled:
        """A program over blocks, and for an update what was sent and what came of it."""
        before = [_spec(move.source) for move in moves]
        after = [_spec(move.destination) for move in moves]
        sources = [self._struct(move.source, move.dtypes[0]) for move in moves]
        run: Any
        specs: Any
        outs: Any
        arguments: Any
        if update:
            sent = [self._struct(move.source, move.bits) for move in moves]
            results = [self._struct(move.destination, move.dtypes[1]) for move in moves]
            run = partial(update_blocks, moves)
            specs, outs, arguments = (before, before, after), (after, before, PartitionSpec()), (sources, sent, results)
            donated: tuple[int, ...] = (1, 2)
        else:
            keeps = self.mode == "delta"
            run = partial(copy_blocks if keeps else move_blocks, moves)
            specs, outs, arguments = (before,), (after, before) if keeps else after, (sources,)
            donated = ()
        mapped = jax.shard_map(run, mesh=self._mesh, in_specs=specs, out_specs=outs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donated).lower(*arguments).compile()

    def _struct(self, side: Side, dtype: np.dtype) -> jax.ShapeDtypeStruct:
        block, sharding = side.block, NamedSharding(self._mesh, _spec(side))
        return jax.ShapeDtypeStruct(_stacked(block, len(self.plan.devices)), dtype, sharding=sharding)

    def _flat(self, leaf: jax.Array, side: Side) -> jax.Array:
        """The blocks of an array one after another in their first dimension; the same memory."""
        shape = _stacked(side.block, len(self.plan.devices))
        return _arranged(leaf, shape, NamedSharding(self._mesh, _spec(side)))

    def _checked(self, tree: PyTree) -> list[jax.Array]:
        leaves, treedef = jax.tree.flatten(tree)
        if treedef != self.plan.treedef:
            raise ConfigError("the tree to reshard has another structure than the one that was planned for")
        for leaf, move in zip(leaves, self.plan.moves, strict=True):
            same = leaf.shape == move.source.shape and leaf.dtype == move.dtypes[0]
            if not same or not leaf.sharding.is_equivalent_to(move.source.sharding, leaf.ndim):
                raise ConfigError(
                    f"{move.name} is {leaf.dtype}{list(leaf.shape)} with {leaf.sharding}, and another layout was "
                    "planned for; plan again"
                )
        return leaves


def _for_delta(move: LeafMove, delta_bytes: int) -> LeafMove:
    return move.cut(max(move.pieces, -(-move.source_bytes // delta_bytes)))


def _spec(side: Side) -> PartitionSpec:
    return PartitionSpec(AXIS) if side.block else PartitionSpec()


def _stacked(block: tuple[int, ...], devices: int) -> tuple[int, ...]:
    return (devices * block[0], *block[1:]) if block else ()


def _arranged(array: jax.Array, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """The same blocks on the same devices as another array."""
    blocks = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)
