"""Placements for a known traffic: against all assignments tried one by one, and by what they are for."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

from meshsys.torus import AXES, Flow, Placement, Topology, place
from meshsys.torus.groups import seconds

REDUCE = Flow("all-reduce", ("tensor",), 64e6, 100)
STEP = (
    Flow("permute", ("pipe",), 16e6, 64),
    Flow("all-reduce", ("data",), 4e9),
    Flow("all-gather", ("fsdp",), 2e9),
    Flow("reduce-scatter", ("fsdp",), 4e9),
    Flow("all-to-all", ("expert",), 32e6, 32),
    Flow("rotate", ("context",), 8e6, 64),
    REDUCE,
    Flow("all-gather", ("pipe", "fsdp"), 1e9),
)


def total(placement: Placement, traffic: tuple[Flow, ...]) -> float:
    sizes = dict(placement.axes)
    return sum(seconds(placement, flow) for flow in traffic if any(sizes[name] > 1 for name in flow.axes))


def row_major(topology: Topology, sizes: dict[str, int]) -> list[Placement]:
    """Every way to give each axis a factor of each dimension, whichever lies inside; along it in row-major order."""
    names, found = list(sizes), []
    factors = [
        [box for box in itertools.product(*(divisors(room) for room in topology.dims)) if math.prod(box) == sizes[name]]
        for name in names
    ]
    for boxes in itertools.product(*factors):
        if any(math.prod(sides) > room for sides, room in zip(zip(*boxes, strict=True), topology.dims, strict=True)):
            continue
        for order in itertools.permutations(range(len(names))):
            coords = np.zeros((*(sizes[name] for name in names), topology.ndim), np.int64)
            strides = [1] * topology.ndim
            for axis in order:
                digits = np.array(list(np.ndindex(boxes[axis]))) * strides
                coords += digits.reshape(*(-1 if i == axis else 1 for i in range(len(names))), topology.ndim)
                strides = [stride * side for stride, side in zip(strides, boxes[axis], strict=True)]
            shape = [sizes.get(name, 1) for name in AXES]
            axes = tuple(zip(AXES, shape, strict=True))
            nodes = coords.reshape(*shape, topology.ndim)
            found.append(Placement(topology, axes, nodes, tuple((name, "?") for name in AXES)))
    return found


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("v5e:4x4", {"data": 4, "tensor": 4}),
        ("v5e:4x4", {"pipe": 2, "fsdp": 4, "tensor": 2}),
        ("v5e:4x8", {"fsdp": 4, "tensor": 8}),
        ("v5e:8x8", {"data": 8, "context": 8}),
        ("v5p:4x4x4", {"data": 8, "tensor": 8}),
        ("v5p:4x4x4", {"pipe": 4, "fsdp": 4, "expert": 4}),
        ("v5p:4x4x4", {"fsdp": 2, "tensor": 32}),
        ("ironwood:2x2x2", {"pipe": 2, "fsdp": 2, "tensor": 4}),
        ("ironwood:2x4x4", {"pipe": 8, "fsdp": 2, "tensor": 4}),
        ("v5e:8x16", {"pipe": 4, "fsdp": 8, "tensor": 4}),
    ],
)
def test_nothing_is_better(text, sizes):
    topology = Topology.parse(text)
    tried = row_major(topology, sizes)
    best = min(total(placement, STEP) for placement in tried)
    assert total(place(topology, sizes, STEP), STEP) <= best * (1 + 1e-9)
    assert len(tried) > 1


def test_the_axis_that_sends_most_has_the_best_links():
    """An all-reduce goes round a ring twice as fast as along a line; only one of the dimensions is one."""
    topology = Topology.parse("v5e:8x16")
    for name, other in (("data", "tensor"), ("tensor", "data")):
        traffic = Flow("all-reduce", (name,), 1e9), Flow("all-reduce", (other,), 1e6)
        dims = dict(place(topology, {name: 16, other: 8}, traffic).dims)
        assert dims[name] == "y", dims


def test_a_dimension_is_split_where_that_is_cheaper():
    """Four of v5e:16x16 in a row are a line, in a block a ring; pipeline neighbours need no ring."""
    topology = Topology.parse("v5e:16x16")
    dims = dict(place(topology, {"data": 64, "tensor": 4}, (REDUCE,)).dims)
    assert dims["tensor"] == "x:2*y:2"


@pytest.mark.parametrize(
    ("text", "sizes", "along"),
    [
        ("v5p:2x4x4", {"data": 8, "tensor": 4}, "data"),
        ("v5p:2x4x4", {"fsdp": 4, "tensor": 8}, "tensor"),
        ("v4:2x4x4", {"pipe": 8, "fsdp": 4}, "pipe"),
        ("v4:4x4x8_twisted", {"fsdp": 32, "tensor": 4}, "fsdp"),
    ],
)
def test_a_sum_along_several_dimensions_is_not_given_up(text, sizes, along):
    """A ring of four on a block would be faster by the forms, but then the other axis takes no whole dimensions."""
    topology = Topology.parse(text)
    (four,) = sizes.keys() - {along}
    traffic = Flow("all-reduce", (four,), 1e10), Flow("all-reduce", (along,), 1e9)
    placement, tried = place(topology, sizes, traffic), row_major(topology, sizes)
    found = total(placement, traffic)
    assert takes_several_whole(placement, along)
    assert found > min(total(each, traffic) for each in tried) * (1 + 1e-9)
    assert found <= min(total(each, traffic) for each in tried if takes_several_whole(each, along)) * (1 + 1e-9)


def takes_several_whole(placement: Placement, name: str) -> bool:
    axis, dims = AXES.index(name), placement.topology.dims
    line = np.moveaxis(placement.coords, axis, 0).reshape(placement.shape[axis], -1, len(dims))[:, 0]
    sides = [len(np.unique(places)) for places in line.T]
    rooms = [room for side, room in zip(sides, dims, strict=True) if side > 1]
    return len(rooms) > 1 and math.prod(rooms) == len(line)


def test_which_axis_lies_inside_follows_from_the_traffic():
    """On one dimension the inner axis has links of its own."""
    ring = Topology.parse("v5p:4x4x16")
    sizes = {"pipe": 16, "data": 2, "tensor": 8}
    for heavy in ("data", "tensor"):
        traffic = tuple(Flow("all-reduce", (name,), 1e9 if name == heavy else 1e6) for name in ("data", "tensor"))
        assert place(ring, sizes, traffic).hops(heavy) == 1


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("v5p:8x8x8", {"pipe": 8, "fsdp": 8, "tensor": 8}),
        ("v5p:8x8x8", {"data": 64, "tensor": 8}),
        ("v5e:16x16", {"fsdp": 64, "tensor": 4}),
        ("v5p:4x8x16", {"pipe": 4, "data": 4, "fsdp": 8, "tensor": 4}),
    ],
)
def test_the_search_is_fast(text, sizes):
    """In processor time, on a machine that others use too."""
    started = time.process_time()
    place(Topology.parse(text), sizes, STEP)
    assert time.process_time() - started < 1


def test_traffic_without_a_generation_changes_nothing():
    for text in ("4x4", "2x2x2"):
        topology = Topology.parse(text)
        plain, known = place(topology, {"data": 2, "tensor": 4}), place(topology, {"data": 2, "tensor": 4}, STEP)
        assert np.array_equal(plain.coords, known.coords)


def test_the_same_question_has_the_same_answer():
    topology = Topology.parse("v5p:4x4x4")
    axes = {"data": 8, "tensor": 8}
    assert place(topology, axes, STEP) is place(topology, axes, list(STEP))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gossip", ("data",), 1.0), "none of all-gather"),
        (("all-gather", (), 1.0), "not some of pipe"),
        (("all-gather", ("rows",), 1.0), "not some of pipe"),
        (("permute", ("pipe", "data"), 1.0), "goes along one axis, not pipe\\+data"),
        (("all-gather", ("data",), -1.0), "below 0"),
    ],
)
def test_a_flow_is_checked(arguments, says):
    with pytest.raises(ValueError, match=says):
        Flow(*arguments)
