from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshsys.jax_order import jax_order
from meshsys.torus import Flow, Topology, TopologyError, pair_costs, place
from meshsys.torus.collectives import all_gather, all_to_all
from meshsys.torus.generations import Chip
from meshsys.torus.groups import seconds, span
from meshsys.torus.routes import busiest
from tests.oracles import twisted_links

BYTE = Chip(flops=1, hbm=1, hbm_bandwidth=1, link_bandwidth=1, hop=0)  # a link takes a byte a second
TWISTED = ["2x2x4_twisted", "2x4x4_twisted", "3x3x6_twisted", "6x3x6_twisted", "v4:4x4x8_twisted", "v5p:4x8x8_twisted"]


@pytest.mark.parametrize("text", TWISTED)
def test_neighbours_and_distances(text: str) -> None:
    topology = Topology.parse(text)
    assert str(topology) == text and Topology.parse(text.upper()) == topology
    costs = pair_costs(topology)
    for place_, node in enumerate(twisted_links.nodes(topology.shape)):
        ways = itertools.product(range(3), (1, -1))
        assert set(topology.neighbours(node)) == {twisted_links.step(topology.shape, node, *way) for way in ways}
        hops = twisted_links.hops_from(topology.shape, node)
        assert costs[place_].tolist() == [hops[other] for other in twisted_links.nodes(topology.shape)]


@pytest.mark.parametrize("k", [2, 4, 6])
def test_every_direction_is_alike(k: int) -> None:
    """The diameter is 3k / 2, and as many nodes are near a node's neighbour along one dimension as along another."""
    for shape in ((k, k, 2 * k), (k, 2 * k, 2 * k)):
        topology = Topology(shape, twisted=True)
        nodes = np.array(list(topology.coords()))
        assert topology.distances(nodes[0], nodes).max() == 3 * k // 2
        seen = []
        for aside in np.eye(3, dtype=np.int64):
            both = zip(topology.distances(nodes[0], nodes), topology.distances(aside, nodes), strict=True)
            seen.append(sorted((int(a), int(b)) for a, b in both))
        assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(("text", "gain"), [("4x4x8", 1.745), ("4x8x8", 1.391)])
def test_all_to_all(text: str, gain: float) -> None:
    """Against messages counted one by one. The paper measured 1.63 and 1.31 times the plain torus's throughput."""
    plain, twisted = (Topology.parse(f"v4:{text}{twist}") for twist in ("", "_twisted"))
    loads = twisted_links.all_to_all(twisted.shape)
    assert max(loads.values()) == pytest.approx(min(loads.values()))
    nodes = np.array(list(twisted.coords()))
    assert busiest(twisted, *np.broadcast_arrays(nodes[:, None], nodes[None])) == pytest.approx(max(loads.values()))
    times = []
    for topology in (plain, twisted):
        over = span(place(topology, {"tensor": topology.size}), ["tensor"], "all-to-all")
        assert over.hops == topology.distances(nodes[0], nodes).max()
        times.append(all_to_all(topology.size**2, over, BYTE))
    assert times[1] == pytest.approx(max(loads.values()))
    assert times[0] / times[1] == pytest.approx(gain, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "dims", "links"),
    [
        ("2x2x4_twisted", (0, 1, 2), 6),
        ("v4:4x4x8_twisted", (0, 1, 2), 6),
        ("v4:4x4x8_twisted", (0, 2), 4),  # a short dimension with the long one is a twisted sheet
        ("v4:4x4x8_twisted", (2,), 2),
        ("2x4x4_twisted", (0, 1, 2), 6),
        ("2x4x4_twisted", (1, 2), 4),
    ],
)
def test_all_gather(text: str, dims: tuple[int, ...], links: int) -> None:
    """All links into a node bring parts of what it lacks, and nothing twice."""
    topology = Topology.parse(text)
    sizes = [topology.dims[dim] for dim in dims]
    axes = {"tensor": int(np.prod(sizes)), "data": topology.size // int(np.prod(sizes))}
    placement = place(topology, axes, [Flow("all-gather", ("tensor",), 1e9)])
    found = all_gather(axes["tensor"], span(placement, ["tensor"]), BYTE)
    assert found == pytest.approx((axes["tensor"] - 1) / links)
    assert found == pytest.approx(twisted_links.all_gather(topology.shape, dims))


def test_a_short_dimension_alone_is_a_line() -> None:
    topology = Topology.parse("v4:4x4x8_twisted")
    assert topology.wrap == (False, False, True)
    assert topology.closes(0, {0, 2}) and not topology.closes(0, {0, 1}) and topology.closes(2, set())
    body = Topology.parse("v4:4x8x8_twisted")
    assert body.wrap == (False, True, True)
    assert body.closes(0, {0, 1, 2}) and not body.closes(0, {0, 1})


@pytest.mark.parametrize("shape", ["4x4x8", "4x8x8"])
@pytest.mark.parametrize("tensor", [4, 8, 16, 32, 64])
def test_axes_are_laid_no_worse_than_jax_lays_them(shape: str, tensor: int) -> None:
    topology = Topology.parse(f"v4:{shape}_twisted")
    axes = {"data": topology.size // tensor, "tensor": tensor}
    flows = [Flow("all-reduce", ("data",), 4e9), Flow("all-reduce", ("tensor",), 64e6, 128)]
    ours, theirs = place(topology, axes, flows), jax_order(topology, axes)
    if not isinstance(theirs, str):
        times = [sum(seconds(placement, flow) for flow in flows) for placement in (ours, theirs)]
        assert times[0] <= times[1] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4x4x4_twisted", "k x k x 2k"),
        ("v4:4x4x16_twisted", "cannot be twisted"),
        ("v4:2x2x4_twisted", "k a multiple of 4"),
        ("8x16_twisted", "k x 2k x 2k chips, as in 4x4x8"),
        ("1x1x2_twisted", "cannot be twisted"),
        ("v5e:8x16_twisted", "v5e slices have no twist; leave out _twisted"),
        ("ironwood:4x4x8_twisted", "ironwood slices have no twist"),
        ("v4:3x3x6_twisted", "not a shape of v4 slices"),
        ("4x4x8_twist", "is not a torus"),
        ("4x4x8 twisted", "is not a torus"),
    ],
)
def test_what_cannot_be_twisted(text: str, says: str) -> None:
    with pytest.raises(TopologyError) as error:
        Topology.parse(text, "--topology")
    assert str(error.value).startswith("--topology=")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
