"""The backends' kernels: the TPU's in Pallas' interpreter, and compiled ahead of time with heads divided by XLA."""

from __future__ import annotations

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshsys.planner.compile import devices_of
from meshsys.torus import Topology
from models.attention import attend, causal_mask
from models.attention.fused import by_splash, can_fuse
from models.attention.plain import attend_plain
from models.attention.scores import Scores

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed; pip install 'meshsys[tpu-aot]'"
)


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("window, softcap", [(None, 0.0), (100, 5.0)])
def test_splash_against_plain(window, softcap):
    """Three blocks of 128; segments; grouped heads; values that are not as wide as keys."""
    B, S, K, G, H, V = 2, 384, 2, 2, 16, 8
    q, k, v, d_out = random(1, B, S, K * G, H), random(2, B, S, K, H), random(3, B, S, K, V), random(4, B, S, K * G, V)
    mask = causal_mask(jnp.asarray([[1] * 150 + [2] * 200 + [0] * 34, [1] * S], jnp.int32), window)

    @partial(jax.jit, static_argnums=0)
    def run(way):
        out, vjp = jax.vjp(lambda q, k, v: way(q, k, v, mask, Scores(0.3, softcap)), q, k, v)
        return out, vjp(d_out)

    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), run(by_splash), run(attend_plain))


def test_without_a_kernel_it_is_blockwise():
    q = jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, 1024), jnp.int32)

    def temporaries(way):
        def run(q, segments):
            return attend(q, q, q, causal_mask(segments), scale=1.0, implementation=way, in_order=True)

        return jax.jit(run).lower(q, segments).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("fused") == temporaries("blockwise") < temporaries("plain")


@pytest.mark.parametrize(
    "platform, dtype, heads, change, wanted",
    [
        ("tpu", "float32", (4, 256, 128), {}, True),
        ("tpu", "float32", (4, 200, 128), {}, False),  # no multiple of 128
        ("tpu", "float32", (4, 256, 128), {"window": 64}, True),
        ("tpu", "float32", (4, 256, 128), {"window": jnp.int32(64)}, False),  # it may be traced
        ("tpu", "float32", (4, 256, 128), {"prefix_B": jnp.zeros(1, jnp.int32)}, False),
        ("gpu", "bfloat16", (4, 200, 128), {"window": jnp.int32(64)}, True),
        ("gpu", "float32", (4, 200, 128), {}, False),
        ("gpu", "bfloat16", (4, 200, 256), {}, False),
        ("cpu", "bfloat16", (4, 256, 128), {}, False),
    ],
)
def test_what_has_a_kernel(monkeypatch, platform, dtype, heads, change, wanted):
    monkeypatch.setattr("models.attention.fused.platform", lambda: platform)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    K, S, H = heads
    q = jnp.zeros((1, S, K, H), dtype)
    mask = causal_mask(jnp.ones((1, S), jnp.int32))._replace(**change)
    assert can_fuse(q, q, q, mask, Scores(1.0, 0.0), True) == wanted
    assert not can_fuse(q, q, q, mask, Scores(1.0, 0.0), False) or platform == "gpu"
    assert can_fuse(q, q, q, mask, Scores(1.0, 5.0), True) == (wanted and platform == "tpu")
    assert can_fuse(q, q, q[..., :64], mask, Scores(1.0, 0.0), True) == (wanted and platform == "tpu")


def test_heads_that_nobody_knows_how_to_divide(monkeypatch):
    """Arrays may be sharded over eight devices, of which no mesh is bound around."""
    monkeypatch.setattr("models.attention.fused.platform", lambda: "tpu")
    q, mask = jnp.zeros((1, 256, 4, 128)), causal_mask(jnp.ones((1, 256), jnp.int32))
    assert not can_fuse(q, q, q, mask, Scores(1.0, 0.0), True)

    def inside(q):
        assert can_fuse(q, q, q, mask, Scores(1.0, 0.0), True)
        assert not can_fuse(q[:, :, :3], q[:, :, :3], q[:, :, :3], mask, Scores(1.0, 0.0), True)
        return q

    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rows = PartitionSpec("data")
    mapped = jax.shard_map(inside, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False)
    jax.eval_shape(mapped, jnp.zeros((2, 256, 4, 128)))


@pytest.mark.slow
@needs_libtpu
def test_splash_compiles_with_heads_that_xla_divides():
    # An axis of one device is left to XLA too.
    mesh = Mesh(np.array(devices_of(Topology.parse("v5p:2x2x1"))).reshape(2, 2, 1), ("data", "tensor", "expert"))
    rows, heads = PartitionSpec("data"), NamedSharding(mesh, PartitionSpec("data", None, "tensor"))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(rows,) * 4, out_specs=rows, axis_names={"data"}, check_vma=False)
    def gradients(q, k, v, segments):
        def loss(q, k, v):
            return attend(q, k, v, causal_mask(segments, 300), scale=0.1, softcap=5.0, in_order=True).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    q, k, v = (
        jax.ShapeDtypeStruct((2, 512, n, h), jnp.bfloat16, sharding=heads) for n, h in ((4, 64), (2, 64), (2, 128))
    )
    segments = jax.ShapeDtypeStruct((2, 512), jnp.int32, sharding=NamedSharding(mesh, rows))
    text = gradients.lower(q, k, v, segments).compile().as_text()
    assert text.count("tpu_custom_call") == 3  # forward, gradient of queries, gradients of keys and values
    assert "all-gather" not in text and "all-reduce" not in text
