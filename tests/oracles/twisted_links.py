"""A twisted torus link by link, with no lattice: neighbours, shortest ways, messages, all-gathers in phases."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import numpy as np
from scipy.optimize import linprog

Node = tuple[int, ...]
Link = tuple[Node, int, int]
"""From a node along a dimension, up (1) or down (-1)."""


def step(shape: Node, node: Node, dim: int, direction: int) -> Node:
    """The neighbour; over the end of a short dimension it lies half the long dimensions further."""
    place = list(node)
    place[dim] += direction
    if not 0 <= place[dim] < shape[dim]:
        place[dim] %= shape[dim]
        if shape[dim] == min(shape):
            for other, side in enumerate(shape):
                if side > min(shape):
                    place[other] = (place[other] + side // 2) % side
    return tuple(place)


def nodes(shape: Node) -> list[Node]:
    return list(itertools.product(*map(range, shape)))


def hops_from(shape: Node, start: Node) -> dict[Node, int]:
    """Breadth first."""
    found = {start: 0}
    queue = [start]
    for node in queue:
        for dim, direction in itertools.product(range(len(shape)), (1, -1)):
            near = step(shape, node, dim, direction)
            if near not in found:
                found[near] = found[node] + 1
                queue.append(near)
    return found


def all_to_all(shape: Node) -> Counter[Link]:
    """Messages on each link: one from each node to each, over all shortest ways that go dimension by dimension."""
    loads: Counter[Link] = Counter()
    for source in nodes(shape):
        hops = hops_from(shape, source)
        far = max(hops.values())
        ways: dict[Node, list[list[Link]]] = defaultdict(list)
        for counts in itertools.product(range(-far, far + 1), repeat=len(shape)):
            if sum(map(abs, counts)) > far:
                continue
            at, way = source, []
            for dim, count in enumerate(counts):
                direction = 1 if count > 0 else -1
                for _ in range(abs(count)):
                    way.append((at, dim, direction))
                    at = step(shape, at, dim, direction)
            if len(way) == hops[at]:
                ways[at].append(way)
        for several in ways.values():
            for way in several:
                for link in way:
                    loads[link] += 1 / len(several)
    return loads


def all_gather(shape: Node, dims: tuple[int, ...]) -> float:
    """Pieces over the busiest link until all nodes of a box have the pieces of all; the box is whole along `dims`.

    Parts of the pieces take the dimensions in each order, and the parts are the best. Along a dimension each node gets
    what it lacks from the side where it is nearer.
    """
    orders = [_phases(shape, order) for order in itertools.permutations(dims)]
    links = sorted(set().union(*orders))
    table = np.array([[order[link] for order in orders] + [-1.0] for link in links])
    equal = [[1.0] * len(orders) + [0.0]]
    found = linprog([0.0] * len(orders) + [1.0], A_ub=table, b_ub=np.zeros(len(links)), A_eq=equal, b_eq=[1.0])
    return float(found.fun)


def _phases(shape: Node, order: tuple[int, ...]) -> Counter[Link]:
    loads: Counter[Link] = Counter()
    have = {node: {node} for node in nodes(shape)}
    for dim in order:
        after = {}
        for node in have:
            ring = [node]
            while (following := step(shape, ring[-1], dim, 1)) != node:
                ring.append(following)
            distance: dict[Node, dict[int, int]] = {}
            for direction, members in ((1, ring[:0:-1]), (-1, ring[1:])):  # what moves up comes from below
                for away, other in enumerate(members, 1):
                    for piece in have[other] - have[node]:
                        distance.setdefault(piece, {}).setdefault(direction, away)
            for near in distance.values():
                closest = [direction for direction, away in near.items() if away == min(near.values())]
                for direction in closest:
                    loads[(step(shape, node, dim, -direction), dim, direction)] += 1 / len(closest)
            after[node] = have[node] | distance.keys()
        have = after
    return loads
