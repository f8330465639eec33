"""F, I and W of a block together are its plain VJP, no matmul runs twice, and what crosses is what the policy says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from models import SAVEABLE_NAMES, Batch, Decoder, ModelConfig
from schedules.backward import split
from schedules.remat import Remat

ROOT = Path(__file__).resolve().parents[2]
B, S, D, F = 3, 5, 8, 20  # sequences, positions, width, hidden width: all different, so that shapes tell values apart
POLICIES = ("none", "full", "dots", "names:mlpwi_0,context", "offload:context")


# --- Blocks: (params, x, aux) -> y --------------------------------------------------------------------------------


def random(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.5, shape), dtype)


def mlp(p, x, aux):
    gate = checkpoint_name(x @ p["gate"], "mlpwi_0")
    return x + checkpoint_name(jax.nn.silu(gate) * (x @ p["up"]), "context") @ p["down"] * aux[..., None]


def attention(p, x, aux):
    """With a mask as the auxiliary input, and integers beside it."""
    scores = jnp.einsum("BSD,DE,BTE->BST", x, p["score"], x)
    weights = jax.nn.softmax(jnp.where(aux["mask"], scores, -1e30), axis=-1)
    mixed = checkpoint_name(jnp.einsum("BST,BTD->BSD", weights, x @ p["value"]), "context")
    return jnp.tanh(mixed) * aux["number"].astype(x.dtype)


def scanned(p, x, aux):
    def body(x, w):
        return x + jnp.tanh(x @ w), jnp.sum(x)

    x, sums = jax.lax.scan(body, x @ p["before"], p["stack"])
    return checkpoint_name(x, "context") @ p["after"] + sums.sum()


@jax.custom_vjp
def halved_gradient(x):
    return jnp.sin(x)


halved_gradient.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, dy: (0.5 * dy * cos,))


def custom(p, x, aux):
    return checkpoint_name(halved_gradient(x @ p["a"]), "context") @ p["b"]


def cast(p, x, aux):
    """bfloat16 arithmetic over float32 parameters."""
    gate, down = p["gate"].astype(jnp.bfloat16), p["down"].astype(jnp.bfloat16)
    return x + jax.nn.silu(checkpoint_name(x @ gate, "context")) @ down


def embed(p, x, aux):
    return p["table"][aux]


def head(p, x, aux):
    logits = x @ p["kernel"]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, aux[..., None], axis=-1)[..., 0])


def unused(p, x, aux):
    return {"a": x["a"] @ p["used"], "b": x["b"] * jax.lax.stop_gradient(p["stopped"])[None, None] + aux}


def plain_scale(p, x, aux):
    """No matmul at all."""
    return jnp.sin(x) * p["scale"] + p["shift"]


def rows(*shape):
    return random(9, B, S, *shape)


BLOCKS = {
    "mlp": (mlp, {"gate": random(1, D, F), "up": random(2, D, F), "down": random(3, F, D)}, rows(D), rows()),
    "attention": (
        attention,
        {"score": random(1, D, D), "value": random(2, D, D)},
        rows(D),
        {"mask": jnp.tril(jnp.ones((S, S), bool))[None], "number": jnp.int32(3)},
    ),
    "scan": (scanned, {"before": random(1, D, F), "stack": random(2, 4, F, F), "after": random(3, F, D)}, rows(D), ()),
    "custom_vjp": (custom, {"a": random(1, D, F), "b": random(2, F, D)}, rows(D), None),
    "bfloat16": (cast, {"gate": random(1, D, F), "down": random(3, F, D)}, rows(D).astype(jnp.bfloat16), ()),
    "embed": (embed, {"table": random(1, 11, D)}, (), jnp.arange(B * S, dtype=jnp.int32).reshape(B, S) % 7),
    "head": (head, {"kernel": random(1, D, 11)}, rows(D), jnp.arange(B * S, dtype=jnp.int32).reshape(B, S) % 11),
    "unused": (
        unused,
        {"used": random(1, D, D), "stopped": random(2, F), "never": random(3, 2)},
        {"a": rows(D), "b": rows(F)},
        random(4, 1, 1, F),
    ),
    "plain": (plain_scale, {"scale": random(1, B, S, D), "shift": random(2, B, S, D)}, rows(D), ()),
}


def policy_of(text):
    return Remat.parse(text, ("context", "mlpwi_0")).policy


def dots(equations):
    """Number of matmuls, in calls too."""
    count = 0
    for equation in equations:
        count += equation.primitive.name == "dot_general"
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            count += dots(inner.eqns) if hasattr(inner, "eqns") else 0
    return count


def parts_dots(cut):
    return [dots(part.equations) for part in (cut._forward, cut._recompute, cut._input, cut._weight)]


# --- Values -------------------------------------------------------------------------------------------------------


def read_by(action, values, crossings):
    """The values without those that the action does not read."""
    return [value if getattr(c, f"for_{action}") else None for value, c in zip(values, crossings, strict=True)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_parts_are_the_vjp(name, remat, apart):
    block, params, x, aux = BLOCKS[name]
    cut = split(block, params, x, aux, policy=policy_of(remat), apart=apart)

    @jax.jit
    def both(params, x, aux):
        want_y, vjp = jax.vjp(lambda params, x: block(params, x, aux), params, x)
        dy = jax.tree.map(jnp.cos, want_y)
        want_dparams, want_dx = vjp(dy)
        y, residuals = cut.forward(params, x, aux)
        again = cut.recompute(params, aux, read_by("recompute", residuals, cut.residuals))
        left = [(residuals, cut.residuals), (again, cut.recomputed)]
        mine, made = (read_by("input", *values) for values in left)
        dx, stash = cut.input_gradient(params, aux, mine, dy, made)
        mine, made = (read_by("weight", *values) for values in left)
        dparams = cut.weight_gradient(params, aux, mine, stash, made)
        for values, crossings in (*left, (stash, cut.stash)):
            assert [(v.shape, v.dtype) for v in values] == [(c.aval.shape, c.aval.dtype) for c in crossings]
        return (y, dx, dparams), (want_y, want_dx, want_dparams)

    (y, dx, dparams), want = both(params, x, aux)
    # A parameter that gets no gradient is None; its gradient is zero.
    dparams = jax.tree.map(
        lambda g, p: jnp.zeros_like(p) if g is None else g, dparams, params, is_leaf=lambda g: g is None
    )
    tolerance = 3e-2 if name == "bfloat16" else 1e-6

    def close(got, want):
        assert got.dtype == want.dtype and got.shape == want.shape
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())

    jax.tree.map(close, (y, dx, dparams), want)


def test_unused_parameters_have_no_gradient():
    block, params, x, aux = BLOCKS["unused"]
    cut = split(block, params, x, aux, policy="none")
    _, residuals = cut.forward(params, x, aux)
    dx, stash = cut.input_gradient(params, aux, residuals, x)
    dparams = cut.weight_gradient(params, aux, residuals, stash)
    assert dparams["never"] is None and dparams["stopped"] is None and dparams["used"].shape == (D, D)
    # `b` is only scaled by a parameter: nothing of it waits.
    assert not any(c.aval.shape == (B, S, F) for c in (*cut.residuals, *cut.stash))


def test_shapes_will_do():
    block, *arguments = BLOCKS["mlp"]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
    one, other = split(block, *arguments, policy="none"), split(block, *shapes, policy="none")
    assert [(c.name, c.aval.shape) for c in one.residuals] == [(c.name, c.aval.shape) for c in other.residuals]


# --- Work ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "scan"])
def test_no_matmul_runs_twice(name, remat, apart):
    block, params, x, aux = BLOCKS[name]
    policy = policy_of(remat)
    checkpointed = block if policy == "none" else jax.checkpoint(block, policy=policy)

    def plain(params, x, aux, dy):
        y, vjp = jax.vjp(lambda params, x: checkpointed(params, x, aux), params, x)
        return y, vjp(dy)

    dy = jax.eval_shape(block, params, x, aux)
    cut = split(block, params, x, aux, policy=policy, apart=apart)
    assert sum(parts_dots(cut)) == dots(jax.make_jaxpr(plain)(params, x, aux, dy).eqns)


def test_weight_gradient_has_the_matmuls_of_parameters_alone():
    cut = split(*BLOCKS["mlp"], policy="none")
    assert parts_dots(cut) == [3, 0, 3, 3]
    cut = split(*BLOCKS["mlp"], policy=None)
    assert parts_dots(cut) == [3, 0, 5, 3]  # I computes gate and up again; down's result is not needed
    cut = split(*BLOCKS["mlp"], policy=policy_of("names:mlpwi_0"))
    assert parts_dots(cut) == [3, 0, 4, 3]


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("full", 2), ("names:mlpwi_0", 1)])
def test_recompute_apart_takes_all_recomputation_out_of_the_input_gradient(remat, again):
    cut = split(*BLOCKS["mlp"], policy=policy_of(remat), apart=True)
    assert parts_dots(cut) == [3, again, 3, 3]
    whole = split(*BLOCKS["mlp"], policy=policy_of(remat))
    assert [(c.name, c.aval) for c in cut.residuals] == [(c.name, c.aval) for c in whole.residuals]
    assert bool(cut.recomputed) == (remat != "none") and not whole.recomputed


def test_scan_is_one_equation():
    cut = split(*BLOCKS["scan"], policy="none")
    parts = (cut._forward, cut._input, cut._weight)
    assert [sum(e.primitive.name == "scan" for e in part.equations) for part in parts] == [1, 1, 0]
    assert parts_dots(cut)[3] == 2  # of `before` and `after`; the scan's own weights come out of I


# --- What crosses -------------------------------------------------------------------------------------------------


def test_full_keeps_the_input_alone():
    for name in ("mlp", "attention", "custom_vjp", "bfloat16"):
        block, params, x, aux = BLOCKS[name]
        (kept,) = split(block, params, x, aux, policy=None).residuals
        assert (kept.name, kept.aval.shape, kept.aval.dtype) == ("input", x.shape, x.dtype)


@pytest.mark.parametrize(
    ("remat", "kept"),
    [
        ("names:mlpwi_0", ["input", "mlpwi_0"]),
        ("names:context", ["context", "input"]),
        ("names:mlpwi_0,context", ["context", "input", "mlpwi_0"]),
    ],
)
def test_names_keeps_these_alone(remat, kept):
    cut = split(*BLOCKS["mlp"], policy=policy_of(remat))
    assert sorted(c.name for c in cut.residuals) == kept


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_parameters_and_auxiliary_inputs_never_wait(name, remat):
    block, params, x, aux = BLOCKS[name]
    cut = split(block, params, x, aux, policy=policy_of(remat))
    # The parameters' shapes are theirs alone, except where the block is elementwise.
    given = {leaf.shape for leaf in jax.tree.leaves(params)} - {(B, S, D)}
    assert not given & {crossing.aval.shape for crossing in cut.residuals}
    for part in (cut._forward, cut._input):
        assert not {id(v) for v in part.outputs} & {id(v) for key in ("params", "aux") for v in part.inputs[key]}


def test_a_cast_weight_is_cast_again():
    cut = split(*BLOCKS["bfloat16"], policy="none")
    assert all(c.aval.shape[:2] == (B, S) and c.aval.dtype == jnp.bfloat16 for c in (*cut.residuals, *cut.stash))


def test_offloaded_values_are_on_the_host():
    cut = split(*BLOCKS["mlp"], policy=policy_of("offload:context"))
    assert {c.name: c.on_host for c in cut.residuals} == {"input": False, "context": True}
    assert not any(c.on_host for c in cut.stash)
    cut = split(*BLOCKS["mlp"], policy=policy_of("names:context"))
    assert not any(c.on_host for c in cut.residuals)


def test_bytes():
    (kept,) = split(*BLOCKS["bfloat16"], policy=None).residuals
    assert kept.bytes == 2 * B * S * D


def test_light_values_are_recomputed_rather_than_kept():
    """tanh' = 1 - tanh^2 needs one array, though JAX keeps more of this chain."""

    def chain(p, x, aux):
        return jnp.tanh(2.0 * (x @ p)) * 3.0 + 1.0

    cut = split(chain, random(1, D, D), rows(D), (), policy="none")
    assert [c.name for c in cut.residuals if c.for_weight] == ["input"]
    assert [c.bytes for c in cut.residuals] == [4 * B * S * D] * 2
    assert [c.bytes for c in cut.stash] == [4 * B * S * D]


