"""Logits, losses, gradients and greedy tokens of transformers' own small models."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from meshsys.sharding import canonical_specs
from models import Batch, Decoder, forward, load_pretrained, save_pretrained
from models.pretrained.tensor_files import open_folder
from tests.oracles.inputs import QUICK

NAMES = ("llama3", "qwen2", "qwen3", "gemma2", "mixtral")


@pytest.fixture(params=NAMES)
def folder(request, shared):
    return shared / "fixtures" / "hf" / request.param


def expected(folder):
    with np.load(folder / "expected.npz") as file:
        return {name: file[name] for name in file.files}


def test_logits_and_greedy_tokens(folder):
    config, params = load_pretrained(folder)
    want = expected(folder)
    np.testing.assert_allclose(forward(config, params, as_ids(want["input_ids"])), want["logits"], rtol=0, atol=1e-4)
    mask = as_ids(want["padded_mask"])
    padded = forward(config, params, as_ids(want["padded_input_ids"]), mask)
    valid = np.asarray(mask) == 1
    assert not valid.all()
    np.testing.assert_allclose(np.asarray(padded)[valid], want["padded_logits"][valid], rtol=0, atol=1e-4)

    tokens = np.repeat(want["greedy"], 2, axis=0)  # of the shape that has been compiled
    tokens[:, 8:] = 0
    for place in range(8, tokens.shape[1]):  # what comes after a place does not change it
        tokens[:, place] = np.argmax(forward(config, params, as_ids(tokens))[:, place - 1], axis=-1)
    assert tokens[0].tolist() == want["greedy"][0].tolist()


def test_loss_and_gradients(folder, tmp_path):
    config, params = load_pretrained(folder)
    want = expected(folder)
    ids = as_ids(want["input_ids"])
    rows, length = ids.shape[0], ids.shape[1] - 1
    batch = Batch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        positions=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length)),
        segment_ids=jnp.ones((rows, length), jnp.int32),
        weights=jnp.full((rows, length), 1 / (rows * length), jnp.float32),
        sequence=jnp.arange(rows, dtype=jnp.int32),
    )
    value_and_grad = jax.jit(jax.value_and_grad(Decoder(config).loss_sum), compiler_options=QUICK)
    loss, grads = value_and_grad(params, batch)
    np.testing.assert_allclose(loss, want["mean_cross_entropy"], rtol=0, atol=1e-5)
    save_pretrained(config, grads, tmp_path / "grads")  # gives them the names that the reference has
    norms = json.loads((folder / "grad_norms.json").read_text())
    found = gradient_norms(tmp_path / "grads")
    assert found.keys() == norms.keys()
    np.testing.assert_allclose([found[name] for name in norms], list(norms.values()), rtol=1e-4)


def gradient_norms(folder):
    """By the names that transformers has in memory: experts are stacked, gate and up are one tensor."""
    squares: dict[str, float] = {}
    for name, tensor in open_folder(folder).items():
        name = name.replace("block_sparse_moe", "mlp")
        name = re.sub(r"experts\.\d+\.w[13]\.weight", "experts.gate_up_proj", name)
        name = re.sub(r"experts\.\d+\.w2\.weight", "experts.down_proj", name)
        squares[name] = squares.get(name, 0.0) + float(np.square(tensor.view(), dtype=np.float64).sum())
    return {name: square**0.5 for name, square in squares.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "tensor": 2}, {"tensor": 2, "pipe": 2}], ids=["fsdp-tensor", "tensor-vocabulary"]
)
def test_on_a_mesh(folder, sizes):
    """Every device reads its own part."""
    config, params = load_pretrained(folder)
    decoder = Decoder(config)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(*sizes.values()), tuple(sizes))
    axes = dict.fromkeys(("pipe", "data", "fsdp", "tensor", "expert", "context"), 1) | sizes
    specs = canonical_specs(decoder.logical_axes(), params, axes)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec)
    )
    again, sharded = load_pretrained(folder, shardings=shardings)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    assert jax.tree.all(jax.tree.map(lambda leaf, sharding: leaf.sharding == sharding, sharded, shardings))
    want = expected(folder)
    logits = forward(config, sharded, as_ids(want["input_ids"]))
    np.testing.assert_allclose(logits, want["logits"], rtol=0, atol=1e-4)


def as_ids(array):
    return jnp.asarray(array, jnp.int32)
