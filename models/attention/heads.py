"""Attention on each device's heads, where XLA's partitioner would not keep them apart.

Over the mesh axes that are left to XLA the heads are divided by hand: it cannot partition a Pallas call, and it gathers
the heads before every collective over a manual axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

__all__ = ["can_divide", "over_heads"]


def can_divide(kv_heads: int) -> bool:
    """Whether the devices of the axes that are left to XLA divide the key-value heads.

    Without a mesh around nobody knows how the heads are divided, unless there is one device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return kv_heads % math.prod(mesh.shape[name] for name in _free_axes()) == 0


def over_heads(kernel: Callable, axis: int, operands: tuple[jax.Array, ...], shared: Any) -> Any:
    """`kernel(*operands, shared)`; dimension `axis` of operands and results has heads, or groups of them.

    Args:
        shared: arrays without heads.
    """
    axes = _free_axes()
    if not axes:
        return kernel(*operands, shared)
    shared = jax.tree.map(jnp.asarray, shared)
    heads = PartitionSpec(*(None,) * axis, axes)
    mapped = jax.shard_map(
        kernel,
        in_specs=(*(heads for _ in operands), jax.tree.map(lambda _: PartitionSpec(), shared)),
        out_specs=heads,
        axis_names=set(axes),
        check_vma=False,
    )
    return mapped(*operands, shared)


def _free_axes() -> tuple[str, ...]:
    """Also those of one device: a Pallas call may not be left with any."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
