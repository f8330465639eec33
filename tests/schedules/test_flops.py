"""FLOPs of products that are no plain `dot_general`, and of those that run more or less than once, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from schedules.flops import product_flops

N, D, F, G = 12, 3, 5, 4


def test_a_row_of_a_ragged_product_is_in_one_group():
    """So is a row of the gradient of its matrices: each of the three products has 2 N D F."""
    x, matrix = jnp.ones((N, D)), jnp.ones((G, D, F))
    sizes = jnp.full(G, N // G, jnp.int32)

    def function(x, matrix):
        return jnp.sum(jnp.square(jax.lax.ragged_dot(x, matrix, sizes)))

    assert product_flops(function, x, matrix) == 2 * N * D * F
    assert product_flops(jax.grad(function, (0, 1)), x, matrix) == 3 * 2 * N * D * F


def test_one_branch_of_a_conditional_runs():
    x, wide, square = jnp.ones((N, D)), jnp.ones((D, F)), jnp.ones((D, D))

    def function(number, x):
        return jax.lax.switch(number, [lambda x: jnp.sum(x @ wide), lambda x: jnp.sum(x @ square), jnp.sum], x)

    assert product_flops(function, np.int32(0), x) == 2 * N * D * F


def _repeated(times):
    return lambda x, count: jax.lax.fori_loop(0, times(count), lambda _, y: y @ x, x)


@pytest.mark.parametrize(
    "function, wanted",
    [
        (_repeated(lambda count: 5), 5),
        (_repeated(lambda count: jax.lax.min(count, jnp.int32(7))), 7),
        (_repeated(lambda count: jax.lax.min(jnp.int32(7), count)), 7),
        (_repeated(lambda count: count), 1),
        (_repeated(lambda count: jax.lax.min(count, count)), 1),
        (lambda x, count: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y @ x, x), 1),
    ],
)
def test_a_loop_runs_as_often_as_it_is_bounded(function, wanted):
    x, count = jax.ShapeDtypeStruct((D, D), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    assert product_flops(function, x, count) == wanted * 2 * D**3
