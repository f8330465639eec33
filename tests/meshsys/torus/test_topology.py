from __future__ import annotations

import itertools
import math

import pytest

from meshsys.torus import Topology, TopologyError

TOPOLOGIES = ["1", "2", "5", "2x2", "2x3", "4x4", "2x2x2", "2x2x4", "3x4x5", "2x3x2x3", "v5e:4x4", "v5p:2x4x4"]

Node = tuple[int, ...]


def links(topology: Topology) -> dict[Node, set[Node]]:
    """Every pair of nodes looked at: linked if they differ in one dimension, by 1 or from end to end."""
    graph: dict[Node, set[Node]] = {node: set() for node in topology.coords()}
    for a, b in itertools.permutations(graph, 2):
        differ = [dim for dim in range(topology.ndim) if a[dim] != b[dim]]
        if len(differ) == 1:
            dim = differ[0]
            ends = {a[dim], b[dim]} == {0, topology.dims[dim] - 1}
            if abs(a[dim] - b[dim]) == 1 or (ends and topology.wrap[dim]):
                graph[a].add(b)
    return graph


def hops_from(start: Node, graph: dict[Node, set[Node]]) -> dict[Node, int]:
    """Breadth first."""
    found = {start: 0}
    queue = [start]
    for node in queue:
        for near in graph[node] - found.keys():
            found[near] = found[node] + 1
            queue.append(near)
    return found


@pytest.mark.parametrize(
    ("text", "dims", "wrap"),
    [
        ("1", (1,), (False,)),
        ("8", (8,), (True,)),
        (" 2 x 2x2 ", (2, 2, 2), (False,) * 3),
        ("2x3x4", (2, 3, 4), (False, True, True)),
        ("v4:2x2x1", (2, 2, 1), (False,) * 3),
        ("V5P:4X4X4", (4, 4, 4), (True,) * 3),
        ("v5p:2x4x4", (2, 4, 4), (False,) * 3),
        ("v5p:16x16x24", (16, 16, 24), (True,) * 3),
        ("v5e:8x16", (8, 16), (False, True)),
        ("v6e:16x16", (16, 16), (True, True)),
        ("v6e:4x4", (4, 4), (False, False)),
        ("ironwood:2x2x1", (2, 2, 1, 2), (False,) * 4),
        ("v7:4x4x8", (4, 4, 8, 2), (True, True, True, False)),
    ],
)
def test_parse(text: str, dims: tuple[int, ...], wrap: tuple[bool, ...]) -> None:
    topology = Topology.parse(text)
    assert topology.dims == dims
    assert topology.wrap == wrap
    assert topology.size == math.prod(dims)
    assert len(topology.names) == topology.ndim == len(dims)
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "write sizes"),
        ("2x", "write sizes"),
        ("x2", "write sizes"),
        ("-2x2", "write sizes"),
        ("2.5x2", "write sizes"),
        ("2*2", "write sizes"),
        ("v5p:", "write sizes"),
        ("0x2", "below 1"),
        ("9999x9999", "the most is 65536"),
        ("v5q:2x2", "did you mean v5p?"),
        ("hal:2x2", "there are v4, v5p, v5e, v6e, ironwood"),
        ("v5p:3x3x3", "4x4x4, 2x4x4, 2x2x4"),
        ("v5p:6x4x4", "8x4x4"),
        ("v4:1x2x2", "nearest are 2x2x1, 2x2x2"),
        ("v5e:4x2", "nearest are 2x4"),
        ("v6e:2x2x2", "2x2, 2x4"),
        ("v5p:4x4", "2x4x4"),
        ("v4:16x16x20", "16x16x16"),
    ],
)
def test_impossible_topologies(text: str, says: str) -> None:
    with pytest.raises(TopologyError) as error:
        Topology.parse(text)
    assert str(error.value).startswith("mesh.topology=")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", TOPOLOGIES)
def test_neighbours_and_distances(text: str) -> None:
    topology = Topology.parse(text)
    graph = links(topology)
    for a in topology.coords():
        assert set(topology.neighbours(a)) == graph[a]
        assert len(topology.neighbours(a)) == len(graph[a])
        way = hops_from(a, graph)
        for b in topology.coords():
            assert topology.distance(a, b) == way[b]


@pytest.mark.parametrize("text", TOPOLOGIES)
def test_index_is_row_major(text: str) -> None:
    topology = Topology.parse(text)
    for index, coord in enumerate(itertools.product(*map(range, topology.dims))):
        assert topology.index(coord) == index
        assert topology.coord(index) == coord


@pytest.mark.parametrize("coord", [(2, 0), (0, -1), (0,), (0, 0, 0)])
def test_a_node_outside(coord: tuple[int, ...]) -> None:
    topology = Topology.parse("2x2")
    with pytest.raises(TopologyError, match="has no node"):
        topology.index(coord)
    with pytest.raises(TopologyError, match="has no node"):
        topology.distance((0, 0), coord)
    with pytest.raises(TopologyError, match="no node 4"):
        topology.coord(4)
