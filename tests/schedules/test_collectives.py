"""Gathers and reductions over manual axes of arrays that another axis divides too, against the whole array."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from schedules.collectives import gather, manual_part, reduce_gradient, sum_over

MANUAL = ("pipe", "fsdp")
BOTH = ("pipe", "tensor")
SPECS = [P("fsdp", "tensor"), P(BOTH, "fsdp"), P("fsdp", BOTH), P(None, "tensor"), P("fsdp")]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("pipe", "fsdp", "tensor"))


def mapped(mesh: Mesh, function, in_spec: P, out_spec: P):
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=in_spec, out_specs=out_spec, axis_names=set(MANUAL), check_vma=False
        )
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gather_gives_the_whole(mesh, spec):
    array = jax.device_put(np.arange(16.0 * 8).reshape(16, 8), NamedSharding(mesh, spec))
    run = mapped(mesh, lambda shard: gather(shard, spec) * 1.0, manual_part(spec, MANUAL), P())
    np.testing.assert_array_equal(run(array), array)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_gradient_is_summed_and_sharded(mesh, spec):
    """Each of the four devices along the manual axes holds another multiple of the gradient."""
    array = np.arange(16.0 * 8, dtype=np.float32).reshape(16, 8)

    def function(whole):
        mine = whole * (1 + 2 * jax.lax.axis_index("pipe") + jax.lax.axis_index("fsdp")).astype(whole.dtype)
        return reduce_gradient(mine, spec, MANUAL)

    run = mapped(mesh, function, P(), manual_part(spec, MANUAL))
    np.testing.assert_array_equal(run(array), array * (1 + 2 + 3 + 4))


def test_sums_are_wide_whatever_the_dtype(mesh):
    """Eight bits of a mantissa would lose the ones."""
    ones_and_more = jax.device_put(np.array([256, 1, 1, 1], jnp.bfloat16), NamedSharding(mesh, P(MANUAL)))
    run = mapped(mesh, lambda shard: sum_over(shard, MANUAL), P(MANUAL), P())
    found = run(ones_and_more)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), np.float32([260]))


def test_other_axes_are_not_gathered(mesh):
    spec = P("fsdp", "tensor")
    array = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=NamedSharding(mesh, spec))

    def function(shard):
        return reduce_gradient(2.0 * gather(shard, spec), spec, MANUAL)

    text = mapped(mesh, function, manual_part(spec, MANUAL), manual_part(spec, MANUAL)).lower(array).compile().as_text()
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* (all-gather|all-reduce|reduce-scatter)\(", text)
    assert {kind for _, kind in shapes} >= {"all-gather"}
    assert all(np.prod([int(side) for side in sides.split(",")]) <= 16 * 8 // 2 for sides, _ in shapes)
