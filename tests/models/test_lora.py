"""Low-rank updates: what trains, what a merged model computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Decoder, ModelConfig
from models.config import LoraConfig, MoeConfig
from models.lora import adapted, merge
from models.parameters import trains
from tests.oracles.inputs import QUICK, random_batch, random_parameters

EVERY = ("query", "key", "value", "out", "gate", "up", "down")
BASE = dict(layers=2, d_model=8, heads=4, kv_heads=2, d_ff=12, vocab_size=11)


def lora(**options) -> ModelConfig:
    return ModelConfig(**BASE, lora=LoraConfig(rank=3, alpha=2.0, targets=EVERY), **options)


@pytest.mark.parametrize(
    "config",
    [
        lora(),
        lora(moe=MoeConfig(experts=2, experts_per_token=1, d_ff=4, shared_experts=1, dense_layers=(0,))),
        lora(attention_bias="all", tie_embeddings=True),
    ],
    ids=["dense", "mixed", "biases"],
)
def test_a_merged_model_computes_the_same(config):
    decoder = Decoder(config)
    params = random_parameters(decoder)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)), jnp.int32)
    want = jax.jit(decoder.forward, compiler_options=QUICK)(params, tokens)
    plain, merged = merge(config, params)
    assert plain.lora is None
    shapes = jax.eval_shape(Decoder(plain).init, jax.random.key(0))
    assert jax.tree.structure(merged) == jax.tree.structure(shapes)
    got = jax.jit(Decoder(plain).forward, compiler_options=QUICK)(merged, tokens)
    np.testing.assert_allclose(got, want, atol=2e-5 * float(jnp.abs(want).max()))
    without = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.zeros_like(leaf) if path[-1].key.endswith("_lora_b") else leaf, params
    )
    assert np.abs(jax.jit(decoder.forward, compiler_options=QUICK)(without, tokens) - want).max() > 0.1


def test_a_fresh_update_changes_nothing():
    config = lora()
    params = jax.jit(Decoder(config).init, compiler_options=QUICK)(jax.random.key(0))
    _, merged = merge(config, params)
    layers = params["layers"]
    for name, part in merged["layers"].items():
        jax.tree.map(np.testing.assert_array_equal, part, {leaf: layers[name][leaf] for leaf in part})
    assert set(adapted(params["layers"]["attention"])) == {"query", "key", "value", "out"}
    assert np.asarray(params["layers"]["attention"]["query_lora_a"]).any()


def test_only_updates_train():
    config = lora()
    decoder, batch = Decoder(config), random_batch(2, 6, 11)
    grads = jax.jit(jax.grad(decoder.loss_sum), compiler_options=QUICK)(random_parameters(decoder), batch)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.asarray(grad).any() == trains(config, path[-1].key), jax.tree_util.keystr(path)
