"""Closed forms of collectives against the bytes on the busiest link, counted message by message."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from meshsys.torus import AXES, Topology, place
from meshsys.torus.collectives import (
    Span,
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
    span,
)
from meshsys.torus.generations import GENERATIONS, Chip

BYTE = Chip(flops=1, hbm=1, hbm_bandwidth=1, link_bandwidth=1, hop=0)  # a link takes a byte a second
BOXES = [((8,), True), ((8,), False), ((5,), True), ((5,), False), ((4, 4), True), ((8, 8), True), ((4, 4, 8), True),
         ((2, 4, 4), False), ((3, 6), False)]  # fmt: skip


def busiest_link(sides: tuple[int, ...], wrap: bool) -> float:
    """All-to-all of one byte a pair, dimension by dimension on shortest ways; a tie goes both ways by halves."""
    load: Counter = Counter()
    nodes = list(itertools.product(*map(range, sides)))
    for source, target in itertools.product(nodes, nodes):
        at = list(source)
        for dim, side in enumerate(sides):
            step = target[dim] - at[dim]
            ways = [(1, abs(step))] if step >= 0 else [(-1, abs(step))]
            if wrap:
                ahead = step % side
                ways = [(1, ahead)] if ahead < side - ahead else [(-1, side - ahead)]
                ways = [(1, ahead), (-1, ahead)] if 2 * ahead == side else ways
            for direction, hops in ways:
                place = list(at)
                for _ in range(hops):
                    load[tuple(place), dim, direction] += 1 / len(ways)
                    place[dim] = (place[dim] + direction) % side
            at[dim] = target[dim]
    return max(load.values())


@pytest.mark.parametrize(("sides", "wrap"), BOXES)
def test_all_to_all_is_the_busiest_link(sides, wrap):
    group = Span(sides, (wrap,) * len(sides), (1,) * len(sides))
    assert all_to_all(group.size**2, group, BYTE) == pytest.approx(busiest_link(sides, wrap))


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
    group = Span((size,), (wrap,), (1,))
    assert all_gather(size, group, BYTE) == pytest.approx(in_pieces(size, wrap))


def test_the_scaling_books_forms():
    """Rings: V / W and V / 4W with W both directions; n axes divide by n; a line is half as fast."""
    v5p = GENERATIONS["v5p"].chip
    size, both = 1e9, 2 * v5p.link_bandwidth
    ring, line = Span((16,), (True,), (1,)), Span((16,), (False,), (1,))
    cube = Span((16, 16, 16), (True,) * 3, (1,) * 3)
    assert all_gather(size, ring, v5p) == pytest.approx(size / both * 15 / 16)
    assert all_gather(size, line, v5p) == pytest.approx(2 * size / both * 15 / 16)
    assert all_gather(size, cube, v5p) == pytest.approx(size / both / 3, rel=1e-3)
    assert all_to_all(size, ring, v5p) == pytest.approx(size / both / 4)
    assert reduce_scatter(size, ring, v5p) == all_gather(size, ring, v5p) == all_reduce(size, ring, v5p) / 2
    assert all_gather(1, ring, v5p) == pytest.approx(8e-6)  # a short message takes its hops
    assert permute(9e10, 1, v5p) == pytest.approx(1) and permute(9e10, 0, v5p) == 0
    for form in (all_gather, all_reduce, reduce_scatter, all_to_all):
        assert form(size, Span((), (), ()), v5p) == 0


@pytest.mark.parametrize(
    ("topology", "axes", "asked", "expected"),
    [
        ("v5p:4x4x4", {"pipe": 4, "fsdp": 4, "tensor": 4}, ["tensor"], Span((4,), (True,), (1,))),
        ("v5p:4x4x4", {"pipe": 4, "fsdp": 4, "tensor": 4}, ["pipe", "fsdp"], Span((4, 4), (True, True), (1, 1))),
        ("v5p:4x4x4", {"pipe": 4, "tensor": 16}, ["tensor"], Span((4, 4), (True, True), (1, 1))),
        ("v5e:4x4", {"fsdp": 4, "tensor": 4}, ["fsdp"], Span((4,), (False,), (1,))),
        ("v5p:4x4x4", {"pipe": 64}, ["data"], Span((), (), ())),
    ],
)
def test_span_of_axes(topology, axes, asked, expected):
    assert span(place(Topology.parse(topology), axes), asked) == expected


def test_axes_that_share_a_dimension_share_its_links():
    placement = place(Topology.parse("8"), {"data": 4, "tensor": 2})
    outer, inner = span(placement, ["data"]), span(placement, ["tensor"])
    assert sorted((outer.size, inner.size)) == [2, 4]
    assert span(placement, AXES) == Span((8,), (True,), (1,))
    assert max(outer.strides + inner.strides) > 1
