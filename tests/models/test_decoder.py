"""The decoder against float64 numpy, and the promises that the pipeline and the sampler rely on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Batch, Decoder, ModelConfig, count_parameters
from models.kv_cache import LayerCache
from tests.oracles import numpy_decoder
from tests.oracles.inputs import QUICK, random_batch, random_parameters

B, S, V = 3, 7, 13
BASE = ModelConfig(layers=2, d_model=8, heads=2, kv_heads=1, d_ff=12, vocab_size=V)
VARIANTS = {
    "grouped": BASE,
    "multi_head": dataclasses.replace(BASE, kv_heads=0, layers=3),
    "tied": dataclasses.replace(BASE, tie_embeddings=True, heads=4, kv_heads=2),
    "other_constants": dataclasses.replace(BASE, rope_theta=100.0, norm_epsilon=0.1),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_against_numpy(config):
    decoder, batch = Decoder(config), random_batch(B, S, V)
    params = random_parameters(decoder)

    @jax.jit
    def both(params, batch):
        context = decoder.prepare(batch)
        return decoder.logits(params["shared"], decoder.hidden(params, context)[0]), decoder.loss_sum(params, batch)

    logits, loss = both(params, batch)
    tokens, targets, positions, segments, weights, _ = map(np.asarray, batch[:6])
    for row in range(B):
        want = numpy_decoder.logits(params, tokens[row], positions[row], segments[row], config)
        np.testing.assert_allclose(logits[row], want, rtol=1e-4, atol=1e-5)
    want = numpy_decoder.loss_sum(params, tokens, targets, positions, segments, weights, config)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert logits.dtype == loss.dtype == jnp.float32


def test_gradient_against_finite_differences_of_numpy():
    decoder, batch = Decoder(BASE), random_batch(B, S, V)
    params = random_parameters(decoder)
    direction = jax.tree.map(lambda a: np.cos(np.arange(a.size).reshape(a.shape)), params)
    gradient = jax.jit(jax.grad(decoder.loss_sum), compiler_options=QUICK)(params, batch)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float(np.sum(np.asarray(g) * d)), gradient, direction)))

    def loss(step):
        moved = jax.tree.map(lambda a, d: np.asarray(a, np.float64) + step * d, params, direction)
        return numpy_decoder.loss_sum(moved, *map(np.asarray, batch[:5]), BASE)

    np.testing.assert_allclose(slope, (loss(1e-5) - loss(-1e-5)) / 2e-5, rtol=1e-4)


def test_stories260k(shared):
    """A trained model, run by llama2.c, whose rotary pairs are neighbours (i, i+1) and not halves."""
    raw = (shared / "fixtures/stories260k/stories260K.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, _ = map(int, np.frombuffer(raw, np.int32, 7))
    config = ModelConfig(
        layers=layers, d_model=dim, heads=heads, kv_heads=kv_heads, d_ff=hidden, vocab_size=abs(vocab),
        tie_embeddings=vocab > 0,
    )  # fmt: skip
    H, values = config.size_of_head, np.frombuffer(raw, np.float32, offset=28)

    def take(*shape):
        nonlocal values
        taken, values = values[: np.prod(shape)], values[np.prod(shape) :]
        return taken.reshape(shape)

    def halves(array):
        """[L, heads * H, D] -> [L, D, heads, H], pairs (2i, 2i+1) moved to (i, i + H/2)."""
        split = array.reshape(layers, -1, H // 2, 2, dim).swapaxes(2, 3)
        return split.reshape(layers, -1, H, dim).transpose(0, 3, 1, 2)

    embedding = take(abs(vocab), dim)
    attention_norm = take(layers, dim)
    query, key = halves(take(layers, heads * H, dim)), halves(take(layers, kv_heads * H, dim))
    value = take(layers, kv_heads, H, dim).transpose(0, 3, 1, 2)
    out = take(layers, dim, heads, H).transpose(0, 2, 3, 1)
    mlp_norm = take(layers, dim)
    gate, down, up = (take(layers, *shape).swapaxes(1, 2) for shape in ((hidden, dim), (dim, hidden), (hidden, dim)))
    params = {
        "shared": {"embed": {"embedding": embedding}, "head": {"norm": {"scale": take(dim)}}},
        "layers": {
            "attention_norm": {"scale": attention_norm},
            "attention": {"query": query, "key": key, "value": value, "out": out},
            "mlp_norm": {"scale": mlp_norm},
            "mlp": {"gate": gate, "up": up, "down": down},
        },
    }
    decoder = Decoder(config)
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    ids = np.load(shared / "fixtures/stories260k/golden_ids.npy").astype(np.int32)
    want = np.load(shared / "fixtures/stories260k/golden_logits.npy")
    got = jax.jit(decoder.forward)(jax.tree.map(jnp.asarray, params), jnp.asarray(ids)[None])[0]
    np.testing.assert_allclose(got, want[: len(ids)], rtol=1e-3, atol=1e-3)


# --- Masks --------------------------------------------------------------------------------------------------------


def test_segments_do_not_see_each_other():
    """Packed side by side, each sequence has the logits that it has alone."""
    decoder = Decoder(BASE)
    params = random_parameters(decoder)
    tokens = jnp.asarray([[1, 2, 3, 4, 5, 6, 7]], jnp.int32)
    zeros = jnp.zeros((1, 7))
    number = jnp.zeros(1, jnp.int32)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2]], jnp.int32)
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2, 3]], jnp.int32)

    @jax.jit
    def logits(params, batch):
        return decoder.logits(params["shared"], decoder.hidden(params, decoder.prepare(batch))[0])

    packed = logits(params, Batch(tokens, tokens, positions, segments, zeros, number))
    forward = jax.jit(decoder.forward)
    alone = [forward(params, tokens[:, :3]), forward(params, tokens[:, 3:])]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(side):
    decoder = Decoder(BASE)
    params = random_parameters(decoder)
    tokens = jnp.asarray([[5, 6, 7, 8]], jnp.int32)
    pad = ((0, 0), (3, 0) if side == "left" else (0, 3))
    mask = jnp.pad(jnp.ones_like(tokens), pad)
    forward = jax.jit(decoder.forward)
    logits = np.asarray(forward(params, jnp.pad(tokens, pad, constant_values=9), mask))
    np.testing.assert_allclose(logits[np.asarray(mask) == 1], forward(params, tokens)[0], rtol=1e-5, atol=1e-6)
    assert np.isfinite(logits).all()


def test_zero_weights_leave_no_gradient():
    decoder, batch = Decoder(BASE), random_batch(B, S, V)
    batch = batch._replace(weights=jnp.zeros_like(batch.weights))
    step = jax.jit(jax.value_and_grad(decoder.loss_sum), compiler_options=QUICK)
    loss, gradient = step(random_parameters(decoder), batch)
    assert loss == 0 and all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


# --- Cache --------------------------------------------------------------------------------------------------------


def test_a_cache_gives_the_same_hidden_states():
    """The first four positions at once, then one after the other."""
    decoder, batch = Decoder(BASE), random_batch(1, S, V)
    batch = batch._replace(segment_ids=jnp.ones_like(batch.segment_ids), positions=jnp.arange(S, dtype=jnp.int32)[None])
    params = jax.tree.map(lambda a: a[0], random_parameters(decoder)["layers"])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, S, BASE.d_model)), jnp.float32)
    context = decoder.prepare(batch)
    want, _ = jax.jit(decoder.layer)(params, x, context, jnp.int32(0))
    step = jax.jit(decoder.layer_with_cache)
    empty = jnp.zeros((1, BASE.num_kv_heads, S, BASE.size_of_head))
    cache = LayerCache(empty, empty, jnp.int32(0))
    parts = []
    for start, end in [(0, 4), (4, 5), (5, 6), (6, 7)]:
        mask = context.mask
        part = context._replace(
            rotary=tuple(table[:, start:end] for table in context.rotary),
            mask=mask._replace(
                query_place_BS=mask.query_place_BS[:, start:end], query_segment_BS=mask.query_segment_BS[:, start:end]
            ),
        )
        cache = cache._replace(column=jnp.int32(start))
        y, cache = step(params, x[:, start:end], part, cache, jnp.int32(0))
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), want, rtol=1e-5, atol=1e-6)


# --- Dropout ------------------------------------------------------------------------------------------------------


def test_dropout_depends_on_key_layer_and_sequence_alone():
    decoder, batch = Decoder(dataclasses.replace(BASE, dropout=0.5)), random_batch(4, S, V)
    params = jax.tree.map(lambda a: a[0], random_parameters(decoder)["layers"])
    x = jnp.ones((4, S, BASE.d_model))

    def layer(x, batch, key, number):
        return decoder.layer(params, x, decoder.prepare(batch, key), number)[0]

    run = jax.jit(layer, compiler_options=QUICK)
    whole = run(x, batch, jax.random.key(1), jnp.int32(5))
    halves = [
        run(x[rows], jax.tree.map(lambda a, rows=rows: a[rows], batch), jax.random.key(1), jnp.int32(5))
        for rows in (slice(0, 2), slice(2, 4))
    ]
    np.testing.assert_array_equal(whole, jnp.concatenate(halves))
    assert not np.array_equal(whole, run(x, batch, jax.random.key(2), jnp.int32(5)))
    assert not np.array_equal(whole, run(x, batch, jax.random.key(1), jnp.int32(6)))
    sequence = batch.sequence.at[0].set(9)
    other = run(x, batch._replace(sequence=sequence), jax.random.key(1), jnp.int32(5))
    assert [np.array_equal(a, b) for a, b in zip(whole, other, strict=True)] == [False, True, True, True]


def test_dropout_needs_a_key():
    with_dropout, without = Decoder(dataclasses.replace(BASE, dropout=0.5)), Decoder(BASE)
    params, batch = random_parameters(without), random_batch(B, S, V)
    assert jax.jit(with_dropout.loss_sum)(params, batch) == jax.jit(without.loss_sum)(params, batch)


# --- Parameters ---------------------------------------------------------------------------------------------------


def test_a_layers_parameters_depend_on_its_number_alone():
    decoders = (Decoder(dataclasses.replace(BASE, layers=layers)) for layers in (2, 5))
    few, more = (jax.jit(d.init, compiler_options=QUICK)(jax.random.key(0))["layers"] for d in decoders)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:2]), few, more)
    assert len(np.unique(np.asarray(more["attention"]["query"]))) == 5 * BASE.d_model**2


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_axes_name_every_dimension(config):
    decoder = Decoder(config)
    shapes = jax.eval_shape(decoder.init, jax.random.key(0))
    sizes = {
        "layers": config.layers, "embed": config.d_model, "norm": config.d_model, "heads": config.heads,
        "kv_heads": config.num_kv_heads, "head_dim": config.size_of_head, "mlp": config.d_ff, "vocab": V,
    }  # fmt: skip
    axes = decoder.logical_axes()
    named = jax.tree.map(lambda names: tuple(sizes[n] for n in names), axes, is_leaf=lambda n: isinstance(n, tuple))
    assert named == jax.tree.map(lambda leaf: leaf.shape, shapes)
    assert count_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert "kernel" in shapes["shared"]["head"] or config.tie_embeddings


def test_bfloat16_over_float32():
    decoder = Decoder(dataclasses.replace(BASE, dtype="bfloat16"))
    params, batch = random_parameters(decoder), random_batch(B, S, V)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    context = decoder.prepare(batch)
    assert jax.eval_shape(decoder.hidden, params, context)[0].dtype == jnp.bfloat16
    loss, exact = (jax.jit(Decoder(c).loss_sum)(params, batch) for c in (decoder.config, BASE))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, exact, rtol=2e-2)


def test_vocabulary_must_be_known():
    with pytest.raises(ValueError, match="model.vocab_size=0"):
        Decoder(dataclasses.replace(BASE, vocab_size=0))
