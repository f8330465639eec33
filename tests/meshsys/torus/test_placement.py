from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from meshsys.torus import AXES, Placement, Topology, TopologyError, place

Node = tuple[int, ...]


def splits(most: int, axes: int = len(AXES)) -> Iterator[tuple[int, ...]]:
    """All sizes of the axes whose product is at most `most`."""
    if not axes:
        yield ()
        return
    for size in range(1, most + 1):
        for rest in splits(most // size, axes - 1):
            yield size, *rest


def hops_from(start: Node, topology: Topology) -> dict[Node, int]:
    """Breadth first over the links."""
    found = {start: 0}
    queue = [start]
    for node in queue:
        for near in topology.neighbours(node):
            if near not in found:
                found[near] = found[node] + 1
                queue.append(near)
    return found


def check(placement: Placement) -> None:
    """The placement's own account of itself against a walk over its positions, link by link."""
    topology = placement.topology
    nodes = [tuple(map(int, node)) for node in placement.coords.reshape(-1, topology.ndim)]
    assert len(nodes) == len(set(nodes)) == placement.size
    assert set(nodes) <= set(topology.coords())
    assert placement.indices.ravel().tolist() == [topology.index(node) for node in nodes]
    way = {node: hops_from(node, topology) for node in nodes}
    for axis, (name, size) in enumerate(placement.axes):
        steps, ends = [0], [0]
        for position in itertools.product(*map(range, placement.shape)):
            here = tuple(map(int, placement.coords[position]))
            after = (*position[:axis], (position[axis] + 1) % size, *position[axis + 1 :])
            there = tuple(map(int, placement.coords[after]))
            (ends if position[axis] == size - 1 else steps).append(way[here][there])
        assert placement.hops(name) == max(steps)
        assert placement.closes(name) == max(ends)
        assert (dict(placement.dims)[name] == "-") == (size == 1)


@pytest.mark.parametrize(
    "text", ["2x2x2", "8", "2x4", "v5e:2x4", "1x8", "4x4", "v5e:4x4", "2x2x4", "3x5", "ironwood:2x2x1"]
)
def test_every_split_is_placed(text: str) -> None:
    topology = Topology.parse(text)
    for sizes in splits(topology.size):
        check(place(topology, dict(zip(AXES, sizes, strict=True))))


@pytest.mark.parametrize("text", ["2x2x2", "4x2", "4x4", "2x2x4", "v4:2x2x2", "v5p:4x4x4"])
def test_powers_of_two_are_rings_of_neighbours(text: str) -> None:
    topology = Topology.parse(text)
    for sizes in splits(topology.size, 3):
        if all(size & (size - 1) == 0 for size in sizes):
            placement = place(topology, dict(zip(("pipe", "data", "tensor"), sizes, strict=True)))
            assert all(placement.hops(axis) <= 1 and placement.closes(axis) <= 1 for axis in AXES), placement.dims


@pytest.mark.parametrize(
    ("text", "axes", "dims", "box"),
    [
        ("2x2x2", {"pipe": 2, "data": 2, "tensor": 2}, {"pipe": "x", "data": "y", "tensor": "z"}, (2, 2, 2)),
        ("2x2x2", {"pipe": 4, "tensor": 2}, {"pipe": "x*y", "tensor": "z"}, (2, 2, 2)),
        ("2x2x2", {"pipe": 8}, {"pipe": "x*y*z"}, (2, 2, 2)),
        ("2x2x2", {"pipe": 3, "tensor": 2}, {"pipe": "snake(x*y)", "tensor": "z"}, (2, 2, 2)),
        ("2x2x2", {"data": 2}, {"data": "x"}, (2, 1, 1)),
        ("2x2x2", {}, {}, (1, 1, 1)),
        ("v5p:4x4x4", {"pipe": 4}, {"pipe": "x"}, (4, 1, 1)),  # a whole dimension, which wraps around
        ("v5e:4x4", {"pipe": 4}, {"pipe": "x:2*y:2"}, (2, 2)),  # no dimension does
        ("4x4", {"pipe": 2, "data": 2, "tensor": 4}, {"pipe": "x:2", "data": "x:2", "tensor": "y"}, (4, 4)),
        ("4x4", {"pipe": 3, "tensor": 5}, {"pipe": "snake(x*y)", "tensor": "snake(x*y)"}, (4, 4)),
        ("ironwood:2x2x1", {"pipe": 4, "tensor": 2}, {"pipe": "x*y", "tensor": "core"}, (2, 2, 1, 2)),
    ],
)
def test_dimensions(text: str, axes: dict[str, int], dims: dict[str, str], box: tuple[int, ...]) -> None:
    placement = place(Topology.parse(text), axes)
    assert dict(placement.dims) == {name: dims.get(name, "-") for name in AXES}
    assert dict(placement.axes) == {name: axes.get(name, 1) for name in AXES}
    assert placement.box == box


def test_four_on_two_by_two_is_the_ring() -> None:
    placement = place(Topology.parse("v4:2x2x1"), {"pipe": 4})
    assert placement.coords[:, 0, 0, 0, 0, 0].tolist() == [[0, 0, 0], [0, 1, 0], [1, 1, 0], [1, 0, 0]]
    assert placement.hops("pipe") == placement.closes("pipe") == 1


@pytest.mark.parametrize(
    ("text", "axes", "hops"),
    [
        ("v5p:4x4x4", {"data": 8, "tensor": 8}, {"data": 1, "tensor": 1}),
        ("v5p:4x4x4", {"data": 2, "tensor": 32}, {"data": 1, "tensor": 1}),
        ("v5e:16x16", {"data": 64, "tensor": 4}, {"data": 2, "tensor": 1}),
        ("v5e:16x16", {"data": 32, "tensor": 8}, {"data": 4, "tensor": 1}),
        ("v5p:4x4x12", {"data": 6, "tensor": 32}, {"data": 2, "tensor": 1}),
    ],
)
def test_shapes_on_which_create_device_mesh_fails(text: str, axes: dict[str, int], hops: dict[str, int]) -> None:
    placement = place(Topology.parse(text), axes)
    assert {axis: placement.hops(axis) for axis in axes} == hops
    assert all(placement.closes(axis) <= placement.hops(axis) for axis in axes)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("16x16x16", {"pipe": 16, "data": 4, "fsdp": 8, "tensor": 8}),
        ("16x16x16", dict.fromkeys(AXES, 4)),
        ("16x16x16", {"pipe": 17, "data": 19, "tensor": 11}),
        ("2x2x2x2x2x2", {"pipe": 4, "data": 4, "tensor": 4}),
    ],
)
def test_large(text: str, axes: dict[str, int]) -> None:
    placement = place(Topology.parse(text), axes)
    assert placement.size == math.prod(axes.values())


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        (
            {"pipe": 4, "tensor": 4},
            ["mesh.axes.pipe=4", "mesh.axes.tensor=4", "16 devices", "mesh.topology=2x2x2 has 8"],
        ),
        ({"pipe": 4, "tensor": 4}, ["pipe at most 2 or tensor at most 2"]),
        ({"pipe": 9}, ["mesh.axes.pipe=9", "pipe at most 8"]),
        ({"data": 16, "tensor": 16}, ["256 devices", "lower several axes"]),
        ({"pipe": 0}, ["mesh.axes.pipe=0", "at least 1"]),
        ({"pipe": -2, "data": -2}, ["mesh.axes.pipe=-2", "at least 1"]),
        ({"pipe": True}, ["mesh.axes.pipe=True"]),
        ({"tensr": 2}, ["mesh.axes.tensr=2", "did you mean tensor?"]),
    ],
)
def test_axes_that_do_not_fit(axes: dict[str, int], says: list[str]) -> None:
    with pytest.raises(TopologyError) as error:
        place(Topology.parse("2x2x2"), axes)
    assert all(part in str(error.value) for part in says), str(error.value)
    assert "\n" not in str(error.value)


def test_a_placement_is_checked() -> None:
    placement = place(Topology.parse("2x2"), {"data": 4})
    with pytest.raises(ValueError, match="read-only"):
        placement.coords[0] = 1
    with pytest.raises(TopologyError, match="one node"):
        dataclasses.replace(placement, coords=np.zeros_like(placement.coords))
    with pytest.raises(TopologyError, match="outside"):
        dataclasses.replace(placement, coords=placement.coords + 1)
    with pytest.raises(TopologyError, match="do not fit"):
        dataclasses.replace(placement, coords=placement.coords[..., :1])
    with pytest.raises(TopologyError, match="has the axes"):
        dataclasses.replace(placement, axes=placement.axes[::-1])
