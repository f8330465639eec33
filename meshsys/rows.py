"""The rows of a global batch as a program's arrays on the mesh, and back.

Shapes: R rows, S tokens of a row; M microbatches, B sequences of a microbatch.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshsys.sharding import BATCH_AXES
from models.attention import zigzag_order

__all__ = ["Rows"]

PyTree = Any


class Rows:
    """Divides [R] and [R, S, ...] into microbatches, their sequences over the batch axes, tokens over `context`.

    Args:
        microbatches: M.
        length: S.
    """

    def __init__(self, mesh: Mesh, microbatches: int, length: int):
        self._microbatches, parts = microbatches, mesh.shape["context"]
        self._order = zigzag_order(length, parts) if parts > 1 else None
        self._whole = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))
        self._divided = NamedSharding(mesh, PartitionSpec(None, BATCH_AXES, "context"))

    def sharding(self, ndim: int) -> NamedSharding:
        """Of [M, B, ...] with so many dimensions."""
        return self._divided if ndim > 2 else self._whole

    def put(self, rows: PyTree) -> PyTree:
        """NumPy's [R, ...], the same on every host, as arrays [M, B, ...]."""

        def leaf(field: np.ndarray) -> jax.Array:
            whole = field.reshape(self._microbatches, -1, *field.shape[1:])
            if self._order is not None and whole.ndim > 2:
                whole = whole[:, :, self._order]
            return jax.make_array_from_callback(whole.shape, self.sharding(whole.ndim), lambda index: whole[index])

        return jax.tree.map(leaf, rows)

    def take(self, arrays: PyTree) -> PyTree:
        """Arrays [M, B, S, ...] of a program as NumPy's [R, S, ...]."""

        def leaf(array: jax.Array) -> np.ndarray:
            whole = np.asarray(array)
            if self._order is not None:
                whole = whole[:, :, np.argsort(self._order)]
            return whole.reshape(-1, *whole.shape[2:])

        return jax.tree.map(leaf, arrays)
