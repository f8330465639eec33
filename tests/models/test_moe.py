"""Experts against a loop over tokens and experts: values, gradients, losses, load; cut backwards; several devices.

Gradients are compared along random directions with differences of the loop's values, in float64: the experts that
tokens choose do not change over so small a step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import models.exchange
from models import SAVEABLE_NAMES, ModelConfig
from models.attention import zigzag_order
from models.config import MoeConfig
from models.grouped import grouped_outer, grouped_product, with_spare_rows
from models.moe import Moe
from models.parallel import ManualAxes
from schedules.backward import split
from schedules.flops import product_flops
from schedules.remat import Remat
from tests.oracles.inputs import QUICK
from tests.oracles.numpy_moe import moe

B, S, D, F = 4, 12, 6, 10
LOSSES = {"aux_loss": 0.3, "z_loss": 0.2}
MIXTRAL = MoeConfig(experts=8, experts_per_token=2, d_ff=F)
DEEPSEEK = MoeConfig(
    experts=8,
    experts_per_token=3,
    d_ff=F,
    shared_experts=2,
    router="sigmoid",
    scale=2.5,
    groups=4,
    top_groups=2,
    router_bias=True,
    **LOSSES,
)
CONFIGS = {
    "mixtral": MIXTRAL,
    "not_normalized": replace(MIXTRAL, normalize=False, **LOSSES),
    "deepseek": DEEPSEEK,
    "groups_of_one": replace(DEEPSEEK, groups=8, top_groups=4),
    "capacity": replace(DEEPSEEK, capacity_factor=0.7),
    "one_expert": MoeConfig(experts=1, experts_per_token=1, d_ff=F, **LOSSES),
    "all_experts": replace(MIXTRAL, experts_per_token=8),
}
EACH, SAME = PartitionSpec("expert"), PartitionSpec()


def config(options: MoeConfig, **changes) -> ModelConfig:
    return ModelConfig(d_model=D, heads=1, vocab_size=8, moe=options, **changes)


def inputs(options: MoeConfig, sequences: int = B):
    """Parameters, and a batch with a padded sequence and one of padding alone."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(sequences, S, D)).astype(np.float32)
    weights = rng.uniform(size=(sequences, S)).astype(np.float32)
    segments = np.ones((sequences, S), np.int32)
    segments[1, 8:], segments[3], segments[2, 5:] = 0, 0, 2
    shapes = nn.meta.unbox(jax.eval_shape(Moe(config(options)).init, jax.random.key(0), x, weights, segments))["params"]
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.5, leaf.shape), leaf.dtype), shapes)
    return params, x, weights, segments


def outputs(options: MoeConfig, params, *batch):
    module = Moe(config(options))
    return jax.jit(lambda params: module.apply({"params": params}, *batch), compiler_options=QUICK)(params)


def gradients_of(module):
    """`(params, x, weights, segments) -> ((value, y), (grads, dx))` of a sum that every output and the loss is in."""

    def objective(params, x, weights, segments):
        y, loss = module.apply({"params": params}, x, weights, segments)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))) + loss, y

    return jax.value_and_grad(objective, (0, 1), has_aux=True)


@cache
def compiled(model: ModelConfig):
    return jax.jit(gradients_of(Moe(model)), compiler_options=QUICK)


def value_and_grad(options: MoeConfig, *args, **changes):
    return compiled(config(options, **changes))(*args)


def assert_same(found, expected, **tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, **({"rtol": 1e-4, "atol": 1e-5} | tolerance))


# --- One device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients(name):
    options = CONFIGS[name]
    params, x, weights, segments = inputs(options)
    (total, y), (grads, dx) = value_and_grad(options, params, x, weights, segments)
    found = moe(params, x, weights, segments, options)
    np.testing.assert_allclose(y, found.y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, np.sin(found.y).sum() + found.loss, rtol=1e-5)

    if options.router_bias:
        np.testing.assert_array_equal(grads.pop("router_bias"), found.load.astype(np.float32))
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree.flatten((grads, dx))
    places = jax.tree.leaves(({name: params[name] for name in grads}, x))
    for number, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
        direction = rng.normal(size=leaf.shape)

        def along(step, number=number, direction=direction):
            moved = [np.asarray(place, np.float64) for place in places]
            moved[number] = moved[number] + step * direction
            moved_params, moved_x = jax.tree.unflatten(tree, moved)
            found = moe(params | moved_params, moved_x, weights, segments, options)
            return np.sin(found.y).sum() + found.loss

        slope = (along(1e-6) - along(-1e-6)) / 2e-6
        np.testing.assert_allclose(np.sum(leaf * direction), slope, rtol=2e-4, atol=2e-4)


