"""Messages on the links of a torus: along each dimension in turn, by the shortest ways."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.collectives import Span
from meshsys.torus.topology import Topology

__all__ = ["busiest", "twisted_span"]


def busiest(topology: Topology, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> float:
    """The most messages over one link, one way, if each source [..., ndim] sends one to its target [..., ndim].

    A message that has several shortest ways takes all of them in equal parts. On faster links a message counts less.
    """
    at, goal = sources.reshape(-1, topology.ndim), targets.reshape(-1, topology.ndim)
    load = np.zeros((topology.ndim, 2, topology.size))
    for steps, part in topology.ways(at, goal):
        here = at.copy()
        for dim in range(topology.ndim):
            for way, direction in enumerate((1, -1)):
                ahead = np.where(part > 0, direction * steps[:, dim], 0)
                for hop in range(int(ahead.max(initial=0))):
                    going = ahead > hop
                    places = here[going]
                    places[:, dim] += direction * hop
                    index = np.ravel_multi_index(tuple(topology.node(places).T), topology.dims)
                    load[dim, way] += np.bincount(index, part[going], topology.size)
            here[:, dim] += steps[:, dim]
    return float((load.max((1, 2)) / np.array(topology.speeds)).max(initial=0.0))


def twisted_span(topology: Topology, sides: Mapping[int, int]) -> Span | None:
    """Boxes of nodes that are whole along all their dimensions and that a twist closes; None for others.

    Args:
        sides: by dimension, those above 1.
    """
    whole = tuple(sorted(sides))
    closed = all(side == topology.dims[dim] and topology.closes(dim, whole) for dim, side in sides.items())
    if not closed or all(topology.wrap[dim] for dim in whole):
        return None
    messages, hops = _exchange(topology, whole)
    return Span(tuple(topology.dims[dim] for dim in whole), (2.0,) * len(whole), hops, messages)


@lru_cache(maxsize=256)
def _exchange(topology: Topology, whole: tuple[int, ...]) -> tuple[float, int]:
    """An all-to-all in each box that is whole along some dimensions: the most messages over a link, the most hops.

    All nodes are alike, so that the links of one dimension carry what one node sends along it, half of it either way.
    """
    members = np.array([node for node in topology.coords() if not any(np.delete(node, whole))])
    ways = []
    for steps, part in topology.ways(np.zeros_like(members), members):
        inside = ~np.delete(steps, whole, 1).any(1)
        ways.append((np.abs(steps), part * inside))
    total = np.sum([part for _, part in ways], 0)
    load = np.sum([(steps * (part / total)[:, None]).sum(0) / 2 for steps, part in ways], 0)
    return float(load.max()), int(topology.distances(members[0], members).max())
