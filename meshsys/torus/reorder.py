"""A better order of devices for a measured or modelled cost between each pair.

Source: Cloud Collectives (arXiv 2105.14088): ranks are permuted until the links that a collective uses are the cheap
ones. Up to eight devices all orders are tried. Beyond, the best of all swaps, reversals and moves of short segments is
taken until none is better; then parts of the best order change places at random, or all do, and the same begins again.
What is returned is never worse than what was given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshsys.torus.topology import Topology

__all__ = ["order_cost", "pair_costs", "reorder"]

Matrix = NDArray[np.float64]
Orders = NDArray[np.int64]

_EXHAUSTIVE = 8  # devices
_SEGMENTS = 64  # devices up to which segments move
_CHUNK, _MOST = 1 << 21, 1 << 25  # entries of cost that are looked up at once, and for the reversals of one order


def pair_costs(topology: Topology) -> Matrix:
    """Hops between nodes in row-major order: float64 [size, size], a cost where none has been measured."""
    nodes = np.array(list(topology.coords()))
    return topology.distances(nodes[:, None], nodes[None]).astype(float)


def order_cost(cost: ArrayLike, order: Sequence[int], uses: ArrayLike | None = None) -> float:
    """What an order costs: the sum over pairs of positions of how much they send, times the cost between their devices.

    Args:
        cost: [devices, devices], from a device to another.
        order: devices by position.
        uses: [positions, positions], how much a position sends to another; by default one ring, each to the next.
    """
    table, places, sent = _checked(cost, order, uses)
    return float((sent * table[np.ix_(places, places)]).sum())


def reorder(
    cost: ArrayLike, order: Sequence[int], uses: ArrayLike | None = None, *, tries: int = 24, seed: int = 0
) -> tuple[int, ...]:
    """A permutation of `order` that costs less, by `order_cost`, or `order` itself.

    Args:
        cost: [devices, devices]; it need not be symmetric.
        order: the devices in use, by position; others may not take part.
        uses: [positions, positions]; by default one ring.
        tries: how often the search begins: with the given order, with the nearest device after each other, then with
            parts of the best that change places, or at random.
        seed: of these; with the same arguments the result is the same.

    Raises:
        ValueError: shapes that do not fit, a device that is twice in `order` or outside `cost`, or a cost that is no
            number.
    """
    table, places, sent = _checked(cost, order, uses)
    inside = table[np.ix_(places, places)]
    if len(places) <= _EXHAUSTIVE:
        every = np.array(list(itertools.permutations(range(len(places)))), np.int64)
        best = every[_totals(inside, sent, every).argmin()]
    else:
        best = _searched(inside, sent, tries, np.random.default_rng(seed))
    before, after = _totals(inside, sent, np.stack([np.arange(len(places)), best]))
    return tuple(places.tolist() if after >= before - _slack(before) else places[best].tolist())


def _checked(
    cost: ArrayLike, order: Sequence[int], uses: ArrayLike | None
) -> tuple[Matrix, NDArray[np.int64], Matrix]:
    table, places = np.asarray(cost, float), np.asarray(order, np.int64)
    if table.ndim != 2 or table.shape[0] != table.shape[1]:
        raise ValueError(f"cost of shape {table.shape} is no square; write one row and one column a device")
    if not np.all(np.isfinite(table)):
        raise ValueError("cost has entries that are no finite numbers; measure these pairs, or give them a large cost")
    if places.ndim != 1 or len(np.unique(places)) != len(places):
        raise ValueError(f"order={list(order)} names a device twice; name each once")
    if len(places) and not (0 <= places.min() and places.max() < len(table)):
        raise ValueError(f"order={list(order)} names a device that cost has not; it has 0 to {len(table) - 1}")
    sent = np.roll(np.eye(len(places)), 1, 1) if uses is None else np.asarray(uses, float)
    if sent.shape != (len(places), len(places)):
        raise ValueError(f"uses of shape {sent.shape} does not fit an order of {len(places)} devices")
    return table, places, sent * (1 - np.eye(len(places)))


def _searched(cost: Matrix, sent: Matrix, tries: int, random: np.random.Generator) -> Orders:
    total, best = _improved(cost, sent, np.arange(len(cost)))
    for number in range(1, tries):
        if number == 1:
            start = _nearest(cost)
        elif number % 2 == 0:
            start = random.permutation(len(cost))
        else:
            cuts = np.sort(random.choice(np.arange(1, len(cost)), 3, replace=False))
            first, second, third, fourth = np.split(best, cuts)
            start = np.concatenate([first, third, second, fourth])
        found, order = _improved(cost, sent, start)
        if found < total - _slack(total):
            total, best = found, order
    return best


def _nearest(cost: Matrix) -> Orders:
    """Each followed by the cheapest to reach of those that are left."""
    order, left = [0], set(range(1, len(cost)))
    while left:
        near = min(left, key=lambda device: (cost[order[-1], device], device))
        order.append(near)
        left.remove(near)
    return np.array(order)


def _improved(cost: Matrix, sent: Matrix, order: Orders) -> tuple[float, Orders]:
    """Takes the best swap while there is one, then the best of the other moves, until none is better."""
    total = float(_totals(cost, sent, order[None])[0])
    while True:
        gains = _swap_gains(cost[np.ix_(order, order)], sent)
        first, second = np.unravel_index(int(gains.argmin()), gains.shape)
        if gains[first, second] < -_slack(total):
            order = order.copy()
            order[[first, second]] = order[[second, first]]
            total = float(_totals(cost, sent, order[None])[0])
            continue
        best, chosen = total - _slack(total), None
        for moves in _moves(len(order), int(np.count_nonzero(sent))):
            orders = order[moves]
            totals = _totals(cost, sent, orders)
            place = int(totals.argmin())
            if totals[place] < best:
                best, chosen = float(totals[place]), orders[place]
        if chosen is None:
            return total, order
        total, order = best, chosen


def _slack(total: float) -> float:
    """What rounding can make of equal costs."""
    return 1e-9 * abs(total)


def _totals(cost: Matrix, sent: Matrix, orders: Orders) -> Matrix:
    """The costs of orders [count, positions]."""
    sources, targets = np.nonzero(sent)
    weight = sent[sources, targets]
    step = max(1, _CHUNK // max(1, len(weight)))
    parts = [orders[first : first + step] for first in range(0, len(orders), step)]
    return np.concatenate([cost[part[:, sources], part[:, targets]] @ weight for part in parts])


def _swap_gains(cost: Matrix, sent: Matrix) -> Matrix:
    """What the total changes by if two positions swap their devices: [positions, positions]; 0 on the diagonal."""
    cost = cost - np.diag(np.diag(cost))
    ways = sent.T @ cost + sent @ cost.T  # of one position's messages, if its device were another's
    own = np.diag(ways)
    return ways + ways.T - own[:, None] - own[None] + (sent + sent.T) * (cost + cost.T)


@lru_cache(maxsize=8)
def _moves(count: int, entries: int) -> tuple[Orders, ...]:
    """Reversals of a segment, the longest ones left out where they are too many, and moves of one to three devices."""
    longest = max(2, min(count, _MOST // (count * max(1, entries))))
    found = [_chunks(_reversals(count, longest), count)]
    if count <= _SEGMENTS:
        found.append(_chunks(_segments(count), count))
    return tuple(part for parts in found for part in parts)


def _reversals(count: int, longest: int) -> Iterator[list[int]]:
    for first in range(count):
        for last in range(first + 2, min(count, first + longest) + 1):
            yield [*range(first), *reversed(range(first, last)), *range(last, count)]


def _segments(count: int) -> Iterator[list[int]]:
    for length in (1, 2, 3):
        for first in range(count - length + 1):
            segment = list(range(first, first + length))
            rest = [*range(first), *range(first + length, count)]
            for place in range(len(rest) + 1):
                if place != first:
                    yield [*rest[:place], *segment, *rest[place:]]


def _chunks(moves: Iterator[list[int]], count: int) -> list[Orders]:
    step = max(1, _CHUNK // count)
    found = []
    while part := list(itertools.islice(moves, step)):
        found.append(np.array(part, np.int64))
    return found
