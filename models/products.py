"""Products of activations with matrices, in the order of operands that a backend is fast at.

A decode step multiplies a handful of rows with every matrix of the model. XLA's CPU backend does `W @ x^T`, with W
stored [outputs, inputs] and x^T [inputs, rows], up to 1.4 times as fast as `x @ W`; with W stored [inputs, outputs] it
is slower than either. In bfloat16 it is the only order whose kernel reads a matrix as it is: 5 times as fast as one
that converts it. So matrices are stored that way for generation (`rows_of`), and a program that is traced under
`weights_first` uses them.

Shapes: I inputs, O outputs, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

__all__ = ["matrix_of", "product", "rows_of", "weights_first"]

_weights_first: ContextVar[bool] = ContextVar("weights_first", default=False)


@contextmanager
def weights_first(is_on: bool = True) -> Iterator[None]:
    """Programs that are traced within compute `product` as W @ x^T; matrices should come from `matrix_of`."""
    token = _weights_first.set(is_on)
    try:
        yield
    finally:
        _weights_first.reset(token)


def product(
    x: jax.Array,
    matrix: jax.Array,
    inputs: int,
    *,
    transposed: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`x` [..., *inputs] times `matrix` [*inputs, *outputs], with so many dimensions of inputs.

    Args:
        transposed: the matrix is [*outputs, *inputs].
        out_dtype: to accumulate in and return; None is the operands' own.
    """
    rest, outputs = x.ndim - inputs, matrix.ndim - inputs
    if not _weights_first.get():
        axes = tuple(range(rest, x.ndim)), tuple(range(outputs, matrix.ndim) if transposed else range(inputs))
        return jnp.tensordot(x, matrix, axes, preferred_element_type=out_dtype)
    size = math.prod(x.shape[rest:])
    matrix_OI = matrix.reshape(-1, size) if transposed else rows_of(matrix, inputs)
    x_IR = x.reshape(-1, size).T
    # Joined from two, as the backend folds a mere transposition into the product, which is slower, and for bfloat16
    # converts the matrix as well; the barrier keeps it from folding the transposition of the result.
    x_IR = jnp.concatenate([x_IR[:1], x_IR[1:]])
    dtype = jnp.result_type(x, matrix)
    sums = dtype if dtype.itemsize >= 4 else jnp.float32
    y_OR = jax.lax.optimization_barrier(jnp.matmul(matrix_OI, x_IR, preferred_element_type=sums))
    y_OR = y_OR.astype(out_dtype or dtype)
    return y_OR.T.reshape(*x.shape[:rest], *(matrix.shape[:outputs] if transposed else matrix.shape[inputs:]))


def rows_of(matrix: jax.Array, inputs: int) -> jax.Array:
    """A matrix [*inputs, *outputs] as it is stored for `weights_first`: [O, I]."""
    return matrix.reshape(math.prod(matrix.shape[:inputs]), -1).T


def matrix_of(rows_OI: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """What `rows_of` was given, of this shape; costs nothing within a program that multiplies with it."""
    return rows_OI.T.reshape(shape)
