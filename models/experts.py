"""Gated networks of experts, each over the tokens that go to it.

Tokens are copied to rows sorted by expert, the experts' products run over those, and the rows of a token are summed.
Both ways are gathers, each the other's transpose, so that neither a gradient nor a sum is a scatter.

Shapes: T tokens, K experts of a token, C choices (T K), N rows, D d_model, F width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.grouped import SPARE_ROWS, grouped_outer, grouped_product

__all__ = ["Rows", "Weights", "run_experts", "sort_by_expert"]


class Weights(NamedTuple):
    """Matrices of the experts: gate and up [E, D, F], down [E, F, D]."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


class Rows(NamedTuple):
    """The rows of the experts' input, sorted by expert.

    Attributes:
        choice: what each row is for, int32 [N]: k of token t is choice t K + k.
        row: where each choice is, int32 [T, K].
        kept: which choices have a row, bool [T, K].
        sizes: how many rows each expert has, int32 [E]; the rest are spare.
    """

    choice: jax.Array
    row: jax.Array
    kept: jax.Array
    sizes: jax.Array


def sort_by_expert(expert_TK: jax.Array, kept_TK: jax.Array, experts: int, most: int | None = None) -> Rows:
    """Gives every kept choice a row.

    Args:
        most: a bound of how many are kept, where one is known.
    """
    T, K = expert_TK.shape
    count = T * K if most is None else min(most, T * K)
    key_C = jnp.where(kept_TK, expert_TK, experts).reshape(T * K)
    choice_C = jnp.argsort(key_C, stable=True).astype(jnp.int32)
    row_TK = jnp.argsort(choice_C).astype(jnp.int32).reshape(T, K)
    numbers = jnp.arange(experts, dtype=jnp.int32)
    sizes_E = jnp.sum(key_C[:, None] == numbers[None], axis=0, dtype=jnp.int32)
    return Rows(jnp.pad(choice_C[:count], (0, SPARE_ROWS)), row_TK, kept_TK, sizes_E)


def run_experts(
    x_TD: jax.Array, weight_TK: jax.Array, rows: Rows, weights: Weights, activation: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The sum over each token's experts of `down((activation(x gate) * x up) * weight)`, [T, D].

    Args:
        weight_TK: what each expert's output is multiplied by, float32.
    """
    gate_NF, up_NF = _from_tokens(x_TD, (weights.gate, weights.up), rows)
    gate_NF, up_NF = checkpoint_name(gate_NF, "mlpwi_0"), checkpoint_name(up_NF, "mlpwi_1")
    # Weighted before the last product: the gradient of the weights needs no output of an expert then.
    weight_N = _choices_to_rows(weight_TK, rows).astype(x_TD.dtype)
    hidden_NF = activation(gate_NF) * up_NF * weight_N[:, None]
    return checkpoint_name(_to_tokens(hidden_NF, weights.down, rows), "mlpwo")


def _spread(x_TD: jax.Array, rows: Rows) -> jax.Array:
    """The token of every row, [N, D]."""
    return jnp.take(x_TD, rows.choice // rows.row.shape[1], axis=0, mode="clip")


def _collect(y_ND: jax.Array, rows: Rows) -> jax.Array:
    """The sum of every token's rows, [T, D]: `_spread` transposed."""
    y_TKD = jnp.take(y_ND, rows.row, axis=0, mode="clip")
    kept = jnp.where(rows.kept[..., None], y_TKD, jnp.zeros_like(y_TKD))
    return kept.sum(axis=1, dtype=jnp.float32).astype(y_ND.dtype)


@jax.custom_vjp
def _choices_to_rows(weight_TK: jax.Array, rows: Rows) -> jax.Array:
    """[N] of [T, K]."""
    return jnp.take(weight_TK.reshape(-1), rows.choice, mode="clip")


def _choices_backward(rows: Rows, d_N: jax.Array) -> tuple[jax.Array, None]:
    d_TK = jnp.take(d_N, rows.row, mode="clip")
    return jnp.where(rows.kept, d_TK, jnp.zeros_like(d_TK)), None


_choices_to_rows.defvjp(lambda weight_TK, rows: (_choices_to_rows(weight_TK, rows), rows), _choices_backward)


# What follows keeps tokens for the backward, not their copies in rows, and copies them again for each half of it: then
# what crosses from one half to the other (`schedules.backward`) is tokens too.


@jax.custom_vjp
def _from_tokens(x_TD: jax.Array, matrices_EDF: tuple[jax.Array, ...], rows: Rows) -> tuple[jax.Array, ...]:
    """Every row's token times its expert's matrices, [N, F] each."""
    x_ND = _spread(x_TD, rows)
    return tuple(grouped_product(x_ND, matrix, rows.sizes) for matrix in matrices_EDF)


def _from_forward(x_TD: jax.Array, matrices_EDF: tuple[jax.Array, ...], rows: Rows) -> tuple:
    return _from_tokens(x_TD, matrices_EDF, rows), (x_TD, matrices_EDF, rows)


def _from_backward(kept: tuple, dy_NF: tuple[jax.Array, ...]) -> tuple:
    x_TD, matrices_EDF, rows = kept
    back = (grouped_product(dy, m, rows.sizes, transposed=True) for dy, m in zip(dy_NF, matrices_EDF, strict=True))
    dx_TD = _collect(reduce(jnp.add, back), rows)
    x_ND = _spread(x_TD, rows)
    return dx_TD, tuple(grouped_outer(x_ND, dy, rows.sizes) for dy in dy_NF), None


_from_tokens.defvjp(_from_forward, _from_backward)


@jax.custom_vjp
def _to_tokens(h_NF: jax.Array, matrix_EFD: jax.Array, rows: Rows) -> jax.Array:
    """The sum of every token's rows times their expert's matrix, [T, D]."""
    return _collect(grouped_product(h_NF, matrix_EFD, rows.sizes), rows)


def _to_forward(h_NF: jax.Array, matrix_EFD: jax.Array, rows: Rows) -> tuple:
    return _to_tokens(h_NF, matrix_EFD, rows), (h_NF, matrix_EFD, rows)


def _to_backward(kept: tuple, dy_TD: jax.Array) -> tuple:
    h_NF, matrix_EFD, rows = kept
    dh_NF = grouped_product(_spread(dy_TD, rows), matrix_EFD, rows.sizes, transposed=True)
    return dh_NF, grouped_outer(h_NF, _spread(dy_TD, rows), rows.sizes), None


_to_tokens.defvjp(_to_forward, _to_backward)
