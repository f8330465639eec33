"""Products of rows with the matrix of their group; the rows are sorted by group.

XLA has a kernel for `jax.lax.ragged_dot` on TPU v5p. On CPU and on TPU v4, v5e, v6e and 7x it multiplies every row with
every matrix, so there these are loops over the groups that have rows, and in each over blocks of its rows, the last of
which may be partly the next group's (MegaBlocks, Gale et al. 2022, pads groups to whole blocks instead).

Shapes: N rows, G groups, D inputs, F outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

__all__ = ["PRODUCT", "grouped_outer", "grouped_product", "with_spare_rows"]

PyTree = Any

_BLOCKS = (16, 32, 64, 128, 256)  # rows; a group's last block is the smallest that holds what is left

_HAVE_KERNEL = ("TPU v5",)  # kinds of devices, as compiled FLOPs show; v5p calls itself that

PRODUCT = "grouped_product"
"""Name of a product (`jax.ad_checkpoint.checkpoint_name`), for policies that keep matmuls."""


def with_spare_rows(count: int) -> int:
    """How many rows there must be for `count` of them, as the last group's last block reaches over its end."""
    return count + min(max(_BLOCKS[0], count), _BLOCKS[-1] // 2)


def grouped_product(
    x_ND: jax.Array, matrix_GDF: jax.Array, sizes_G: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Each row times its group's matrix, [N, F] in the rows' dtype.

    Args:
        sizes_G: rows of each group, int32; the first rows are group 0's. After the last group's there are others
            (`with_spare_rows`), which have no meaning in the result.
        transposed: the matrices are [G, F, D].
    """
    contracted = 2 if transposed else 1

    def by_blocks(x_ND: jax.Array, matrix_GDF: jax.Array, sizes_G: jax.Array) -> jax.Array:
        def group(g: jax.Array, start: jax.Array, size: jax.Array, y_NF: jax.Array) -> jax.Array:
            matrix = jax.lax.dynamic_index_in_dim(matrix_GDF, g, keepdims=False)

            def block(start: jax.Array, rows: int, left: jax.Array, y_NF: jax.Array) -> jax.Array:
                x = jax.lax.dynamic_slice_in_dim(x_ND, start, rows)
                y = jax.lax.dot_general(x, matrix, (((1,), (contracted - 1,)), ((), ())))
                # Rows of the next group are overwritten when its turn comes.
                return jax.lax.dynamic_update_slice_in_dim(y_NF, y, start, 0)

            return _each_block(start, size, len(x_ND), block, y_NF)

        y_NF = jnp.zeros((len(x_ND), matrix_GDF.shape[3 - contracted]), x_ND.dtype)
        return _each_group(sizes_G, group, y_NF)

    def by_xla(x_ND: jax.Array, matrix_GDF: jax.Array, sizes_G: jax.Array) -> jax.Array:
        numbers = _dimensions(((1,), (contracted,)), groups=(0,))
        return jax.lax.ragged_dot_general(x_ND, matrix_GDF, sizes_G, numbers)

    return checkpoint_name(_best_of(by_blocks, by_xla, x_ND, matrix_GDF, sizes_G), PRODUCT)


def grouped_outer(x_ND: jax.Array, y_NF: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """The sum over each group's rows of the outer products, [G, D, F]: the gradient of the matrices."""

    def by_blocks(x_ND: jax.Array, y_NF: jax.Array, sizes_G: jax.Array) -> jax.Array:
        D, F = x_ND.shape[1], y_NF.shape[1]

        def group(g: jax.Array, start: jax.Array, size: jax.Array, sums_GDF: jax.Array) -> jax.Array:
            def block(start: jax.Array, rows: int, left: jax.Array, sum_DF: jax.Array) -> jax.Array:
                x = jax.lax.dynamic_slice_in_dim(x_ND, start, rows)
                y = jax.lax.dynamic_slice_in_dim(y_NF, start, rows)
                own = (jnp.arange(rows, dtype=jnp.int32) < left)[:, None]
                x, y = jnp.where(own, x, jnp.zeros_like(x)), jnp.where(own, y, jnp.zeros_like(y))
                return sum_DF + jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

            sum_DF = _each_block(start, size, len(x_ND), block, jnp.zeros((D, F), jnp.float32))
            return jax.lax.dynamic_update_index_in_dim(sums_GDF, sum_DF.astype(sums_GDF.dtype), g, 0)

        return _each_group(sizes_G, group, jnp.zeros((len(sizes_G), D, F), x_ND.dtype))

    def by_xla(x_ND: jax.Array, y_NF: jax.Array, sizes_G: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot_general(x_ND, y_NF, sizes_G, _dimensions(((0,), (0,)), groups=()))

    return _best_of(by_blocks, by_xla, x_ND, y_NF, sizes_G)


def _best_of(by_blocks: Callable[..., jax.Array], by_xla: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    on_tpu = by_xla if device.device_kind in _HAVE_KERNEL else by_blocks
    return jax.lax.platform_dependent(*args, cpu=by_blocks, tpu=on_tpu, default=by_xla)


def _dimensions(
    contracted: tuple[tuple[int, ...], tuple[int, ...]], groups: tuple[int, ...]
) -> jax.lax.RaggedDotDimensionNumbers:
    return jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=groups
    )


def _each_group(sizes_G: jax.Array, body: Callable[..., PyTree], carry: PyTree) -> PyTree:
    """`carry = body(group, first row, rows, carry)` for the groups that have rows, in order."""
    first_G = jnp.cumsum(sizes_G) - sizes_G
    some_first_G = jnp.argsort(sizes_G == 0, stable=True).astype(jnp.int32)

    def step(i: jax.Array, carry: PyTree) -> PyTree:
        g = some_first_G[i]
        return body(g, first_G[g], sizes_G[g], carry)

    return jax.lax.fori_loop(0, jnp.sum(sizes_G > 0, dtype=jnp.int32), step, carry)


def _each_block(start: jax.Array, size: jax.Array, most: int, body: Callable[..., PyTree], carry: PyTree) -> PyTree:
    """`carry = body(first row, rows of the block, rows of the group from there on, carry)`."""

    def blocks(rows: int, count: jax.Array, start: jax.Array, left: jax.Array, carry: PyTree) -> PyTree:
        def step(i: jax.Array, carry: PyTree) -> PyTree:
            return body(start + i * rows, rows, left - i * rows, carry)

        return jax.lax.fori_loop(0, count, step, carry)

    largest = _BLOCKS[-1]
    count = size // largest
    if largest <= most:
        carry = blocks(largest, count, start, size, carry)
        start, size = start + count * largest, size - count * largest
    for below, rows in itertools.pairwise((0, *_BLOCKS)):
        if rows <= most:
            fits = (size > below) & (size <= rows)
            carry = blocks(rows, fits.astype(jnp.int32), start, size, carry)
    return carry
