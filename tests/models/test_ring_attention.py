"""Attention over a divided sequence is attention of one device, and the devices have equal work."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from models.attention import Mask, attend, causal_mask, zigzag_order
from models.attention.blocks import active, mask_blocks
from models.attention.plain import attend_plain
from models.attention.ring import attend_ring
from models.attention.scores import Scores
from tests.oracles.naive_attention import attention

B, S, K, G, H, V = 2, 48, 2, 2, 4, 5
SCORES = Scores(0.6, 2.0)


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


INPUTS = random(1, B, S, K * G, H), random(2, B, S, K, H), random(3, B, S, K, V), random(4, B, S, K * G, V)
PACKED = jnp.asarray([[1] * 13 + [2] * 20 + [3] * 10 + [0] * 5, [1] * S], jnp.int32)
MASKS = {
    "causal": causal_mask(jnp.ones((B, S), jnp.int32), jnp.int32(0), jnp.zeros(B, jnp.int32)),
    "packed": causal_mask(PACKED, jnp.int32(0), jnp.zeros(B, jnp.int32)),
    "windowed": causal_mask(PACKED, jnp.int32(7), jnp.zeros(B, jnp.int32)),
    "prefix": causal_mask(PACKED, jnp.int32(7), jnp.asarray([10, 30], jnp.int32)),
}


def mesh_of(**axes):
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=jax.devices()[:count]
    )


def own_mask(place, segment, window, prefix):
    return Mask(place, place, segment, segment, window, prefix)


@pytest.fixture(scope="module")
def ring():
    """`(devices) -> function of order and mask`: output and gradients in the order of the sequence."""
    compiled = {}

    def of(devices):
        if devices not in compiled:
            part = PartitionSpec(None, "context")

            @jax.jit
            @partial(
                jax.shard_map, mesh=mesh_of(context=devices), check_vma=False, out_specs=(part, (part,) * 3),
                in_specs=(part,) * 6 + (PartitionSpec(),) * 2,
            )  # fmt: skip
            def run(q, k, v, d_out, place, segment, window, prefix):
                mask = own_mask(place, segment, window, prefix)
                out, vjp = jax.vjp(lambda q, k, v: attend_ring(q, k, v, mask, SCORES, 4, "context"), q, k, v)
                return out, vjp(d_out)

            compiled[devices] = run
        return compiled[devices]

    def call(devices, order, mask, inputs):
        place = jnp.broadcast_to(jnp.asarray(order), (B, len(order)))
        arrays = (*(x[:, order] for x in inputs), place, mask.query_segment_BS[:, order])
        found = of(devices)(*arrays, mask.window, mask.prefix_B)
        return jax.tree.map(lambda x: np.asarray(x)[:, np.argsort(order)], found)

    return call


ORDERS = {
    "zigzag": zigzag_order,
    "contiguous": lambda length, parts: np.arange(length),
    "random": lambda length, parts: np.random.default_rng(0).permutation(length),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_against_loops(ring, devices, mask):
    want = attention(*INPUTS[:3], mask, SCORES.scale, SCORES.softcap, INPUTS[3])
    for name, order in ORDERS.items():
        got = ring(devices, order(S, devices), mask, INPUTS)
        for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(have, wanted, rtol=1e-5, atol=5e-6, err_msg=name)


# --- Inside a pipeline --------------------------------------------------------------------------------------------


def test_ranks_that_run_other_branches_do_not_wait():
    """Only the first pipeline rank attends: a collective of all devices would never end."""
    mesh = mesh_of(pipe=2, context=4)
    part = PartitionSpec(None, ("pipe", "context"))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(None, "context"),) * 5, out_specs=part, check_vma=False)
    def run(q, k, v, place, segment):
        def branch(q):
            mask = own_mask(place, segment, None, None)
            return jax.grad(lambda q: attend(q, k, v, mask, scale=0.6, softcap=2.0, axis="context").sum())(q)

        return jax.lax.cond(jax.lax.axis_index("pipe") == 0, branch, jnp.zeros_like, q)

    order, (q, k, v, _) = zigzag_order(S, 4), INPUTS
    place = jnp.broadcast_to(jnp.asarray(order), (B, S))
    got = run(*(x[:, order] for x in (q, k, v)), place, PACKED[:, order])
    want = jax.grad(lambda q: attend_plain(q, k, v, causal_mask(PACKED), SCORES).sum())(q)[:, order]
    np.testing.assert_allclose(got, jnp.concatenate([want, jnp.zeros_like(want)], axis=1), rtol=1e-5, atol=5e-6)


def test_no_memory_of_queries_times_keys():
    """Temporaries of a device for loss and gradients, by XLA's figures: twice the length takes twice the memory."""
    mesh, part = mesh_of(context=4), PartitionSpec(None, "context")

    def temporaries(length):
        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=(part,) * 3, out_specs=part, check_vma=False)
        def run(q, place, segment):
            mask = own_mask(place, segment, None, None)
            return jax.grad(lambda q: attend(q, q, q, mask, scale=0.6, axis="context").sum())(q)

        shapes = ((1, length, 2, 8), jnp.float32), ((1, length), jnp.int32), ((1, length), jnp.int32)
        return run.lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16384) < 2.2 * temporaries(8192)


# --- Balance ------------------------------------------------------------------------------------------------------


def test_zigzag_order():
    np.testing.assert_array_equal(zigzag_order(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal(np.sort(zigzag_order(96, 8)), np.arange(96))
    np.testing.assert_array_equal(zigzag_order(6, 1), np.arange(6))


def pairs_of_blocks(order, devices, block):
    """[step, device]: pairs of blocks that a device computes while the ring turns once."""
    parts = np.asarray(order).reshape(devices, 1, -1)
    halves = [parts[..., half::2] for half in range(2)]
    segment = np.ones_like(parts[0])

    def count(queries, keys):
        mask = Mask(*(jnp.asarray(x) for x in (queries, keys, segment, np.ones_like(keys))))
        return int(active(mask_blocks(mask, block, block)).sum())

    return np.array(
        [
            [
                count(parts[d], halves[0][(d - step) % devices]) + count(parts[d], halves[1][(d + step) % devices])
                for d in range(devices)
            ]
            for step in range(devices)
        ]
    )


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_zigzag_is_equal_work_in_every_step(devices):
    length, block = 64 * devices, 4
    work = pairs_of_blocks(zigzag_order(length, devices), devices, block)
    assert (work == work[:, :1]).all()
    contiguous = pairs_of_blocks(np.arange(length), devices, block)
    # The last device sees everything and the first its own keys alone.
    assert contiguous.max(1).sum() > 1.4 * work.max(1).sum()
    seen = length * (length + 1) // 2
    assert work.sum() * block * block < 1.25 * seen  # little but what somebody sees


# --- Errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "devices, length, message",
    [(3, 48, "the mesh axis context has 3 devices.*use 2, 4, 6"), (4, 12, "leaves each device 3 tokens.*8 divides")],
)
def test_what_cannot_be_divided(devices, length, message):
    part = PartitionSpec(None, "context")

    @partial(jax.shard_map, mesh=mesh_of(context=devices), in_specs=(part,) * 2, out_specs=part, check_vma=False)
    def run(q, place):
        return attend(q, q, q, own_mask(place, place, None, None), scale=1.0, axis="context")

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, jnp.zeros((1, length, 2, 4)), jnp.zeros((1, length), jnp.int32))


def test_zigzag_of_an_odd_length():
    with pytest.raises(ValueError, match="12 tokens cannot be divided over 4 devices.*use a multiple of 8"):
        zigzag_order(12, 4)
