"""Generation with parameters that are sharded over a mesh: the tokens of one device."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from meshsys.sharding import canonical_specs, named, placed
from models import Decoder, ModelConfig
from models.config import MoeConfig
from models.generation import Generator, Request
from tests.oracles.inputs import QUICK, random_parameters

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
BASE = ModelConfig(layers=2, d_model=16, heads=4, kv_heads=2, d_ff=32, vocab_size=40)
MOE = replace(BASE, moe=MoeConfig(experts=4, experts_per_token=2, d_ff=16, dense_layers=(0,)))
REQUESTS = [
    Request(prompt=np.arange(1, 1 + length), max_tokens=12, temperature=temperature, stop_ids=(5,), seed=2)
    for length, temperature in ((1, 1.0), (7, 0.0), (18, 1.5), (3, 1.0), (9, 2.0))
]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (BASE, {"tensor": 2, "fsdp": 2, "pipe": 2}),
        (BASE, {"data": 2, "tensor": 4}),
        (replace(BASE, tie_embeddings=True), {"fsdp": 4}),
        (MOE, {"expert": 2, "tensor": 2}),
    ],
)
def test_the_tokens_of_one_device(config, sizes):
    decoder = Decoder(config)
    params = jax.tree.map(lambda leaf: 2 * leaf - 0.2, random_parameters(decoder))
    mesh = Mesh(
        np.array(jax.devices()[: np.prod(list(sizes.values()))]).reshape([sizes.get(axis, 1) for axis in AXES]), AXES
    )
    specs = canonical_specs(decoder.logical_axes(), params, mesh.shape)
    sharded = jax.tree.map(jax.device_put, params, named(mesh, specs))
    options = {"slots": 4, "chunk": 4, "compiler_options": QUICK}
    alone = Generator(decoder, params, **options)
    divided = Generator(decoder, sharded, place=placed(mesh), **options)
    for here, there in zip(alone.generate(REQUESTS), divided.generate(REQUESTS), strict=True):
        assert np.array_equal(here.tokens, there.tokens) and here.reason == there.reason
        assert np.abs(here.log_probs - there.log_probs).max() < 2e-5
    # What a device holds of the parameters is its part, and of the cache as well.
    held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(divided._params))
    wanted = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(sharded))
    assert held <= wanted
    keys = divided.empty(4, 32, 8).cache.keys[0]
    heads = sizes.get("tensor", 1) if config.num_kv_heads % sizes.get("tensor", 1) == 0 else 1
    parts = np.prod([sizes.get(axis, 1) for axis in ("data", "fsdp", "expert")]) * heads
    assert keys.addressable_shards[0].data.size * parts == keys.size


def test_fewer_slots_are_divided_too():
    decoder = Decoder(BASE)
    params = jax.tree.map(lambda leaf: 2 * leaf - 0.2, random_parameters(decoder))
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 4, 1, 1, 1, 2), AXES)
    specs = canonical_specs(decoder.logical_axes(), params, mesh.shape)
    sharded = jax.tree.map(jax.device_put, params, named(mesh, specs))
    requests = [
        Request(prompt=np.arange(1, 3 + number), max_tokens=length, seed=number)
        for number, length in enumerate((2, 30, 3, 5, 2, 9, 40, 1, 2, 2, 12, 3, 1, 2, 3, 4))
    ]
    options = {"slots": 16, "chunk": 4, "compiler_options": QUICK}
    alone = Generator(decoder, params, **options)
    divided = Generator(decoder, sharded, place=placed(mesh), compacts=True, **options)
    for here, there in zip(alone.generate(requests), divided.generate(requests), strict=True):
        assert np.array_equal(here.tokens, there.tokens)
        assert np.abs(here.log_probs - there.log_probs).max() < 2e-5
    small = divided.compact(divided.empty(16, 64, 8), np.arange(4, dtype=np.int32)).cache.keys[0]
    assert small.addressable_shards[0].data.size * 8 == small.size