def test_bfloat16():
    """Products in bfloat16, the router in float32; gradients in the parameters' dtype."""
    params, x, weights, segments = inputs(DEEPSEEK)
    x = jnp.asarray(x, jnp.bfloat16)
    (_, y), (grads, dx) = value_and_grad(DEEPSEEK, params, x, weights, segments, dtype="bfloat16")
    found = moe(params, np.asarray(x, np.float64), weights, segments, DEEPSEEK)
    assert y.dtype == dx.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(y.astype(np.float32), found.y, atol=0.03 * np.abs(found.y).max())
    np.testing.assert_array_equal(grads["router_bias"], found.load.astype(np.float32))
    exact = value_and_grad(DEEPSEEK, params, x.astype(np.float32), weights, segments)[1][0]
    for name in ("gate", "up", "down", "router"):
        np.testing.assert_allclose(grads[name], exact[name], atol=0.05 * np.abs(exact[name]).max())


def test_losses_and_loads_of_parts_add_up():
    """So the number of microbatches and the division over devices change nothing; capacity is each sequence's own."""
    options = CONFIGS["capacity"]
    params, x, weights, segments = inputs(options)
    (whole, y), (grads, _) = value_and_grad(options, params, x, weights, segments)
    parts = [value_and_grad(options, params, *(a[b : b + 2] for a in (x, weights, segments))) for b in (0, 2)]
    np.testing.assert_allclose(sum(part[0][0] for part in parts), whole, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([part[0][1] for part in parts]), y, rtol=1e-5, atol=1e-6)
    assert_same(jax.tree.map(jnp.add, parts[0][1][0], parts[1][1][0]), grads)


def test_no_token_is_dropped_when_all_choose_the_same():
    options = replace(MIXTRAL, router_bias=True)
    params, x, weights, segments = inputs(options)
    params["router_bias"] = jnp.asarray([9, 0, 0, 0, 0, 0, 0, 8], jnp.float32)
    y, _ = outputs(options, params, x, weights, segments)
    found = moe(params, x, weights, segments, options)
    counted = int((segments != 0).sum())
    assert found.rows.tolist() == [counted, 0, 0, 0, 0, 0, 0, counted]
    np.testing.assert_allclose(y, found.y, rtol=1e-5, atol=1e-5)


def test_capacity_drops_the_later_tokens():
    """Of a capacity of ceil(1.1 * 1 * 10 / 1), none of ten; of half of it, the last four."""
    options = MoeConfig(experts=1, experts_per_token=1, d_ff=F, capacity_factor=0.55)
    params, x, weights, segments = inputs(options)
    segments = np.ones_like(segments)
    segments[:, 10:] = 0
    y, _ = outputs(options, params, x, weights, segments)
    assert np.all(np.any(y[:, :6] != 0, axis=-1)) and not np.any(y[:, 6:])