@pytest.mark.parametrize("remat", POLICIES)
def test_decoder_layer(remat):
    """A layer with everything in it: the same matmuls, and residuals that are no larger than JAX's."""
    config = ModelConfig(layers=1, d_model=D, heads=2, kv_heads=1, d_ff=F, vocab_size=11, dropout=0.1)
    decoder = Decoder(config)
    zeros = jnp.zeros((B, S), jnp.int32)
    batch = Batch(zeros, zeros, zeros, zeros, jnp.ones((B, S)), jnp.arange(B, dtype=jnp.int32))
    aux = decoder.prepare(batch, jax.random.key(1)), jnp.int32(0)
    params = jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], decoder.init(jax.random.key(0))["layers"]))
    policy = Remat.parse(remat, SAVEABLE_NAMES).policy

    def layer(params, x, aux):
        return decoder.layer(params, x, *aux)[0]

    def plain(params, x, aux, dy):
        y, vjp = jax.vjp(lambda params, x: checkpointed(params, x, aux), params, x)
        return y, vjp(dy)

    checkpointed = layer if policy == "none" else jax.checkpoint(layer, policy=policy)
    x = jax.ShapeDtypeStruct((B, S, D), jnp.float32)
    cut = split(layer, params, x, aux, policy=policy)
    assert sum(parts_dots(cut)) == dots(jax.make_jaxpr(plain)(params, x, aux, x).eqns)
    vjp = jax.eval_shape(lambda p, x: jax.vjp(lambda p, x: checkpointed(p, x, aux), p, x)[1], params, x)
    leaves = jax.tree.leaves(vjp)
    assert sum(c.bytes for c in cut.residuals) <= sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


# --- Determinism --------------------------------------------------------------------------------------------------

PRINT_CUT = """
from tests.schedules import test_backward as t
for name in ("mlp", "attention"):
    for remat in ("none", "dots"):
        cut = t.split(*t.BLOCKS[name], policy=t.policy_of(remat))
        print([(c.name, c.aval.str_short(), c.for_input, c.for_weight) for c in (*cut.residuals, *cut.stash)])
        print([[e.primitive.name for e in part.equations] for part in (cut._forward, cut._input, cut._weight)])
"""


def test_the_cut_does_not_depend_on_hashes():
    """Every process of a job must make the same program."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_CUT],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate(timeout=300)[0] for process in processes)
    assert one == other and one.count("\n") == 8
