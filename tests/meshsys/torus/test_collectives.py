"""Closed forms of collectives against the bytes on the busiest link, counted message by message."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from meshsys.torus import AXES, Placement, Topology, place
from meshsys.torus.axes import assign
from meshsys.torus.collectives import Span, all_gather, all_reduce, all_to_all, permute, reduce_scatter, ring
from meshsys.torus.generations import GENERATIONS, Chip
from meshsys.torus.groups import shift, span
from meshsys.torus.runs import where
from tests.oracles import link_loads

BYTE = Chip(flops=1, hbm=1, hbm_bandwidth=1, link_bandwidth=1, hop=0)  # a link takes a byte a second
TORI = ["8", "5", "1x8", "4x4", "8x8", "4x8", "2x4x4", "3x6", "4x4x4", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5p:2x2x2",
        "v5p:4x4x8", "ironwood:2x2x2", "v5e:8x16"]  # fmt: skip

PLACEMENTS = [
    ("8", {"data": 4, "tensor": 2}),
    ("8", {"data": 2, "tensor": 4}),
    ("4x4", {"data": 4, "tensor": 4}),
    ("4x4", {"pipe": 2, "data": 2, "tensor": 4}),
    ("8x8", {"data": 16, "tensor": 4}),
    ("8x8", {"pipe": 4, "data": 2, "tensor": 8}),
    ("v5e:4x4", {"fsdp": 4, "tensor": 4}),
    ("v5e:4x8", {"fsdp": 8, "tensor": 4}),
    ("v5e:4x8", {"fsdp": 2, "tensor": 16}),
    ("v5p:4x4x4", {"data": 8, "tensor": 8}),
    ("v5p:4x4x4", {"pipe": 4, "fsdp": 4, "tensor": 4}),
    ("v5p:4x4x4", {"data": 2, "tensor": 32}),
    ("v5p:4x4x4", {"pipe": 2, "fsdp": 8, "tensor": 4}),
    ("ironwood:2x2x1", {"data": 4, "tensor": 2}),
    ("ironwood:2x2x2", {"data": 2, "tensor": 8}),
    ("3x3", {"data": 9}),  # a ring, since it wraps around
    ("v5e:2x4", {"data": 7}),  # a snake
    ("2x3", {"pipe": 5}),
    ("5x3", {"pipe": 3, "tensor": 5}),
]


def groups_of(placement: Placement, axes: tuple[str, ...]) -> list[list[link_loads.Node]]:
    """The devices that differ along the axes, in the order of the mesh."""
    inside = [AXES.index(name) for name in AXES if name in axes]
    shape = -1, int(np.prod([placement.shape[axis] for axis in inside])), placement.topology.ndim
    nodes = np.moveaxis(placement.coords, inside, range(-1 - len(inside), -1)).reshape(shape)
    return [[tuple(map(int, node)) for node in group] for group in nodes]


def subsets(axes: dict[str, int]) -> list[tuple[str, ...]]:
    return [some for count in (1, 2) for some in itertools.combinations(axes, count)]


@cache
def whole(text: str) -> Placement:
    topology = Topology.parse(text)
    return place(topology, {"tensor": topology.size})


@pytest.mark.parametrize("text", TORI)
def test_all_to_all_over_a_torus(text):
    """By dimension-ordered shortest ways, with the busiest link as the time."""
    placement = whole(text)
    found = link_loads.loads(placement.topology, link_loads.all_to_all(groups_of(placement, ("tensor",)), 1e3))
    assert all_to_all(1e3, span(placement, ["tensor"], "all-to-all"), BYTE) == pytest.approx(max(found.values()))


@pytest.mark.parametrize("text", TORI)
def test_all_gather_over_a_torus(text):
    """All dimensions at once, by the best cut into orders of dimensions."""
    placement = whole(text)
    best = link_loads.best_box_gather(placement.topology, groups_of(placement, ("tensor",)), 1e3)
    assert all_gather(1e3, span(placement, ["tensor"]), BYTE) == pytest.approx(best)


@pytest.mark.parametrize(("text", "axes"), PLACEMENTS, ids=str)
def test_groups_of_a_placement(text, axes):
    """All groups at once, with the links that they share."""
    placement = place(Topology.parse(text), axes)
    topology = placement.topology
    for some in subsets(axes):
        groups = groups_of(placement, some)
        found = span(placement, some)
        sent = link_loads.loads(topology, link_loads.all_to_all(groups, 1e3))
        routed = span(placement, some, "all-to-all")
        if routed.size == np.prod([len({node[dim] for node in groups[0]}) for dim in range(topology.ndim)]):
            assert all_to_all(1e3, routed, BYTE) == pytest.approx(max(sent.values()))
            assert routed.hops == max(topology.distance(a, b) for group in groups for a in group for b in group)
        else:  # no box: along its own order, which is no shorter than the shortest way
            assert all_to_all(1e3, routed, BYTE) >= 0.999 * max(sent.values())
        if len(found.sides) == 1:
            # A ring: through a box by any walk, so the placement's own order can be worse for several axes.
            walked = max(link_loads.loads(topology, link_loads.ring_gather(groups, 1e3)).values())
            if len(some) == 1:
                assert all_gather(1e3, found, BYTE) == pytest.approx(walked)
            else:
                assert all_gather(1e3, found, BYTE) <= 1.001 * walked
        else:
            best = link_loads.best_box_gather(topology, groups, 1e3)
            assert all_gather(1e3, found, BYTE) == pytest.approx(best)


@pytest.mark.parametrize(("text", "axes"), PLACEMENTS, ids=str)
@pytest.mark.parametrize("closed", [False, True])
def test_shifts_of_a_placement(text, axes, closed):
    placement = place(Topology.parse(text), axes)
    topology = placement.topology
    for name in axes:
        messages = list(link_loads.shift(groups_of(placement, (name,)), 1.0, closed))
        hops, sharing = shift(placement, name, closed)
        assert hops == max(topology.distance(source, target) for source, target, _ in messages)
        assert sharing == pytest.approx(max(link_loads.loads(topology, messages).values()))
        assert permute(1.0, hops, BYTE, sharing) == pytest.approx(sharing)


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all"])
@pytest.mark.parametrize(("text", "axes"), PLACEMENTS[:-4], ids=str)
def test_the_search_knows_what_the_count_finds(text, axes, kind):
    topology = Topology.parse(text)
    placement = place(topology, axes)
    runs = dict(zip(axes, assign(topology, [(name, axes[name]) for name in AXES if name in axes]).runs, strict=True))
    for some in subsets(axes):
        expected = span(placement, some, kind)
        found = where([runs[name] for name in some], kind)
        assert (found.sides, found.hops) == (expected.sides, expected.hops)
        assert found.ways == pytest.approx(expected.ways)


def in_pieces(size: int, wrap: bool) -> float:
    """All-gather on one dimension: each tick a link takes a piece of one byte that its receiver lacks."""
    have = [{node} for node in range(size)]
    ticks = 0
    while any(len(pieces) < size for pieces in have):
        sent = []
        for node in range(size):
            for direction in (1, -1):
                if wrap or 0 <= node + direction < size:
                    other = (node + direction) % size
                    # What is farther along in this direction is nobody else's to bring.
                    pieces = [p for p in have[node] if p not in have[other] and _comes(p, other, direction, size, wrap)]
                    if pieces:
                        sent.append((other, max(pieces, key=lambda p: abs(p - other))))
        for other, piece in sent:
            have[other].add(piece)
        ticks += 1
    return ticks


def _comes(piece: int, node: int, direction: int, size: int, wrap: bool) -> bool:
    return not wrap or (direction * (node - piece)) % size <= -(-(size - 1) // 2)


@pytest.mark.parametrize(("size", "wrap"), [(2, False), (5, True), (9, True), (4, False), (7, False)])
def test_all_gather_is_a_walk_of_the_pieces(size, wrap):
    group = Span((size,), (2 if wrap else 1,), 0)
    assert all_gather(size, group, BYTE) == pytest.approx(in_pieces(size, wrap))


def test_the_scaling_books_forms():
    """Rings: V / W and V / 4W with W both directions; n axes divide by n; a line is half as fast."""
    v5p = GENERATIONS["v5p"].chip
    size, both = 1e9, 2 * v5p.link_bandwidth
    circle, line = ring(16, True, 1, 1), ring(16, False, 1, 1)
    cube = Span((16, 16, 16), (2, 2, 2), 24)
    assert all_gather(size, circle, v5p) == pytest.approx(size / both * 15 / 16)
    assert all_gather(size, line, v5p) == pytest.approx(2 * size / both * 15 / 16)
    assert all_gather(size, cube, v5p) == pytest.approx(size / both / 3, rel=1e-3)
    assert all_to_all(size, circle, v5p) == pytest.approx(size / both / 4)
    assert reduce_scatter(size, circle, v5p) == all_gather(size, circle, v5p) == all_reduce(size, circle, v5p) / 2
    assert all_gather(1, circle, v5p) == pytest.approx(8e-6)  # a short message takes its hops
    assert all_gather(1, line, v5p) == pytest.approx(15e-6)
    assert permute(9e10, 1, v5p) == pytest.approx(1) and permute(9e10, 0, v5p) == 0
    for form in (all_gather, all_reduce, reduce_scatter, all_to_all):
        assert form(size, Span((), (), 0), v5p) == 0


def test_a_hamiltonian_cycle_is_twice_a_line():
    """Four of 16 without a wraparound between them: a 2x2 block is a ring, four in a row are none."""
    block = span(place(Topology.parse("v5e:16x16"), {"data": 64, "tensor": 4}), ["tensor"])
    assert block == ring(4, True, 1, 1)
    assert all_gather(1e9, ring(4, False, 1, 1), BYTE) == 2 * all_gather(1e9, block, BYTE)


@pytest.mark.parametrize(
    ("topology", "axes", "asked", "expected"),
    [
        ("v5p:4x4x4", {"pipe": 4, "fsdp": 4, "tensor": 4}, ["tensor"], Span((4,), (2,), 2)),
        ("v5p:4x4x4", {"pipe": 4, "fsdp": 4, "tensor": 4}, ["pipe", "fsdp"], Span((4, 4), (2, 2), 4)),
        ("v5p:4x4x4", {"pipe": 4, "tensor": 16}, ["tensor"], Span((4, 4), (2, 2), 4)),
        ("v5e:4x4", {"fsdp": 4, "tensor": 4}, ["fsdp"], Span((4,), (1,), 3)),
        ("v5p:4x4x4", {"pipe": 64}, ["data"], Span((), (), 0)),
    ],
)
def test_span_of_axes(topology, axes, asked, expected):
    assert span(place(Topology.parse(topology), axes), asked) == expected


def test_axes_that_share_a_dimension_share_its_links():
    placement = place(Topology.parse("8"), {"data": 4, "tensor": 2})
    outer, inner = span(placement, ["data"]), span(placement, ["tensor"])
    assert sorted((outer.size, inner.size)) == [2, 4]
    assert span(placement, AXES) == Span((8,), (2,), 4)
    # Two rings of four over the same links, pairs that meet at both ends.
    assert outer.ways == (1,) and inner.ways == (1,)
