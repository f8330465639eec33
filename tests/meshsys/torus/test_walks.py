from __future__ import annotations

import itertools
import math

import pytest

from meshsys.torus import Topology
from meshsys.torus.walks import walk

BOXES = [
    sizes
    for ndim in (1, 2, 3)
    for sizes in itertools.product(range(1, 6), repeat=ndim)
    if math.prod(sizes) <= 27 and list(sizes) == sorted(sizes)
]


def linked(a: tuple[int, ...], b: tuple[int, ...], sizes: tuple[int, ...], wraps: tuple[bool, ...]) -> bool:
    steps = [(abs(x - y), size, wrap) for x, y, size, wrap in zip(a, b, sizes, wraps, strict=True) if x != y]
    return len(steps) == 1 and all(step == 1 or (wrap and step == size - 1) for step, size, wrap in steps)


def ring_exists(sizes: tuple[int, ...], wraps: tuple[bool, ...]) -> bool:
    """All ways through the box, tried one by one."""
    nodes = list(itertools.product(*map(range, sizes)))
    near = {a: [b for b in nodes if linked(a, b, sizes, wraps)] for a in nodes}

    def go(way: list[tuple[int, ...]]) -> bool:
        if len(way) == len(nodes):
            return nodes[0] in near[way[-1]]
        return any(go([*way, node]) for node in near[way[-1]] if node not in way)

    return go([nodes[0]])


@pytest.mark.parametrize("sizes", BOXES, ids=str)
def test_walk(sizes: tuple[int, ...]) -> None:
    for order in set(itertools.permutations(sizes)):
        for wraps in itertools.product((False, True), repeat=len(sizes)):
            way = walk(order, wraps)
            assert sorted(way) == sorted(itertools.product(*map(range, order)))
            assert all(linked(a, b, order, wraps) for a, b in itertools.pairwise(way))
            if len(way) > 1 and not linked(way[-1], way[0], order, wraps) and len(way) <= 18:
                assert not ring_exists(order, wraps)


def test_a_walk_of_a_fake_torus_is_a_ring() -> None:
    for dims in ("2x2", "2x2x2", "3x3x3", "4x4", "5x7", "2x3x5"):
        topology = Topology.parse(dims)
        way = walk(topology.dims, topology.wrap)
        assert all(topology.distance(a, b) == 1 for a, b in itertools.pairwise([*way, way[0]]))
