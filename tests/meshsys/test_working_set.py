"""The most that is alive at once, against counts by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshsys.working_set import working_set


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def size(aval) -> int:
    return aval.size * aval.dtype.itemsize


def test_products_are_in_memory_and_what_they_were_made_of_is_not_for_longer():
    def chain(w, x):
        return x @ w @ w @ w

    # The last product's operand and result; the argument x counts until it is read.
    assert working_set(chain, struct(8, 8), struct(4, 8), size=size) == 2 * 4 * 4 * 8
    assert working_set(chain, struct(8, 8), struct(4, 8), size=size, held=1) == 2 * 4 * 4 * 8
    assert working_set(lambda w, x: x @ w, struct(8, 2), struct(4, 8), size=size, held=1) == 4 * 4 * (8 + 2)


def test_elementwise_values_are_not_in_memory_unless_a_product_reads_them():
    def fused(w, x):
        return jnp.sin(jnp.cos(x @ w) + 1.0)

    assert working_set(fused, struct(8, 8), struct(4, 8), size=size) == 2 * 4 * 4 * 8

    def read(w, x):
        return jnp.sin(x @ w) @ w

    assert working_set(read, struct(8, 8), struct(4, 8), size=size) == 2 * 4 * 4 * 8


def test_what_is_kept_to_the_end():
    def both(w, x):
        y = x @ w
        return y, jnp.tanh(y) @ w

    # y, the tanh that the product reads, and its result, which may be where it stays.
    assert working_set(both, struct(8, 8), struct(4, 8), size=size) == 3 * 4 * 4 * 8
    assert working_set(both, struct(8, 8), struct(4, 8), size=size, kept=1) == 2 * 4 * 4 * 8


def test_what_only_products_read_may_be_narrow():
    def read(w, x):
        return jnp.sin(x @ w) @ w

    # The product's own result is as wide as it is, also where another product reads it.
    assert working_set(read, struct(8, 8), struct(4, 8), size=size, operand=2) == (4 + 2) * 4 * 8
    assert working_set(lambda w, x: x @ w @ w, struct(8, 8), struct(4, 8), size=size, operand=2) == 2 * 4 * 4 * 8

    def read_twice(w, x):
        y = jnp.sin(x @ w)
        return jnp.sum(y) + jnp.sum(y @ w)

    assert working_set(read_twice, struct(8, 8), struct(4, 8), size=size, operand=2) == 2 * 4 * 4 * 8 + 4


def test_calls_are_looked_into():
    def inner(w, x):
        return jax.jit(lambda x: jnp.sin(x) @ w)(x @ w)

    def outer(w, x):
        return jnp.sin(x @ w) @ w

    shapes = struct(8, 8), struct(4, 8)
    assert working_set(inner, *shapes, size=size) == working_set(outer, *shapes, size=size)
