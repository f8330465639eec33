"""Parameters that are sharded over the manual axes of a `shard_map`: gathered whole, gradients scattered back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

__all__ = ["gather", "is_spec", "manual_part", "reduce_gradient", "scatter", "sum_over", "widened"]


def is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def manual_part(spec: PartitionSpec, manual: Sequence[str]) -> PartitionSpec:
    """The spec without the axes that are left to XLA."""
    kept = (tuple(name for name in _names(entry) if name in manual) for entry in spec)
    return PartitionSpec(*(names or None for names in kept))


def gather(array: jax.Array, spec: PartitionSpec, skip: int = 0, keep: Sequence[str] = ()) -> jax.Array:
    """Gathers every dimension that is sharded over manual axes; the spec starts at dimension `skip`.

    Args:
        keep: manual axes over which the array stays sharded.

    Axes that are left to XLA may be named in the spec too, and the array stays sharded over them. Where both divide a
    dimension the manual ones are the outer.
    """

    def on_shard(shard: jax.Array, dimensions: Sequence[_Dimension]) -> jax.Array:
        # The dimensions that others divide too go first: they are whole for a while.
        for where, manual, others in sorted(dimensions, key=lambda dimension: -len(dimension[2])):
            if manual:
                shard = jax.lax.all_gather(shard, (*manual, *others), axis=where, tiled=True)
                shard = _own(shard, where, others)
        return shard

    return _each_shard(on_shard, array, spec, skip, leave=keep)


def scatter(array: jax.Array, spec: PartitionSpec, skip: int = 0, keep: Sequence[str] = ()) -> jax.Array:
    """Sums over the manual axes of every sharded dimension, leaving each device its shard: `gather` transposed."""
    return _each_shard(_scatter, array, spec, skip, leave=keep)


def reduce_gradient(
    array: jax.Array, spec: PartitionSpec, axes: Sequence[str], skip: int = 0, done: Sequence[str] = ()
) -> jax.Array:
    """Sums a gradient over the axes and leaves it sharded as its parameter is.

    Args:
        done: axes over which it is a shard of the sum already, where it is sharded over them.
    """
    sharded = {name for entry in spec for name in _names(entry)}

    def on_shard(shard: jax.Array, dimensions: Sequence[_Dimension]) -> jax.Array:
        return sum_over(_scatter(shard, dimensions), [name for name in axes if name not in sharded])

    return _each_shard(on_shard, array, spec, skip, leave=done)


# A dimension, the manual axes that divide it, and the others.
_Dimension = tuple[int, tuple[str, ...], tuple[str, ...]]


def _each_shard(
    function: Callable[[jax.Array, Sequence[_Dimension]], jax.Array],
    array: jax.Array,
    spec: PartitionSpec,
    skip: int,
    leave: Sequence[str] = (),
) -> jax.Array:
    """Runs collectives over manual axes, `leave` apart, on each shard of an array that XLA shards over others.

    XLA's partitioner gathers an array over all other axes before a collective over manual ones, so here they are
    manual too.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = {name for name in mesh.axis_names if name not in mesh.manual_axes and mesh.shape[name] > 1}
    manual = set(mesh.manual_axes) - set(leave)
    dimensions: list[_Dimension] = []
    for place, entry in enumerate(spec, skip):
        names = _names(entry)
        dimensions.append((place, tuple(n for n in names if n in manual), tuple(n for n in names if n in free)))
    others = {name for *_, names in dimensions for name in names}
    if not others:
        return function(array, dimensions)
    specs = PartitionSpec(*(None,) * skip, *(names or None for *_, names in dimensions))
    mapped = jax.shard_map(
        lambda shard: function(shard, dimensions),
        in_specs=specs,
        out_specs=specs,
        axis_names=others,
        check_vma=False,
    )
    return mapped(array)


def _scatter(shard: jax.Array, dimensions: Sequence[_Dimension]) -> jax.Array:
    # The dimensions that only manual axes divide go first, so that little is gathered for the others.
    for where, manual, others in sorted(dimensions, key=lambda dimension: len(dimension[2])):
        if manual:
            if others:
                shard = jax.lax.all_gather(shard, others, axis=where, tiled=True)
            shard = jax.lax.psum_scatter(shard, manual, scatter_dimension=where, tiled=True)
            shard = _own(shard, where, others)
    return shard


def _own(array: jax.Array, where: int, axes: tuple[str, ...]) -> jax.Array:
    """The part of a whole dimension that is this device's along the axes."""
    if not axes:
        return array
    size = array.shape[where] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axes) * size, size, where)


def sum_over(array: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sums over the axes, floats in float32 at least.

    Where all manual axes have size 1, XLA cannot partition a sum over them beside `tensor`; and its compiler for CPU
    aborts on a sum of bfloat16 over manual axes.
    """
    wide = tuple(name for name in axes if jax.lax.axis_size(name) > 1)
    return jax.lax.psum(widened(array), wide).astype(array.dtype) if wide else array


def widened(array: jax.Array) -> jax.Array:
    """The array in the dtype that sums of it are made in: float32 at least, and integers as they are."""
    is_narrow = jnp.issubdtype(array.dtype, jnp.floating) and jnp.finfo(array.dtype).bits < 32
    return array.astype(jnp.float32) if is_narrow else array


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
