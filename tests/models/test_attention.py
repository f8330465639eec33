"""Every way to compute attention gives what loops over queries give, values and gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from models.attention import Mask, attend, causal_mask, visible
from models.attention.blocks import active, mask_blocks
from models.attention.blockwise import attend_blockwise
from models.attention.plain import attend_plain
from models.attention.scores import Scores
from schedules.backward import split
from schedules.flops import product_flops
from schedules.remat import Remat
from tests.oracles.naive_attention import attention, sees

B, K, G, H, V = 2, 2, 3, 4, 5  # all different, so that shapes tell values apart
SCALE = 0.6
# Blocks that the sequence does not fill, and a single one.
WAYS = {"plain": attend_plain, **{f"blocks_of_{n}": partial(attend_blockwise, block=n) for n in (4, 64)}}
QUICK = {"xla_backend_optimization_level": 0}


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def inputs(S, T):
    """Queries, keys, values and a gradient of the output."""
    return random(1, B, S, K * G, H), random(2, B, T, K, H), random(3, B, T, K, V), random(4, B, S, K * G, V)


def random_mask(seed, S, T, window=0, prefix=(0, 0)):
    """Tokens in any order; some queries see nothing. With as many keys as queries they are the same tokens."""
    rng = np.random.default_rng(seed)
    place, segment = (rng.permuted(np.tile(np.arange(T), (B, 1)), axis=1), rng.integers(0, 3, (B, T)))
    which = np.arange(T) if S == T else rng.choice(T, S, replace=False)
    query_place, query_segment = place[:, which], segment[:, which]
    query_segment[0, 0] = 7
    arrays = (jnp.asarray(x, jnp.int32) for x in (query_place, place, query_segment, segment))
    return Mask(*arrays, jnp.int32(window), jnp.asarray(prefix, jnp.int32))


def causal(segments, window=0, prefix=(0, 0)):
    """The same structure for all, so that they share compiled programs."""
    segment_ids = jnp.asarray(segments, jnp.int32)
    return causal_mask(segment_ids, jnp.int32(window), jnp.asarray(prefix, jnp.int32))


def branched(window=0):
    """Sequences that share their beginning: the second row has two such groups, and a lone sequence."""
    segment = jnp.asarray([[1] * 3 + [2] * 4 + [3] * 4, [1, 1, 2, 3, 4, 4, 5, 5, 6, 6, 0]], jnp.int32)
    trunk = jnp.asarray([[0] * 3 + [1] * 8, [0, 0, 1, 1, 0, 0, 4, 4, 0, 0, 0]], jnp.int32)
    place = jnp.asarray([[0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6], [0, 1, 2, 2, 0, 1, 2, 3, 0, 1, 2]], jnp.int32)
    return Mask(place, place, segment, segment, jnp.int32(window), None, trunk)


MASKS = {
    "causal": causal([[1] * 11] * 2),
    "packed": causal([[1] * 4 + [2] * 5 + [0] * 2, [1] * 11]),
    "windowed": causal([[1] * 11] * 2, window=3),
    "prefix": causal([[1] * 9 + [0] * 2] * 2, 2, (5, 0)),
    "random": random_mask(5, 11, 11, 0),
    "random_windowed_prefix": random_mask(6, 11, 11, 4, (4, 0)),
    "without_options": causal_mask(jnp.ones((B, 11), jnp.int32)),
    "other_keys": random_mask(7, 6, 11, 5),
    "branched": branched(),
    "branched_windowed": branched(3),
    "branched_at_random": random_mask(9, 11, 11, 5, (3, 0))._replace(
        query_trunk_BS=jnp.asarray(np.random.default_rng(9).integers(0, 3, (B, 11)), jnp.int32)
    ),
    "few_queries": random_mask(8, 2, 11, 6, (4, 0)),
}


@partial(jax.jit, static_argnums=(0, 5), compiler_options=QUICK)
def value_and_gradients(way, q, k, v, mask, scores, d_out):
    out, vjp = jax.vjp(lambda q, k, v: way(q, k, v, mask, scores), q, k, v)
    return out, vjp(d_out)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_against_loops(mask):
    q, k, v, d_out = inputs(mask.query_place_BS.shape[1], mask.key_place_BT.shape[1])
    for softcap in (0.0, 1.5):
        want = attention(q, k, v, mask, SCALE, softcap, d_out)
        for name, way in WAYS.items():
            got = value_and_gradients(way, q, k, v, mask, Scores(SCALE, softcap), d_out)
            for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(have, wanted, rtol=1e-5, atol=3e-6, err_msg=f"{name}, {softcap}")


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_visible_against_one_pair_at_a_time(mask):
    _, S, T = (got := np.asarray(visible(mask))).shape
    mask = jax.tree.map(np.asarray, mask)
    want = [[[sees(mask, b, s, t) for t in range(T)] for s in range(S)] for b in range(B)]
    np.testing.assert_array_equal(got, want)
    assert got.any() and not got.all()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_sees_nothing_and_what_nobody_sees_may_hold_anything(way):
    mask = causal([[1] * 5 + [2] * 6] * 2)
    alone = mask._replace(
        query_segment_BS=mask.query_segment_BS.at[:, 3].set(8), key_segment_BT=mask.key_segment_BT.at[:, 2].set(9)
    )
    q, k, v, d_out = inputs(11, 11)
    want = value_and_gradients(way, q, k, v, alone, Scores(SCALE, 1.5), d_out.at[:, 3].set(0.0))
    for poison in (jnp.nan, jnp.inf):
        q, d_out = (x.at[:, 3].set(poison) for x in (q, d_out))
        k, v = (x.at[:, 2].set(poison) for x in (k, v))
        out, (dq, dk, dv) = got = value_and_gradients(way, q, k, v, alone, Scores(SCALE, 1.5), d_out)
        jax.tree.map(np.testing.assert_array_equal, got, want)
        assert not any(np.any(x) for x in (out[:, 3], dq[:, 3], dk[:, 2], dv[:, 2]))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_bfloat16_has_scores_and_sums_in_float32(way):
    mask, (q, k, v, d_out) = MASKS["packed"], (x.astype(jnp.bfloat16) for x in inputs(11, 11))
    out, grads = got = value_and_gradients(way, q, k, v, mask, Scores(SCALE, 0.0), d_out)
    want = attention(q, k, v, mask, SCALE, 0.0, d_out)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(have.astype(jnp.float32), wanted, rtol=0.02, atol=0.03)
    # Products of thousands, which float32 tells apart and bfloat16 does not.
    q, k = (jnp.full((1, 2, 1, 64), 8.0, jnp.bfloat16) for _ in range(2))
    k = k.at[0, 1, 0, 0].set(8.25)
    v = jnp.asarray([[[[0.0]], [[1.0]]]], jnp.bfloat16)
    both = causal_mask(jnp.ones((1, 2), jnp.int32))
    assert way(q, k, v, both, Scores(1.0, 0.0))[0, 1, 0, 0] > 0.85  # 1 / (1 + exp(-2)); 0.5 if they were equal


def test_only_pairs_of_blocks_with_something_to_see_are_computed():
    S, block = 64, 8
    segments = jnp.asarray([[1] * 24 + [2] * 24 + [0] * 16], jnp.int32)
    causal = np.tril(np.ones((8, 8), bool))

    def listed(mask):
        return np.asarray(active(mask_blocks(mask, block, block)))

    np.testing.assert_array_equal(listed(causal_mask(jnp.ones((1, S), jnp.int32))), causal)
    together = np.kron(np.eye(3), np.ones((3, 3)))[:8, :8].astype(bool)
    np.testing.assert_array_equal(listed(causal_mask(segments)), causal & together)
    near = causal & ~np.tril(np.ones((8, 8), bool), -2)
    np.testing.assert_array_equal(listed(causal_mask(jnp.ones((1, S), jnp.int32), 9)), near)
    # One more place back is in the block before.
    np.testing.assert_array_equal(listed(causal_mask(jnp.ones((1, S), jnp.int32), 10)).sum(), near.sum() + 6)
    prefix = listed(causal_mask(jnp.ones((1, S), jnp.int32), None, jnp.asarray([17], jnp.int32)))
    np.testing.assert_array_equal(prefix, causal | (np.arange(8) < 3)[None])


@pytest.mark.parametrize("seed", range(10))
def test_no_pair_of_blocks_is_left_out(seed):
    mask = random_mask(seed, 11, 11, [0, 2, 5][seed % 3], (seed % 4 * 2, 0))
    listed = np.asarray(active(mask_blocks(mask, 4, 4)))
    seen = np.pad(np.asarray(visible(mask)).any(0), ((0, 1), (0, 1)))
    assert (listed >= seen.reshape(3, 4, 3, 4).any((1, 3))).all()


# --- Which way ----------------------------------------------------------------------------------------------------


def temporaries(S, implementation, T=None):
    """Bytes of loss and gradients, as XLA for CPU assigns them."""
    T = T or S
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32) for n in (S, T))
    segments = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(q, k, segments):
        mask = causal_mask(segments)
        mask = mask._replace(query_place_BS=mask.query_place_BS[:, :S], query_segment_BS=segments[:, :S])
        return attend(q, k, k, mask, scale=1.0, implementation=implementation).sum()

    return jax.jit(jax.grad(loss, (0, 1))).lower(q, k, segments).compile().memory_analysis().temp_size_in_bytes


def test_memory_of_blocks_grows_with_the_sequence():
    assert temporaries(4096, "blockwise") < 2.2 * temporaries(2048, "blockwise")
    assert temporaries(4096, "blockwise") < temporaries(2048, "plain") / 10


def test_auto_takes_blocks_for_long_sequences():
    assert temporaries(2048, "auto") == temporaries(2048, "blockwise") < temporaries(2048, "plain")
    assert temporaries(64, "auto") == temporaries(64, "plain") != temporaries(64, "blockwise")


def test_blocks_are_counted_as_all_scores_are():
    """Who plans with FLOPs sees no mask, so takes all pairs; the backward computes the scores again."""
    q, segments = jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32), jax.ShapeDtypeStruct((1, 1024), jnp.int32)

    def flops(way):
        def loss(q, segments):
            return attend(q, q, q, causal_mask(segments), scale=1.0, implementation=way).sum()

        return product_flops(loss, q, segments), product_flops(jax.grad(loss), q, segments)

    forward, both = flops("plain")
    assert flops("blockwise") == (forward, both + forward / 2)


def test_a_token_over_a_cache_copies_no_keys():
    q, cache = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 1, 2, 64), (4, 2, 1024, 64)))
    ints = [jax.ShapeDtypeStruct((4, n), jnp.int32) for n in (1, 1024, 1, 1024)]

    def attended(q, keys, values, *ints):
        k, v = (x.swapaxes(1, 2) for x in (keys, values))  # a cache has the heads first
        return attend(q, k, v, Mask(*ints), scale=1.0)

    compiled = jax.jit(attended).lower(q, cache, cache, *ints)
    assert compiled.compile().memory_analysis().temp_size_in_bytes < cache.size * 4 / 10


# --- In a layer whose backward is cut -----------------------------------------------------------------------------

NAMES = ("query_proj", "key_proj", "value_proj", "context", "out_proj")
D, LONG = 6, 40


def layer(params, x_BSD, mask, implementation="blockwise"):
    q, k, v = (
        checkpoint_name(jnp.einsum("BSD,DNH->BSNH", x_BSD, params[name]), f"{name}_proj")
        for name in ("query", "key", "value")
    )
    context = attend(q, k, v, mask, scale=SCALE, softcap=2.0, implementation=implementation)
    return x_BSD + checkpoint_name(jnp.einsum("BSNV,NVD->BSD", context, params["out"]), "out_proj")


PARAMS = {
    "query": random(1, D, K * G, H), "key": random(2, D, K, H),
    "value": random(3, D, K, V), "out": random(4, K * G, V, D),
}  # fmt: skip


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("remat", ["none", "full", "dots", "names:context", "names:query_proj,key_proj,value_proj"])
def test_the_cut_backward(remat, apart):
    mask = causal_mask(jnp.asarray([[1] * 20 + [2] * 15 + [0] * 5] * B, jnp.int32), jnp.int32(7))
    x, dy = random(5, B, LONG, D), random(6, B, LONG, D)
    parts = split(layer, PARAMS, x, mask, policy=Remat.parse(remat, NAMES).policy, apart=apart)

    @jax.jit
    def run(params, x, mask, dy):
        _, residuals = parts.forward(params, x, mask)
        recomputed = parts.recompute(params, mask, residuals) if apart else ()
        dx, stash = parts.input_gradient(params, mask, residuals, dy, recomputed)
        return parts.weight_gradient(params, mask, residuals, stash, recomputed), dx

    want = jax.jit(lambda p, x, dy: jax.vjp(lambda p, x: layer(p, x, mask, "plain"), p, x)[1](dy))(PARAMS, x, dy)
    for have, wanted in zip(*map(jax.tree.leaves, (run(PARAMS, x, mask, dy), want)), strict=True):
        np.testing.assert_allclose(have, wanted, rtol=1e-5, atol=1e-5)
    crossing = [*parts.residuals, *parts.recomputed, *parts.stash]
    assert not any(c.aval.shape.count(LONG) > 1 for c in crossing)
    kept = {(c.name, c.aval.shape[2:]) for c in parts.residuals if c.name != "input"}
    projections = {("query_proj", (K * G, H)), ("key_proj", (K, H)), ("value_proj", (K, V))}
    context = {("context", (K * G, V)), ("context", (K * G,))}
    assert kept == {
        "none": projections | context, "full": set(), "dots": projections, "names:context": context,
        "names:query_proj,key_proj,value_proj": projections,
    }[remat]  # fmt: skip


@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
def test_context_is_named_once(implementation):
    """A second name for the same value would be offloaded a second time."""
    mask = causal_mask(jnp.ones((B, LONG), jnp.int32))
    x = random(5, B, LONG, D)
    parts = split(
        partial(layer, implementation=implementation),
        PARAMS,
        x,
        mask,
        policy=Remat.parse("offload:context", NAMES).policy,
    )
    on_host = [c.aval.shape for c in parts.residuals if c.on_host]
    assert on_host.count((B, LONG, K * G, V)) == 1
