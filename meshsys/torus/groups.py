"""Where the groups of devices of a placement lie, whatever its order, and how they share the torus's links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.collectives import Span
from meshsys.torus.placement import Placement
from meshsys.torus.routes import busiest, twisted_span
from meshsys.torus.topology import Topology
from meshsys.torus.traffic import AXES, Flow, flow_seconds
from meshsys.torus.walks import walk

__all__ = ["seconds", "shift", "span"]


def span(placement: Placement, axes: Sequence[str], kind: str = "all-gather") -> Span:
    """Where the groups of devices lie that differ along these mesh axes alone; all of them work at once.

    An all-to-all takes all sides of groups that are boxes, and so do others where the boxes take whole dimensions of
    the torus. Otherwise these go round a ring: the best walk through a box, whatever the order of its devices is, or
    the order of devices that form none.
    """
    return _span(placement, tuple(name for name in AXES if name in axes), kind == "all-to-all")


def shift(placement: Placement, axis: str, closed: bool) -> tuple[int, float]:
    """Each position along an axis sends to the next.

    Args:
        closed: the last one sends to the first.

    Returns:
        The most hops of a message, and the most messages over one link.
    """
    line = np.moveaxis(placement.coords, AXES.index(axis), 0)
    after = np.roll(line, -1, 0)
    if not closed:
        line, after = line[:-1], after[:-1]
    topology = placement.topology
    return int(topology.distances(line, after).max(initial=0)), busiest(topology, line, after)


def seconds(placement: Placement, flow: Flow) -> float:
    """How long all runs of a flow's collective take, by the closed forms; the torus is one of a generation."""
    chip = placement.topology.chip
    assert chip is not None
    if flow.shifts:
        return flow_seconds(flow, shift(placement, flow.axes[0], flow.kind == "rotate"), chip)
    return flow_seconds(flow, span(placement, flow.axes, flow.kind), chip)


@lru_cache(maxsize=256)
def _span(placement: Placement, axes: tuple[str, ...], routed: bool) -> Span:
    topology = placement.topology
    inside = [AXES.index(name) for name in axes]
    groups = np.moveaxis(placement.coords, inside, range(-1 - len(inside), -1))
    size = math.prod(groups.shape[-1 - len(inside) : -1])
    nodes = groups.reshape(-1, size, topology.ndim)
    if size == 1:
        return Span((), (), 0)
    sides = _sides(nodes, topology)
    if sides is None:
        return _ring(nodes, topology)
    long = [dim for dim, side in enumerate(sides) if side > 1]
    if not routed and any(sides[dim] < topology.dims[dim] for dim in long):
        return _ring(_walked(nodes, sides, topology), topology)
    twisted = twisted_span(topology, {dim: sides[dim] for dim in long})
    if twisted is not None:
        return twisted
    ways, hops = [], 0
    for dim in long:
        lines = _lines(nodes, dim, sides[dim], topology)
        ways.append(_ways(lines, topology))
        hops += int(topology.distances(lines[:, :, None], lines[:, None]).max())
    return Span(tuple(sides[dim] for dim in long), tuple(ways), hops)


def _sides(nodes: NDArray[np.int64], topology: Topology) -> list[int] | None:
    """The sides of the groups [groups, size, ndim] where all are boxes of the same sides."""
    sides = []
    for dim, room in enumerate(topology.dims):
        held = np.zeros((len(nodes), room), bool)
        held[np.arange(len(nodes))[:, None], nodes[..., dim]] = True
        counts = held.sum(1)
        if counts.min() != counts.max():
            return None
        sides.append(int(counts[0]))
    return sides if math.prod(sides) == nodes.shape[1] else None


def _lines(nodes: NDArray[np.int64], dim: int, side: int, topology: Topology) -> NDArray[np.int64]:
    """The groups' lines along a dimension, in its order: [lines, side, ndim]."""
    last = [*(d for d in range(topology.ndim) if d != dim), dim]
    return _sorted(nodes, last, topology).reshape(-1, side, topology.ndim)


def _walked(nodes: NDArray[np.int64], sides: list[int], topology: Topology) -> NDArray[np.int64]:
    """Groups that are boxes, in the order of a walk through them."""
    box = _sorted(nodes, list(range(topology.ndim)), topology).reshape(-1, *sides, topology.ndim)
    round_ = []
    for dim, (side, room, wrap) in enumerate(zip(sides, topology.dims, topology.wrap, strict=True)):
        places = np.moveaxis(box[..., dim], dim + 1, -1)
        gaps = (np.roll(places, -1, -1) - places) % room
        round_.append(bool(wrap and side > 1 and np.all(gaps * side == room)))
    path = np.ravel_multi_index(tuple(np.array(walk(sides, round_)).T), tuple(sides))
    return box.reshape(nodes.shape)[:, path]


def _sorted(nodes: NDArray[np.int64], dims: list[int], topology: Topology) -> NDArray[np.int64]:
    """Each group's nodes, the last of `dims` running fastest."""
    keys = np.ravel_multi_index(tuple(np.moveaxis(nodes[..., dims], -1, 0)), tuple(topology.dims[dim] for dim in dims))
    return np.take_along_axis(nodes, np.argsort(keys, 1)[..., None], 1)


def _ways(lines: NDArray[np.int64], topology: Topology) -> float:
    """Halves go round in both directions: a line's last device sends back along it, so each link carries both."""
    after = np.roll(lines, -1, 1)
    both = np.concatenate([lines, after]), np.concatenate([after, lines])
    return 2 / busiest(topology, *both)


def _ring(nodes: NDArray[np.int64], topology: Topology) -> Span:
    size = nodes.shape[1]
    steps = int(topology.distances(nodes[:, 1:], nodes[:, :-1]).max())
    closed = size > 2 and int(topology.distances(nodes[:, -1], nodes[:, 0]).max()) <= steps
    return Span((size,), (_ways(nodes, topology),), steps * (size // 2 if closed else size - 1))