# --- Grouped products ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 0, 300, 17), (0, 0, 0), (256, 255, 257), (1,)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products(sizes, transposed):
    rng = np.random.default_rng(0)
    rows = with_spare_rows(sum(sizes))
    x, y = rng.normal(size=(rows, 3)).astype(np.float32), rng.normal(size=(rows, 5)).astype(np.float32)
    y[sum(sizes) :] = np.nan  # what spare rows have goes nowhere
    matrix = rng.normal(size=(len(sizes), 5, 3) if transposed else (len(sizes), 3, 5)).astype(np.float32)

    @partial(jax.jit, compiler_options=QUICK)
    def both(x, y, matrix, sizes):
        return grouped_product(x, matrix, sizes, transposed=transposed), grouped_outer(x, y, sizes)

    product, outer = both(x, y, matrix, np.int32(sizes))
    start = 0
    for g, size in enumerate(sizes):
        own = slice(start, start + size)
        one = matrix[g].T if transposed else matrix[g]
        np.testing.assert_allclose(product[own], x[own] @ one, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(outer[g], x[own].T @ y[own], rtol=1e-4, atol=1e-4)
        start += size


# --- Cut backwards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["none", "full", "dots", "names:mlpwi_0,mlpwi_1"])
def test_cut(policy):
    """F, I and W are the plain backward, the load included; without remat no product runs twice."""
    options = replace(DEEPSEEK, experts_per_token=4)
    params, x, weights, segments = inputs(options)
    module = Moe(config(options))

    def block(params, x, aux):
        y, loss = module.apply({"params": params}, jnp.tanh(x), *aux)
        return x + y, loss

    def plain(params, x, dy):
        y, back = jax.vjp(lambda params, x: block(params, x, aux), params, x)
        return y, back(dy)

    aux, dy = (weights, segments), (jnp.cos(x), jnp.float32(0.5))
    cut = split(block, params, x, aux, policy=Remat.parse(policy, SAVEABLE_NAMES).policy)

    def pieces(params, x, dy):
        y, residuals = cut.forward(params, x, aux)
        dx, stash = cut.input_gradient(params, aux, residuals, dy)
        return y, (cut.weight_gradient(params, aux, residuals, stash), dx)

    assert_same(jax.jit(pieces, compiler_options=QUICK)(params, x, dy), jax.jit(plain)(params, x, dy))

    flops = product_flops(plain, params, x, dy)
    assert product_flops(pieces, params, x, dy) <= flops * {"full": 1.3}.get(policy, 1.02)
    rows = with_spare_rows(B * S * 4)
    copies = [c for c in (*cut.residuals, *cut.stash) if c.aval.shape == (rows, D)]
    assert not copies, "tokens are handed over, not their copies"
    weight_flops = product_flops(
        lambda params, residuals, stash: cut.weight_gradient(params, aux, residuals, stash),
        params,
        *([jax.ShapeDtypeStruct(c.aval.shape, c.aval.dtype) for c in part] for part in (cut.residuals, cut.stash)),
    )
    np.testing.assert_allclose(weight_flops, flops / 3, rtol=0.02)


# --- Several devices ----------------------------------------------------------------------------------------


def on_devices(options: MoeConfig, devices: int, params, *batch):
    """Value, outputs and gradients with tokens and experts divided over devices."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("expert",))
    module = Moe(config(options), ManualAxes(expert="expert"))
    own = {name: name in ("gate", "up", "down") for name in params}
    specs = {name: EACH if own[name] else SAME for name in params}

    def body(params, x, weights, segments):
        (value, y), (grads, dx) = gradients_of(module)(params, x, weights, segments)
        grads = {name: grad if own[name] else jax.lax.psum(grad, "expert") for name, grad in grads.items()}
        return (jax.lax.psum(value, "expert"), y), (grads, dx)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(specs, EACH, EACH, EACH), out_specs=((SAME, EACH), (specs, EACH)), check_vma=False
    )
    return jax.jit(mapped, compiler_options=QUICK)(params, *batch)


@pytest.mark.parametrize(
    ("name", "devices", "slack"),
    [
        ("deepseek", 2, 1.5),
        ("deepseek", 4, 0.2),  # several rounds
        pytest.param("capacity", 4, 1.5, marks=pytest.mark.slow),
        pytest.param("not_normalized", 4, 1.5, marks=pytest.mark.slow),
    ],
)
def test_experts_on_several_devices(name, devices, slack, monkeypatch):
    monkeypatch.setattr(models.exchange, "_SLACK", slack)
    params, *batch = inputs(CONFIGS[name])
    expected = value_and_grad(CONFIGS[name], params, *batch)
    assert_same(on_devices(CONFIGS[name], devices, params, *batch), expected)


def test_no_token_is_dropped_when_one_device_has_all(monkeypatch):
    """Every token goes to the two experts of the last device, more than its slots take."""
    options = replace(MIXTRAL, router_bias=True)
    params, *batch = inputs(options)
    params["router_bias"] = jnp.asarray([0, 0, 0, 0, 0, 0, 9, 8], jnp.float32)
    (_, y), _ = on_devices(options, 4, params, *batch)
    np.testing.assert_allclose(y, moe(params, *batch, options).y, rtol=1e-5, atol=1e-5)


def test_experts_divided_by_the_compiler():
    """As in evaluation and generation: no axis is manual."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("expert", "tensor"))
    params, *batch = inputs(DEEPSEEK)
    specs = {"gate": ("expert", None, "tensor"), "up": ("expert", None, "tensor"), "down": ("expert", "tensor", None)}
    divided = params | {
        name: jax.device_put(params[name], NamedSharding(mesh, PartitionSpec(*spec))) for name, spec in specs.items()
    }
    y, loss = outputs(DEEPSEEK, divided, *batch)
    found = moe(params, *batch, DEEPSEEK)
    np.testing.assert_allclose(y, found.y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss, found.loss, rtol=1e-5)


@pytest.mark.parametrize("name", ["deepseek", "capacity"])
def test_sequences_divided_over_devices(name):
    """Losses, gradients and capacity are those of whole sequences."""
    options, devices = CONFIGS[name], 2
    params, *batch = inputs(options)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("context",))
    module = Moe(config(options), ManualAxes(context="context"))
    order = zigzag_order(S, devices)

    def body(params, x, weights, segments):
        (value, y), (grads, dx) = gradients_of(module)(params, x, weights, segments)
        return (jax.lax.psum(value, "context"), y), (jax.lax.psum(grads, "context"), dx)

    parts = PartitionSpec(None, "context")
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(SAME, *[parts] * 3), out_specs=((SAME, parts), (SAME, parts)), check_vma=False
    )
    (value, y), (grads, dx) = jax.jit(mapped, compiler_options=QUICK)(params, *(a[:, order] for a in batch))
    back = np.argsort(order)
    expected = value_and_grad(options, params, *batch)
    assert_same(((value, y[:, back]), (grads, dx[:, back])), expected)
