"""Attention over a sequence that is divided over a mesh axis (ring attention, Liu et al. 2023).

Every device keeps its queries; keys and values visit all devices, and so do the sums of their gradients in the
backward. Half of a device's keys travel one way round the ring and half the other way, so that links are used in both
directions at once.

A device exchanges with one neighbour and then with the other, by collectives over pairs of devices. `ppermute` would
do it in one collective, but all devices of the mesh have to take part in that one, and in a pipeline the ranks run
different branches: XLA's CPU backend waits for the others forever.

Shapes: B batch, S queries and keys of a device, N query heads, K key-value heads, H dimensions of a query and key,
V dimensions of a value; C devices, J blocks of U keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from models.attention import blocks
from models.attention.heads import can_divide, over_heads
from models.attention.masks import Mask
from models.attention.scores import Scores

__all__ = ["attend_ring", "zigzag_order"]


def zigzag_order(length: int, parts: int) -> np.ndarray:
    """Where the tokens of a sequence come from when it is divided so that causal attention is equal work for all.

    Of 2 `parts` chunks, part i has the chunks i and 2 parts - 1 - i: together its queries see as many keys as any
    other's (Brandon et al. 2023 spread the work by stripes, others by this zigzag).

    Returns:
        int32 [length]; the tokens in the new order are `tokens[order]`, and their places are `order` itself.

    Raises:
        ValueError: `length` is not a multiple of `2 * parts`.
    """
    if length % (2 * parts):
        raise ValueError(
            f"a sequence of {length} tokens cannot be divided over {parts} devices in two chunks each; "
            f"use a multiple of {2 * parts}"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * parts, -1)
    return np.stack([chunks[:parts], chunks[: parts - 1 : -1]], axis=1).reshape(length)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attend_ring(
    q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, mask: Mask, scores: Scores, block: int, axis: str
) -> jax.Array:
    """See `models.attention.attend`; what the backward reads is what it reads of `attend_blockwise`.

    Args:
        mask: of the device's own queries and keys, places counted over all devices. Tokens may be anywhere.
        axis: a manual mesh axis of an even number of devices.

    Raises:
        ValueError: a number of devices, or of keys on each, that is not even.
    """
    return _forward(q_BSNH, k_BSKH, v_BSKV, mask, scores, block, axis)[0]


def _forward(
    q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, mask: Mask, scores: Scores, block: int, axis: str
) -> tuple[jax.Array, Any]:
    _check(k_BSKH, axis)
    operands = q_BSNH, k_BSKH, v_BSKV
    run = partial(_absorb_all, scores=scores, block=block, axis=axis)
    out, norm = _each_head(run, operands, mask)
    out_BSNV, norm_BSN = checkpoint_name(out, "context"), checkpoint_name(norm, "context")
    return out_BSNV, (operands, mask, out_BSNV, norm_BSN)


def _backward(scores: Scores, block: int, axis: str, residuals: Any, d_out_BSNV: jax.Array) -> tuple:
    operands, mask, out_BSNV, norm_BSN = residuals
    run = partial(_gradients_of_all, scores=scores, block=block, axis=axis)
    return *_each_head(run, (*operands, out_BSNV, norm_BSN, d_out_BSNV), mask), None


attend_ring.defvjp(_forward, _backward)


def _each_head(run: Callable, operands: tuple[jax.Array, ...], mask: Mask) -> Any:
    divided = can_divide(operands[1].shape[2])
    return over_heads(run, 2, operands, mask) if divided else run(*operands, mask)


_Pair = tuple[jax.Array, jax.Array]  # keys and values, in blocks


def _absorb_all(
    q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKV: jax.Array, mask: Mask, scores: Scores, block: int, axis: str
) -> tuple[jax.Array, jax.Array]:
    """The output, and the logarithm of the sum of exponentials."""
    (_, S, K, V), devices = v_BSKV.shape, jax.lax.axis_size(axis)
    q_IBKQGH = blocks.query_blocks(q_BSNH, K, block)
    masks = _masks(mask, block, axis)

    def step(number: jax.Array, state: tuple[blocks.Running, _Pair]) -> tuple[blocks.Running, _Pair]:
        running, (k, v) = state
        return blocks.absorb(running, q_IBKQGH, k, v, masks(number), scores), _shift((k, v), axis)

    state = blocks.start(q_IBKQGH, V), (_key_blocks(k_BSKH, block), _key_blocks(v_BSKV, block))
    running, (k, v) = jax.lax.fori_loop(0, devices - 1, step, state)
    running = blocks.absorb(running, q_IBKQGH, k, v, masks(devices - 1), scores)
    out_BSNV, norm_BSN = (blocks.from_query_blocks(x, S) for x in blocks.finish(running))
    return out_BSNV.astype(v_BSKV.dtype), norm_BSN


def _gradients_of_all(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    out_BSNV: jax.Array,
    norm_BSN: jax.Array,
    d_out_BSNV: jax.Array,
    mask: Mask,
    scores: Scores,
    block: int,
    axis: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    (_, S, K, _), devices = k_BSKH.shape, jax.lax.axis_size(axis)
    queries = blocks.backward(q_BSNH, out_BSNV, norm_BSN, d_out_BSNV, K, block)
    masks = _masks(mask, block, axis)

    def add(number: jax.Array | int, grads: blocks.Gradients, keys: _Pair) -> blocks.Gradients:
        return blocks.gradients(grads, queries, *keys, masks(number), scores)

    def step(number: jax.Array, state: tuple[blocks.Gradients, _Pair]) -> tuple[blocks.Gradients, _Pair]:
        dq, dk, dv = add(number, *state)
        dk, dv, *keys = _shift((dk, dv, *state[1]), axis)
        return blocks.Gradients(dq, dk, dv), tuple(keys)

    keys = _key_blocks(k_BSKH, block), _key_blocks(v_BSKV, block)
    zeros = blocks.Gradients(*(jnp.zeros(x.shape, jnp.float32) for x in (queries.q_IBKQGH, *keys)))
    state = jax.lax.fori_loop(0, devices - 1, step, (zeros, keys))
    dq, *travelling = add(devices - 1, *state)
    dk, dv = (_from_key_blocks(x, S) for x in _shift(travelling, axis))
    dq = blocks.from_query_blocks(dq, S)
    return dq.astype(q_BSNH.dtype), dk.astype(k_BSKH.dtype), dv.astype(v_BSKV.dtype)


def _check(k_BSKH: jax.Array, axis: str) -> None:
    devices, length = jax.lax.axis_size(axis), k_BSKH.shape[1]
    if devices % 2:
        raise ValueError(f"the mesh axis {axis} has {devices} devices; ring attention pairs them, use 2, 4, 6, ...")
    if length % 2:
        raise ValueError(
            f"the mesh axis {axis} leaves each device {length} tokens, of which half travel each way round the ring; "
            f"use a sequence that {2 * devices} divides"
        )


# --- Keys, in two halves ------------------------------------------------------------------------------------------


def _key_blocks(x_BSK: jax.Array, block: int) -> jax.Array:
    """[B, S, K, ...] -> [J, B, K, U, ...]: keys of even index, then those of odd index.

    So both halves are as much work for whoever they come to, wherever the device's keys are in the sequence.
    """
    return jnp.concatenate([blocks.key_blocks(x_BSK[:, half::2], block) for half in range(2)])


def _from_key_blocks(x_JBKU: jax.Array, length: int) -> jax.Array:
    even, odd = (blocks.from_key_blocks(x, length // 2) for x in jnp.split(x_JBKU, 2))
    return jnp.stack([even, odd], axis=2).reshape(even.shape[0], length, *even.shape[2:])


def _masks(mask: Mask, block: int, axis: str) -> Callable[[jax.Array | int], Mask]:
    """By the number of steps that keys have travelled, the mask in blocks between the queries and what is here."""
    halves = [
        blocks.mask_blocks(
            mask._replace(key_place_BT=mask.key_place_BT[:, half::2], key_segment_BT=mask.key_segment_BT[:, half::2]),
            block,
            block,
        )
        for half in range(2)
    ]
    # Of all devices [C, J/2, B, U]: they are small, so they need not travel.
    places, segments = (
        [jax.lax.all_gather(getattr(half, name), axis) for half in halves]
        for name in ("key_place_BT", "key_segment_BT")
    )
    rank, devices = jax.lax.axis_index(axis), jax.lax.axis_size(axis)

    def after(number: jax.Array | int) -> Mask:
        owners = (rank - number) % devices, (rank + number) % devices
        here = (
            jnp.concatenate([x[owner] for x, owner in zip(each, owners, strict=True)]) for each in (places, segments)
        )
        return halves[0]._replace(**dict(zip(("key_place_BT", "key_segment_BT"), here, strict=True)))

    return after


# --- Travel -------------------------------------------------------------------------------------------------------


def _shift(arrays: Any, axis: str) -> Any:
    """Moves the first half of every array's blocks to the next device of the ring, and the second to the one before."""
    even = jax.lax.axis_index(axis) % 2 == 0

    def one(x_J: jax.Array) -> jax.Array:
        onward, back = jnp.split(x_J, 2)
        # Devices 0 and 1, 2 and 3, ... exchange, then 1 and 2, 3 and 4, ... : the even ones meet the next one first.
        first = _exchange(jnp.where(even, onward, back), axis, 0)
        second = _exchange(jnp.where(even, back, onward), axis, 1)
        return jnp.concatenate([jnp.where(even, second, first), jnp.where(even, first, second)])

    return jax.tree.map(one, arrays)


def _exchange(x: jax.Array, axis: str, offset: int) -> jax.Array:
    """What the other of a pair has; from device `offset` on, every two of the ring are a pair."""
    ring = np.roll(np.arange(jax.lax.axis_size(axis)), -offset)
    both = jax.lax.all_gather(x, axis, axis_index_groups=ring.reshape(-1, 2).tolist())
    own = (jax.lax.axis_index(axis) + offset) % 2
    return jnp.where(own == 0, both[1], both[0])
