"""Gated networks of experts, each over the tokens that go to it.

Tokens are copied to rows sorted by expert, the experts' products run over those, and the rows of a token are summed.
Both ways are gathers, each the other's transpose, so that no gradient is a scatter.

Shapes: T tokens, K choices of a token, N rows, D d_model, F width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from models.grouped import grouped_outer, grouped_product, with_spare_rows

__all__ = ["Copies", "Weights", "collect", "run_experts", "sort_by_expert", "spread", "spread_choices"]


class Weights(NamedTuple):
    """Matrices of the experts: gate and up [E, D, F], down [E, F, D]."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array


class Copies(NamedTuple):
    """Rows that tokens are copied to, one for each choice of an expert.

    Attributes:
        choice: what each row is for, int32 [N]: choice k of token t is t K + k. Rows without one have any.
        row: where each choice is, int32 [T, K].
        kept: which choices have a row, bool [T, K].
    """

    choice: jax.Array
    row: jax.Array
    kept: jax.Array


def sort_by_expert(
    expert_TK: jax.Array, kept_TK: jax.Array, experts: int, most: int | None = None
) -> tuple[Copies, jax.Array]:
    """Gives every kept choice a row.

    Args:
        most: a bound on how many are kept, where one is known.

    Returns:
        The rows, expert 0's first, spare ones last; and how many each expert has, int32 [E].
    """
    T, K = expert_TK.shape
    count = T * K if most is None else min(most, T * K)
    key = jnp.where(kept_TK, expert_TK, experts).reshape(T * K)
    choice = jnp.argsort(key, stable=True).astype(jnp.int32)
    row_TK = jnp.argsort(choice).astype(jnp.int32).reshape(T, K)
    numbers = jnp.arange(experts, dtype=jnp.int32)
    sizes_E = jnp.sum(key[:, None] == numbers[None], axis=0, dtype=jnp.int32)
    spare = with_spare_rows(count) - count
    return Copies(jnp.pad(choice[:count], (0, spare)), row_TK, kept_TK), sizes_E


def run_experts(
    x_TD: jax.Array,
    weight_TK: jax.Array,
    copies: Copies,
    sizes_E: jax.Array,
    weights: Weights,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The sum over each token's experts of `down((activation(x gate) * x up) * weight)`, [T, D].

    Args:
        weight_TK: what each expert's output is multiplied by, float32.
        copies, sizes_E: of `sort_by_expert`.
    """
    gate_NF, up_NF = _from_tokens(x_TD, (weights.gate, weights.up), copies, sizes_E)
    gate_NF, up_NF = checkpoint_name(gate_NF, "mlpwi_0"), checkpoint_name(up_NF, "mlpwi_1")
    # Weighted before the last product, so that the gradient of the weights needs no output of an expert.
    weight_N = spread_choices(weight_TK, copies).astype(x_TD.dtype)
    hidden_NF = activation(gate_NF) * up_NF * weight_N[:, None]
    return checkpoint_name(_to_tokens(hidden_NF, weights.down, copies, sizes_E), "mlpwo")


# --- Copies -------------------------------------------------------------------------------------------------


def spread(x_TD: jax.Array, copies: Copies) -> jax.Array:
    """The token of every row, [N, D]; not differentiable."""
    token_N = jax.lax.div(copies.choice, jnp.full_like(copies.choice, copies.row.shape[1]))
    return jnp.take(x_TD, token_N, axis=0, mode="clip")


def collect(y_ND: jax.Array, copies: Copies) -> jax.Array:
    """The sum of every token's rows, [T, D], made in float32: `spread` transposed; not differentiable."""
    y_TKD = jnp.take(y_ND, copies.row, axis=0, mode="clip")
    return jnp.where(copies.kept[..., None], y_TKD, jnp.zeros_like(y_TKD)).sum(axis=1, dtype=y_ND.dtype)


@jax.custom_vjp
def spread_choices(weight_TK: jax.Array, copies: Copies) -> jax.Array:
    """What belongs to the choice of every row, [N]."""
    return _spread_choices_forward(weight_TK, copies)[0]


def _spread_choices_forward(weight_TK: jax.Array, copies: Copies) -> tuple[jax.Array, Copies]:
    return jnp.take(weight_TK.reshape(-1), copies.choice, mode="clip"), copies


def _spread_choices_back(copies: Copies, d_N: jax.Array) -> tuple[jax.Array, None]:
    d_TK = jnp.take(d_N, copies.row, mode="clip")
    return jnp.where(copies.kept, d_TK, jnp.zeros_like(d_TK)), None


spread_choices.defvjp(_spread_choices_forward, _spread_choices_back)


# --- Products -----------------------------------------------------------------------------------------------
# What is kept for the backward is tokens and not their copies in rows, which are made again.


@jax.custom_vjp
def _from_tokens(
    x_TD: jax.Array, matrices_EDF: tuple[jax.Array, ...], copies: Copies, sizes_E: jax.Array
) -> tuple[jax.Array, ...]:
    """Every row's token times its expert's matrices, [N, F] each."""
    return _from_tokens_forward(x_TD, matrices_EDF, copies, sizes_E)[0]


def _from_tokens_forward(
    x_TD: jax.Array, matrices_EDF: tuple[jax.Array, ...], copies: Copies, sizes_E: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple]:
    x_ND = spread(x_TD, copies)
    y_NF = tuple(grouped_product(x_ND, matrix, sizes_E) for matrix in matrices_EDF)
    return y_NF, (x_TD, matrices_EDF, copies, sizes_E)


def _from_tokens_back(kept: tuple, dy_NF: tuple[jax.Array, ...]) -> tuple:
    x_TD, matrices_EDF, copies, sizes_E = kept
    back = (grouped_product(dy, m, sizes_E, transposed=True) for dy, m in zip(dy_NF, matrices_EDF, strict=True))
    dx_TD = collect(reduce(jnp.add, back), copies)
    x_ND = spread(x_TD, copies)
    return dx_TD, tuple(grouped_outer(x_ND, dy, sizes_E) for dy in dy_NF), None, None


_from_tokens.defvjp(_from_tokens_forward, _from_tokens_back)


@jax.custom_vjp
def _to_tokens(h_NF: jax.Array, matrix_EFD: jax.Array, copies: Copies, sizes_E: jax.Array) -> jax.Array:
    """The sum of every token's rows times their expert's matrix, [T, D]."""
    return _to_tokens_forward(h_NF, matrix_EFD, copies, sizes_E)[0]


def _to_tokens_forward(
    h_NF: jax.Array, matrix_EFD: jax.Array, copies: Copies, sizes_E: jax.Array
) -> tuple[jax.Array, tuple]:
    return collect(grouped_product(h_NF, matrix_EFD, sizes_E), copies), (h_NF, matrix_EFD, copies, sizes_E)


def _to_tokens_back(kept: tuple, dy_TD: jax.Array) -> tuple:
    h_NF, matrix_EFD, copies, sizes_E = kept
    dy_ND = spread(dy_TD, copies)
    dh_NF = grouped_product(dy_ND, matrix_EFD, sizes_E, transposed=True)
    return dh_NF, grouped_outer(h_NF, dy_ND, sizes_E), None, None


_to_tokens.defvjp(_to_tokens_forward, _to_tokens_back)
