"""Collectives message by message: bytes on each directed link of a torus, and the time of the busiest one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from scipy.optimize import linprog

from meshsys.torus import Topology

Node = tuple[int, ...]
Link = tuple[Node, int, int]
"""From a node along a dimension, up (1) or down (-1)."""
Message = tuple[Node, Node, float]


def links(topology: Topology, source: Node, target: Node) -> Iterator[tuple[Link, float]]:
    """The shortest way, dimension by dimension, and the part of a message that takes each link.

    Between opposite places of a ring it takes both ways by halves.
    """
    at = list(source)
    for dim, (room, wrap) in enumerate(zip(topology.dims, topology.wrap, strict=True)):
        up, down = (target[dim] - at[dim]) % room, (at[dim] - target[dim]) % room
        if not wrap:
            ways = [(1, up)] if target[dim] >= at[dim] else [(-1, down)]
        else:
            ways = [(1, up), (-1, down)] if up == down else [min((up, 1), (down, -1))[::-1]]
        for direction, hops in ways:
            place = list(at)
            for _ in range(hops):
                yield (tuple(place), dim, direction), 1 / len(ways)
                place[dim] = (place[dim] + direction) % room
        at[dim] = target[dim]


def loads(topology: Topology, messages: Iterable[Message]) -> Counter[Link]:
    """Bytes on each link; on a link that is faster than others they count less."""
    found: Counter[Link] = Counter()
    for source, target, size in messages:
        for link, part in links(topology, source, target):
            found[link] += size * part / topology.speeds[link[1]]
    return found


def all_to_all(groups: Sequence[Sequence[Node]], size: float) -> Iterator[Message]:
    """Each sends 1/N of its 1/N to each of its group."""
    for group in groups:
        for source, target in itertools.product(group, group):
            yield source, target, size / len(group) ** 2


def shift(groups: Sequence[Sequence[Node]], size: float, closed: bool) -> Iterator[Message]:
    """Each sends to the next of its group; the last one to the first, if it is closed."""
    for group in groups:
        for place in range(len(group) - (not closed)):
            yield group[place], group[(place + 1) % len(group)], size


def ring_gather(groups: Sequence[Sequence[Node]], size: float) -> Iterator[Message]:
    """An all-gather: halves of the pieces go round step by step, one half in each direction."""
    for group in groups:
        count = len(group)
        for _, place in itertools.product(range(count - 1), range(count)):
            for to in (place + 1, place - 1):
                yield group[place], group[to % count], size / count / 2


def box_gather(topology: Topology, groups: Sequence[Sequence[Node]], size: float, dims: Sequence[int]) -> Counter[Link]:
    """An all-gather over boxes, along one dimension after the other; what has been gathered goes on as one piece."""
    total: Counter[Link] = Counter()
    whole = len(groups[0])
    held = 1
    for dim in dims:
        lines = [sorted(line) for group in groups for line in _lines(group, dim)]
        side = len(lines[0])
        total += loads(topology, ring_gather(lines, size * held * side / whole))
        held *= side
    return total


def best_box_gather(topology: Topology, groups: Sequence[Sequence[Node]], size: float) -> float:
    """Bytes on the busiest link if parts of the array take the dimensions in all orders, and the parts are the best."""
    long = [dim for dim in range(topology.ndim) if len({node[dim] for node in groups[0]}) > 1]
    orders = [box_gather(topology, groups, size, order) for order in itertools.permutations(long)]
    used = sorted(set().union(*orders))
    # Minimize t, where each link's bytes, a mixture of its bytes in each order, are at most t.
    table = np.array([[order[link] for order in orders] + [-1.0] for link in used])
    found = linprog(
        c=[0.0] * len(orders) + [1.0],
        A_ub=table,
        b_ub=np.zeros(len(used)),
        A_eq=[[1.0] * len(orders) + [0.0]],
        b_eq=[1.0],
    )
    return float(found.fun)


def _lines(group: Sequence[Node], dim: int) -> Iterator[list[Node]]:
    def rest(node: Node) -> Node:
        return (*node[:dim], *node[dim + 1 :])

    for _, line in itertools.groupby(sorted(group, key=rest), key=rest):
        yield list(line)
