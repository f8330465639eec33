"""JAX's own choice on stand-in devices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from meshsys.jax_order import jax_order
from meshsys.torus import Flow, Placement, Topology, place
from meshsys.torus.groups import seconds


@pytest.mark.parametrize(
    ("text", "axes", "dims"),
    [
        ("v5p:4x4x4", {"pipe": 4, "fsdp": 4, "tensor": 4}, {"pipe": "z", "fsdp": "y", "tensor": "x"}),
        ("v5p:4x4x8", {"data": 8, "tensor": 16}, {"data": "z", "tensor": "x*y"}),
        ("v6e:8x16", {"data": 8, "tensor": 16}, {"data": "x", "tensor": "y"}),
        ("ironwood:4x4x4", {"data": 64, "tensor": 2}, {"data": "x*y*z", "tensor": "core"}),
        ("v5e:1x1", {}, {}),
    ],
)
def test_whole_dimensions(text, axes, dims):
    found = jax_order(Topology.parse(text), axes)
    assert isinstance(found, Placement)
    assert {name: where for name, where in found.dims if where != "-"} == dims
    assert sorted(found.indices.ravel().tolist()) == list(range(found.size))


@pytest.mark.parametrize(
    ("text", "axes", "error"),
    [
        ("v5p:4x4x4", {"data": 8, "tensor": 8}, "NotImplementedError"),
        ("v5e:16x16", {"data": 64, "tensor": 4}, "NotImplementedError"),
        ("v5p:4x4x12", {"data": 6, "tensor": 32}, "NotImplementedError"),
        ("v5p:4x4x4", {"data": 8, "tensor": 4}, "ValueError"),  # part of a slice
    ],
)
def test_where_it_fails_ours_does_not(text, axes, error):
    assert jax_order(Topology.parse(text), axes) == error
    assert place(Topology.parse(text), axes).size == np.prod(list(axes.values()))


def test_two_by_two_on_v4():
    """JAX's four are no ring there, ours are."""
    topology = Topology.parse("v4:2x2x1")
    theirs, ours = jax_order(topology, {"data": 4}), place(topology, {"data": 4})
    assert isinstance(theirs, Placement)
    assert theirs.hops("data") == 2 and ours.hops("data") == ours.closes("data") == 1


@pytest.mark.parametrize("text", ["v4:2x2x2", "v4:2x2x4", "v5p:2x4x4", "v5p:4x4x4", "v5e:4x4", "v6e:4x8"])
def test_ours_is_no_slower_and_sums_along_as_many_dimensions(text):
    """The compiler does so for an axis that takes several whole ones; `scripts/bench_axes.py compiled` asks it."""
    topology, names, compared = Topology.parse(text), ("pipe", "fsdp", "tensor"), 0
    traffic = [Flow("rotate", ("pipe",), 2e9), Flow("all-gather", ("fsdp",), 6e9), Flow("all-reduce", ("tensor",), 8e9)]
    for sizes in itertools.product([1 << power for power in range(7)], repeat=len(names)):
        axes = dict(zip(names, sizes, strict=True))
        if math.prod(sizes) != topology.size or isinstance(theirs := jax_order(topology, axes), str):
            continue
        sent = [flow for flow in traffic if axes[flow.axes[0]] > 1]
        ours = place(topology, axes, sent)
        assert sum(seconds(ours, flow) for flow in sent) <= (1 + 1e-9) * sum(seconds(theirs, flow) for flow in sent)
        assert several_whole(ours) >= several_whole(theirs), axes
        compared += 1
    assert compared > 2


def several_whole(placement: Placement) -> int:
    return sum("*" in where and ":" not in where and "snake" not in where for _, where in placement.dims)
