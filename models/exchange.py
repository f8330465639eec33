"""Tokens go to the devices that have their experts, and come back.

Every device has its own tokens and `E / n` of the experts; a manual mesh axis of size n is bound around. Each pair of
devices exchanges a fixed number of slots, somewhat more than its even share of the choices. No choice is dropped for
that: what does not fit goes in further rounds, as many as the fullest pair of all needs, which is none as long as the
router is balanced. Only the first round leaves values for the backward, which runs the others again.

Shapes: T tokens, K choices of a token, D d_model, E experts, n devices, P slots of a pair of devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models.experts import Copies, Weights, collect, run_experts, sort_by_expert, spread, spread_choices

__all__ = ["run_remote_experts"]

_SLACK = 1.5
"""Slots of a pair of devices, in even shares of the choices: more take memory and elementwise work, fewer take time."""


class _Choices(NamedTuple):
    """A device's choices, sorted by expert and therefore by device.

    Attributes:
        expert: int32 [T, K].
        copies: their order.
        first, total: of each device's choices in that order, int32 [n].
    """

    expert: jax.Array
    copies: Copies
    first: jax.Array
    total: jax.Array


def run_remote_experts(
    x_TD: jax.Array,
    weight_TK: jax.Array,
    expert_TK: jax.Array,
    kept_TK: jax.Array,
    weights: Weights,
    activation: Callable[[jax.Array], jax.Array],
    axis: str,
    most: int | None = None,
) -> jax.Array:
    """`models.experts.run_experts` where the experts are divided over a manual mesh axis.

    Args:
        expert_TK: int32, numbers of experts among all.
        kept_TK: choices that are not dropped.
        weights: of this device's experts, which are successive ones.
        most: a bound on this device's kept choices of one expert, where one is known.
    """
    n, experts = jax.lax.axis_size(axis), len(weights.gate)
    T, K = expert_TK.shape
    # A token has each expert once.
    bound = min(T * min(K, experts), experts * (T if most is None else most))
    slots = min(bound, _round_up(int(_SLACK * T * K / n), 8))
    copies, sizes_E = sort_by_expert(expert_TK, kept_TK, n * experts)
    total_n = sizes_E.reshape(n, experts).sum(axis=1, dtype=jnp.int32)
    choices = _Choices(expert_TK, copies, jnp.cumsum(total_n) - total_n, total_n)
    one_round = partial(_round, choices=choices, slots=slots, activation=activation, axis=axis)

    y_TD = one_round(jnp.int32(0), x_TD, weight_TK, weights)
    if slots == bound:
        return y_TD
    rounds = jax.lax.pmax(-(-total_n.max() // slots), axis)
    return y_TD + _later_rounds(x_TD, weight_TK, weights, (choices, rounds), (slots, activation, axis))


def _round(
    number: jax.Array,
    x_TD: jax.Array,
    weight_TK: jax.Array,
    weights: Weights,
    choices: _Choices,
    slots: int,
    activation: Callable[[jax.Array], jax.Array],
    axis: str,
) -> jax.Array:
    """What the choices of one round add to each token, [T, D]."""
    experts = len(weights.gate)
    copies, expert_C = _slots_of_round(number, choices, slots, experts)
    send = partial(_swap, axis=axis)
    expert_C1 = send(expert_C)[:, None]
    weight_C1 = send(spread_choices(weight_TK, copies))[:, None]
    x_CD = _give(x_TD, copies, axis)
    rows, sizes_E = sort_by_expert(expert_C1, expert_C1 < experts, experts)
    return _take_back(run_experts(x_CD, weight_C1, rows, sizes_E, weights, activation), copies, axis)


def _slots_of_round(number: jax.Array, choices: _Choices, slots: int, experts: int) -> tuple[Copies, jax.Array]:
    """The slots that this device fills for every device, [n P] rows, and which of its experts each is for.

    Empty slots are for expert `experts`, which no device has.
    """
    start = number * slots
    slot_P = start + jnp.arange(slots, dtype=jnp.int32)
    sorted_nP = (choices.first[:, None] + slot_P[None]).reshape(-1)
    choice_C = jnp.take(choices.copies.choice, sorted_nP, mode="clip")
    filled_C = (slot_P[None] < choices.total[:, None]).reshape(-1)
    expert_C = jnp.take(choices.expert.reshape(-1), choice_C, mode="clip") % experts

    device_TK = choices.expert // experts
    slot_TK = choices.copies.row - jnp.take(choices.first, device_TK, mode="clip") - start
    kept_TK = choices.copies.kept & (slot_TK >= 0) & (slot_TK < slots)
    copies = Copies(choice_C, device_TK * slots + slot_TK, kept_TK)
    return copies, jnp.where(filled_C, expert_C, experts)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _give(x_TD: jax.Array, copies: Copies, axis: str) -> jax.Array:
    """What this device gets from every device, [n P, D]."""
    return _swap(spread(x_TD, copies), axis)


_give.defvjp(
    lambda x_TD, copies, axis: (_swap(spread(x_TD, copies), axis), copies),
    lambda axis, copies, d_CD: (collect(_swap(d_CD, axis), copies), None),
)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _take_back(y_CD: jax.Array, copies: Copies, axis: str) -> jax.Array:
    """The sums of what comes back for each token, [T, D]: `_give` transposed."""
    return collect(_swap(y_CD, axis), copies)


_take_back.defvjp(
    lambda y_CD, copies, axis: (collect(_swap(y_CD, axis), copies), copies),
    lambda axis, copies, d_TD: (_swap(spread(d_TD, copies), axis), None),
)


def _swap(slots_C: jax.Array, axis: str) -> jax.Array:
    """Slot p for device j, on device i, becomes slot p from device i, on device j. Its own inverse."""
    return jax.lax.all_to_all(slots_C, axis, split_axis=0, concat_axis=0, tiled=True)


# --- Further rounds -----------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _later_rounds(
    x_TD: jax.Array, weight_TK: jax.Array, weights: Weights, plan: tuple[_Choices, jax.Array], static: tuple
) -> jax.Array:
    """The sum of rounds 1 to `plan[1] - 1`; `static` is what `_round` needs besides."""
    choices, rounds = plan

    def add(number: jax.Array, y_TD: jax.Array) -> jax.Array:
        return y_TD + _round(number, x_TD, weight_TK, weights, choices, *static)

    return jax.lax.fori_loop(1, rounds, add, jnp.zeros_like(x_TD))


def _later_forward(x_TD: jax.Array, weight_TK: jax.Array, weights: Weights, plan: tuple, static: tuple) -> tuple:
    return _later_rounds(x_TD, weight_TK, weights, plan, static), (x_TD, weight_TK, weights, plan)


def _later_back(static: tuple, kept: tuple, dy_TD: jax.Array) -> tuple:
    x_TD, weight_TK, weights, (choices, rounds) = kept

    def gradient(of: Callable[..., jax.Array], at: Any) -> Any:
        """A loop for the input and one for the matrices, as the two may run at different times."""

        def add(number: jax.Array, total: Any) -> Any:
            back = jax.vjp(lambda *at: of(number, *at), *at)[1]
            return jax.tree.map(jnp.add, total, back(dy_TD))

        return jax.lax.fori_loop(1, rounds, add, jax.tree.map(jnp.zeros_like, at))

    def of_input(number: jax.Array, x_TD: jax.Array, weight_TK: jax.Array) -> jax.Array:
        return _round(number, x_TD, weight_TK, weights, choices, *static)

    def of_weights(number: jax.Array, weights: Weights) -> jax.Array:
        return _round(number, x_TD, weight_TK, weights, choices, *static)

    return *gradient(of_input, (x_TD, weight_TK)), *gradient(of_weights, (weights,)), None


_later_rounds.defvjp(_later_forward, _later_back)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
