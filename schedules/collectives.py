"""Parameters that are sharded over the manual axes of a `shard_map`: gathered whole, gradients scattered back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

__all__ = ["gather", "is_spec", "manual_part", "reduce_gradient", "scatter", "sum_over", "without"]


def is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def manual_part(spec: PartitionSpec, manual: Sequence[str]) -> PartitionSpec:
    """The spec without the axes that are left to XLA."""
    kept = (tuple(name for name in _names(entry) if name in manual) for entry in spec)
    return PartitionSpec(*(names or None for names in kept))


def without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """The spec of an array that stays sharded over the axis."""
    kept = (tuple(name for name in _names(entry) if name != axis) for entry in spec)
    return PartitionSpec(*(names or None for names in kept))


def gather(array: jax.Array, spec: PartitionSpec, skip: int = 0) -> jax.Array:
    """Gathers every sharded dimension; the spec starts at dimension `skip`."""
    for dimension, entry in enumerate(spec):
        if names := _names(entry):
            array = jax.lax.all_gather(array, names, axis=dimension + skip, tiled=True)
    return array


def scatter(array: jax.Array, spec: PartitionSpec, skip: int = 0) -> jax.Array:
    """Sums over the axes of every sharded dimension, leaving each device its shard: the transpose of `gather`."""
    for dimension, entry in enumerate(spec):
        if names := _names(entry):
            array = jax.lax.psum_scatter(array, names, scatter_dimension=dimension + skip, tiled=True)
    return array


def reduce_gradient(
    array: jax.Array, spec: PartitionSpec, axes: Sequence[str], skip: int = 0, done: Sequence[str] = ()
) -> jax.Array:
    """Sums a gradient over the axes and leaves it sharded as its parameter is.

    Args:
        done: axes over which it has been scattered already, if it is sharded over them.
    """
    sharded = {name for entry in spec for name in _names(entry)}
    if not sharded & set(done):
        array = scatter(array, spec, skip)
    return sum_over(array, [name for name in axes if name not in sharded])


def sum_over(array: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sums over the axes. Where all manual axes have size 1, XLA cannot partition a sum over them beside `tensor`."""
    wide = tuple(name for name in axes if jax.lax.axis_size(name) > 1)
    return jax.lax.psum(array, wide) if wide else array


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
