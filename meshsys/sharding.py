"""Logical axis names become shardings.

A parameter's logical axes (`models.Decoder.logical_axes`) are mapped to mesh axes by `RULES`. Layers are in the
training form [P, V, J, ...] of `schedules.stages`; in a checkpoint they are in the canonical form [L, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import ManualAxes

__all__ = ["BATCH_AXES", "KEPT_AXES", "RULES", "canonical_specs", "manual_axes", "named", "placed", "training_specs"]

PyTree = Any

RULES: Mapping[str, tuple[str, ...]] = {
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": ("expert",),
    # Embedding and head are at the ends of the pipeline; between steps every rank keeps a part of them.
    "vocab": ("pipe", "tensor"),
}
"""Mesh axes of each logical axis, the outermost first; an axis that does not divide the dimension is left out."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that divide the sequences of a microbatch."""

KEPT_AXES = ("expert",)
"""Mesh axes over which layers stay sharded while they run."""


def manual_axes(sizes: Mapping[str, int]) -> ManualAxes:
    """The axes that a model's blocks know of, where they divide anything."""
    return ManualAxes(**{name: name if sizes[name] > 1 else None for name in ("expert", "context")})


def training_specs(axes: PyTree, shapes: PyTree, sizes: Mapping[str, int]) -> PyTree:
    """`PartitionSpec`s of parameters in training form.

    Args:
        axes: logical axis names, a tuple a leaf; layers lead with "layers".
        shapes: shapes in canonical form (arrays or `jax.ShapeDtypeStruct`s).
        sizes: of the mesh axes.
    """
    return _map(axes, shapes, lambda dims: ("pipe", None, None, *dims), sizes)


def canonical_specs(axes: PyTree, shapes: PyTree, sizes: Mapping[str, int]) -> PyTree:
    """`PartitionSpec`s of parameters in canonical form, as checkpoints hold them."""
    return _map(axes, shapes, lambda dims: (None, *dims), sizes)


def named(mesh: Mesh, specs: PyTree) -> PyTree:
    """`NamedSharding`s of a tree of `PartitionSpec`s."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )


def placed(mesh: Mesh) -> Callable[[tuple[str | None, ...], tuple[int, ...]], NamedSharding]:
    """The shardings of what goes with parameters in canonical form on a mesh (`models.generation.Generator`): of an
    array by its logical axes, which may be "batch", and its shape."""

    def sharding(names: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
        dims = [_dimension(name or "", size, mesh.shape) for name, size in zip(names, shape, strict=True)]
        return NamedSharding(mesh, PartitionSpec(*dims))

    return sharding


def _map(axes: PyTree, shapes: PyTree, stacked: Any, sizes: Mapping[str, int]) -> PyTree:
    def spec(names: tuple[str, ...], shape: Any) -> PartitionSpec:
        dims = [_dimension(name, size, sizes) for name, size in zip(names, shape.shape, strict=True)]
        return PartitionSpec(*(stacked(dims[1:]) if names[0] == "layers" else dims))

    return jax.tree.map(spec, axes, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def _dimension(name: str, size: int, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    taken: list[str] = []
    parts = 1
    for axis in BATCH_AXES if name == "batch" else RULES.get(name, ()):
        if sizes[axis] > 1 and size % (parts * sizes[axis]) == 0:
            taken.append(axis)
            parts *= sizes[axis]
    return tuple(taken) or None
