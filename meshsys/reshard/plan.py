"""A plan of how a tree of arrays goes from one layout to another over the same devices: what moves, how, how much."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from meshsys.errors import ConfigError
from meshsys.reshard.batches import transit_bytes
from meshsys.reshard.geometry import Geometry, Side, intersect
from meshsys.reshard.leaf import LeafMove
from meshsys.reshard.routes import Route, route
from schedules.stages import StageLayout

__all__ = ["ReshardPlan", "plan_reshard"]

PyTree = Any

_BUCKET_BYTES = 64 << 20
_CACHED_BYTES = 1 << 20  # on a CPU, what a device has on its way stays in the cache: memory's speed is the limit there


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """How a tree of arrays goes from one layout to another.

    Attributes:
        moves: of each leaf.
        buckets: numbers of the leaves that move by one program; kept leaves are in none.
        devices: in the order in which programs number them.
    """

    treedef: Any
    moves: tuple[LeafMove, ...]
    buckets: tuple[tuple[int, ...], ...]
    devices: tuple[jax.Device, ...]
    bucket_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes that the collectives bring from one device to another, over all devices."""
        return sum(move.moved_bytes for move in self.moves)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes of the destination blocks that their devices do not hold in the source layout, over all devices."""
        return sum(move.lower_bound_bytes for move in self.moves)

    @property
    def source_bytes(self) -> int:
        """Of one device; `destination_bytes` alike."""
        return sum(move.source_bytes for move in self.moves)

    @property
    def destination_bytes(self) -> int:
        return sum(move.destination_bytes for move in self.moves)

    @property
    def peak_bytes(self) -> int:
        """The most that a device holds at once when the source is freed on the way ("in_place")."""
        held = peak = self.source_bytes
        for bucket in self.buckets:
            moves = [self.moves[leaf] for leaf in bucket]
            held += sum(move.destination_bytes for move in moves)
            peak = max(peak, held + transit_bytes(moves))
            held -= sum(move.source_bytes for move in moves)
        return peak

    @property
    def extra_bytes(self) -> int:
        """How much of the peak is above the larger of the two trees."""
        return self.peak_bytes - max(self.source_bytes, self.destination_bytes)

    def describe(self) -> str:
        """The plan in a few lines."""
        kinds = Counter("kept" if move.kept else move.route.kind for move in self.moves)
        bound = self.lower_bound_bytes
        lines = [
            f"{len(self.moves)} arrays over {len(self.devices)} devices in {len(self.buckets)} buckets: "
            + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
            f"moved {_mib(self.moved_bytes)}, lower bound {_mib(bound)}"
            + (f" ({self.moved_bytes / bound:.2f}x)" if bound else ""),
            f"a device holds {_mib(self.source_bytes)} before, {_mib(self.destination_bytes)} after, "
            f"at most {_mib(self.peak_bytes)} on the way",
        ]
        return "\n".join(lines)


def plan_reshard(
    source: PyTree,
    destination: PyTree,
    *,
    dtype: Any = None,
    source_stages: StageLayout | None = None,
    destination_stages: StageLayout | None = None,
    bucket_bytes: int = _BUCKET_BYTES,
) -> ReshardPlan:
    """Plans to move a tree of arrays to other shardings over the same devices.

    The two meshes may have other axes and another order of the devices. What is below a "layers" key may be stacked
    by stage ([P, V, J, ...]) on either side, or by layer ([L, ...]).

    Args:
        source: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        destination: shardings, a tree of the same structure.
        dtype: of the result: one for all floating-point arrays, or a tree of dtypes; by default as before. Arrays
            travel in the narrower of both.
        source_stages: where the source's layers are, if they are stacked by stage; `destination_stages` alike.
        bucket_bytes: what one program may hold on a device: blocks before, blocks after, and what is on its way.
            An array with larger blocks has a program of its own and moves in pieces.

    Raises:
        ConfigError: shardings over other devices, or that do not divide an array; the message names it.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(source)
    shardings = _matched(treedef, destination, "destination")
    floating = dtype is not None and jax.tree_util.all_leaves([dtype])
    dtypes = [dtype] * len(leaves) if dtype is None or floating else _matched(treedef, dtype, "dtype")
    devices = _devices(leaves[0][1].sharding) if leaves else ()
    moves = []
    for (path, leaf), sharding, wanted in zip(leaves, shardings, dtypes, strict=True):
        after = leaf.dtype if wanted is None or (floating and not _is_floating(leaf.dtype)) else wanted
        name = ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
        before_stages, after_stages = (_stages(path, stages) for stages in (source_stages, destination_stages))
        layers = leaf.shape if before_stages is None else (_layers(before_stages), *leaf.shape[3:])
        shape = layers if after_stages is None else (*after_stages.table.shape, *layers[1:])
        sides = (
            _side(name, leaf.shape, leaf.sharding, before_stages, devices),
            _side(name, shape, sharding, after_stages, devices),
        )
        moves.append(_move(name, *sides, (jnp.dtype(leaf.dtype), jnp.dtype(after)), devices, bucket_bytes))
    return ReshardPlan(treedef, tuple(moves), _buckets(moves, bucket_bytes), devices, bucket_bytes)


