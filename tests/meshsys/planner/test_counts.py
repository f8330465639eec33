"""What a module's text says, against functions whose counts are known by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshsys.planner import hlo
from meshsys.planner.counts import Part, count, device_groups
from meshsys.planner.times import axes_of
from meshsys.torus import AXES
from schedules.flops import product_flops


def module(function, *shapes: jax.ShapeDtypeStruct) -> hlo.Module:
    return hlo.parse(jax.jit(function).lower(*shapes).compile().as_text())


def struct(*shape: int, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def once(found: hlo.Module) -> Part:
    return count(found, branches=-1, ticks=1).once


def test_products_are_counted_with_their_trips():
    def function(a, b):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ b), None), a, None, length=7)[0]

    found = module(function, struct(4, 16), struct(16, 16))
    assert once(found).flops == product_flops(function, struct(4, 16), struct(16, 16)) == 7 * 2 * 4 * 16 * 16


def test_a_batched_product_as_a_convolution():
    """As the TPU compiler writes it: each batch entry is a place of a window that the padding leaves one product of."""
    text = """HloModule m

ENTRY %main (a: bf16[8,32,64], b: bf16[8,64,16]) -> bf16[8,32,16] {
  %a = bf16[8,32,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[8,64,16]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %c = bf16[8,32,16]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
}
"""
    part = once(hlo.parse(text))
    assert part.flops == 2 * 8 * 32 * 64 * 16
    assert part.traffic == 2 * (8 * 32 * 64 + 8 * 32 * 16)  # b is in the core's own memory


def test_branches_and_ticks_are_apart():
    """A scan over a switch, as the program's: the product of a branch counts for the branch, the other for the tick."""

    def function(x, w, rows):
        def tick(x, row):
            x = jax.lax.switch(row, [lambda x: x, lambda x: x @ w, lambda x: jnp.sin(x @ w @ w)], x)
            return jax.lax.optimization_barrier(x @ w), None

        return jax.lax.scan(tick, x, rows)[0] @ w

    rows = jax.ShapeDtypeStruct((9,), jnp.int32)
    found = count(module(function, struct(8, 8), struct(8, 8), rows), branches=3, ticks=9)
    product = 2 * 8**3
    assert [part.flops for part in found.branches] == [0, product, 2 * product]
    assert (found.tick.flops, found.once.flops) == (product, product)


def test_a_slice_of_a_large_array_is_little_traffic():
    def function(a, i):
        return jax.lax.dynamic_slice(a, (i, 0), (1, 16)) * 2.0

    part = once(module(function, struct(4096, 16), jax.ShapeDtypeStruct((), jnp.int32)))
    assert part.traffic < 4 * 4096


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [(0, 1), (2, 3)]),
        ("[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=2,'b'=4] {'a'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("mesh['a'=2,'b'=4] {'b'}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [tuple(range(8))]),
    ],
)
def test_groups_in_every_form(text, groups):
    assert device_groups(text) == groups


def test_collectives_and_their_axes():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 4, 1, 1, 1), AXES)

    def function(x):
        whole = jax.lax.all_gather(x, "fsdp", tiled=True)
        moved = jax.lax.ppermute(whole, "pipe", [(0, 1), (1, 0)])
        return jax.lax.psum_scatter(moved, "fsdp", tiled=True), jax.lax.psum(x, ("pipe", "fsdp"))

    spec = PartitionSpec(("pipe", "fsdp"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec()), check_vma=False)
    part = once(module(mapped, struct(64, 8, sharding=NamedSharding(mesh, spec))))
    found = {(c.kind, axes_of(mesh.devices.shape, c.group), c.bytes) for c in part.collectives}
    shard, whole = 4 * 8 * 8, 4 * 4 * 8 * 8
    assert found == {
        ("all-gather", ("fsdp",), whole),
        ("permute", ("pipe",), whole),
        ("reduce-scatter", ("fsdp",), whole),
        ("all-reduce", ("pipe", "fsdp"), shard),
    }


def test_text_that_is_no_module():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("nothing")