def _matched(treedef: Any, tree: PyTree, name: str) -> list[Any]:
    try:
        return treedef.flatten_up_to(tree)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the tree {name} has another structure than the source: {error}") from None


def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _devices(sharding: Sharding) -> tuple[jax.Device, ...]:
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _stages(path: tuple, stages: StageLayout | None) -> StageLayout | None:
    keys = [getattr(part, "key", None) for part in path]
    return stages.part(str(keys[keys.index("layers") + 1])) if stages and "layers" in keys else None


def _layers(stages: StageLayout) -> int:
    return int((stages.table >= 0).sum())


def _side(
    name: str, shape: tuple[int, ...], sharding: Sharding, stages: StageLayout | None, devices: Sequence[jax.Device]
) -> Side:
    if sharding.device_set != set(devices):
        raise ConfigError(
            f"{name} goes between other devices ({len(devices)} and {len(sharding.device_set)}); resharding is over "
            "the same ones, so give both layouts the same mesh.topology"
        )
    try:
        sharding.shard_shape(shape)
    except ValueError:
        spec = getattr(sharding, "spec", sharding)
        raise ConfigError(
            f"{name} has shape {'x'.join(map(str, shape))}, which {spec} does not divide evenly; leave out an axis"
        ) from None
    return Side(shape, sharding, None if stages is None else stages.table)


def _move(
    name: str,
    source: Side,
    destination: Side,
    dtypes: tuple[np.dtype, np.dtype],
    devices: tuple[jax.Device, ...],
    bucket_bytes: int,
) -> LeafMove:
    geometry, found = _routed(_Sides(source, destination), devices)
    move = LeafMove(name, source, destination, dtypes, geometry, found)
    room = max(bucket_bytes - move.source_bytes - move.destination_bytes, bucket_bytes // 4, 1)
    if devices[0].platform == "cpu":
        room = min(room, _CACHED_BYTES)
    return move.cut(-(-move.transit_bytes // room))


class _Sides:
    """Both sides, by their keys: arrays of the same shape and shardings are worked out once."""

    def __init__(self, source: Side, destination: Side):
        self.source, self.destination = source, destination
        self._key = source.key, destination.key

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sides) and self._key == other._key


@functools.lru_cache(maxsize=256)
def _routed(sides: _Sides, devices: tuple[jax.Device, ...]) -> tuple[Geometry, Route]:
    geometry = intersect(sides.source, sides.destination, devices)
    return geometry, route(geometry)


def _buckets(moves: Sequence[LeafMove], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Leaves in their order, as many to a bucket as fit."""
    buckets: list[list[int]] = []
    for leaf, move in enumerate(moves):
        if move.kept:
            continue
        if not buckets or _bytes([moves[one] for one in [*buckets[-1], leaf]]) > bucket_bytes:
            buckets.append([])
        buckets[-1].append(leaf)
    return tuple(map(tuple, buckets))


def _bytes(moves: Sequence[LeafMove]) -> int:
    return sum(move.source_bytes + move.destination_bytes for move in moves) + transit_bytes(moves)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
