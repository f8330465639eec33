"""Which collectives bring every unit to its place: the fewest that move no unit twice and none in vain.

Shapes: N devices, G of a group, C units that each sends to each, T units of a destination block.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshsys.reshard.geometry import Geometry

__all__ = ["Exchange", "Route", "route"]


@dataclass(frozen=True, eq=False)
class Exchange:
    """One collective.

    Attributes:
        groups: of devices; of an all-to-all and an all-gather they cover all, of a ppermute they are (from, to).
        send: units of the source block that a device puts in, int [N, G C] of an all-to-all (by receiver), else [N, C].
        received: rows of what comes out: G C, or C of a ppermute.
    """

    kind: Literal["all_to_all", "all_gather", "ppermute"]
    groups: tuple[tuple[int, ...], ...]
    send: np.ndarray
    received: int

    @property
    def moved_units(self) -> int:
        """Units that cross from one device to another, over all devices."""
        units = self.send.shape[1]
        if self.kind == "ppermute":
            return len(self.groups) * units
        size = len(self.groups[0])
        each = units // size if self.kind == "all_to_all" else units
        return len(self.groups) * size * (size - 1) * each


@dataclass(frozen=True, eq=False)
class Route:
    """How an array moves.

    Attributes:
        pick: the rows of a destination block, int [N, T]: what the exchanges bring, one after another, then the
            device's own units, then one row of zeros.
    """

    exchanges: tuple[Exchange, ...]
    pick: np.ndarray

    @property
    def moved_units(self) -> int:
        return sum(exchange.moved_units for exchange in self.exchanges)

    @property
    def kind(self) -> str:
        """In words: "all_to_all", "ppermute x3", "slice" where nothing is sent."""
        counts = Counter(exchange.kind for exchange in self.exchanges)
        return " + ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in counts.items()) or "slice"


def route(geometry: Geometry) -> Route:
    """An all-gather where all of a group get the same; else an all-to-all as far as all send each other the same
    number of units; the rest in rounds, in which a device sends to one and receives from one."""
    sender, place, own_units = geometry.sender, geometry.place, math.prod(geometry.source_grid)
    devices = len(sender)
    slots: dict[tuple[int, int], list[int]] = defaultdict(list)
    for receiver, row in enumerate(sender):
        for slot, one in enumerate(row):
            if one >= 0:
                slots[int(one), receiver].append(slot)
    pairs = {pair: wanted for pair, wanted in slots.items() if pair[0] != pair[1]}
    pick = np.where(sender < 0, -1, -2)  # -2: not there yet
    exchanges: list[Exchange] = []
    rows = 0

    groups = _groups(pairs, devices)
    count = min((len(pairs.get((a, b), ())) for group in groups for a in group for b in group if a != b), default=0)
    if count:
        size = len(groups[0])
        gather = _all_get_the_same(groups, slots, place, count)
        through = gather or all(len(slots.get((device, device), ())) == count for device in range(devices))
        send = np.zeros((devices, size, count), int)
        for group in groups:
            for a in group:
                for k, b in enumerate(group):
                    if a != b or through:
                        taken = [slots[a, b].pop(0) for _ in range(count)]
                        send[a, k] = place[b, taken]
                        first = group.index(a) * count
                        pick[b, taken] = rows + np.arange(first, first + count)
        send = send[:, 0] if gather else send.reshape(devices, size * count)
        exchanges.append(Exchange("all_gather" if gather else "all_to_all", groups, send, size * count))
        rows += size * count
    while pairs := {pair: wanted for pair, wanted in slots.items() if pair[0] != pair[1] and wanted}:
        chosen = _matching(pairs)
        count = min(len(pairs[pair]) for pair in chosen)
        send = np.zeros((devices, count), int)
        for a, b in chosen:
            taken = [slots[a, b].pop(0) for _ in range(count)]
            send[a] = place[b, taken]
            pick[b, taken] = rows + np.arange(count)
        exchanges.append(Exchange("ppermute", tuple(chosen), send, count))
        rows += count
    pick = np.where(pick == -2, rows + place, pick)
    pick = np.where(pick == -1, rows + own_units, pick)
    return Route(tuple(exchanges), pick)


def _groups(pairs: dict[tuple[int, int], list[int]], devices: int) -> tuple[tuple[int, ...], ...]:
    """The devices that send each other anything, directly or not; none unless all groups have the same size."""
    group = list(range(devices))
    for a, b in pairs:
        old, new = sorted((group[a], group[b]), reverse=True)
        if old != new:
            group = [new if one == old else one for one in group]
    found: dict[int, list[int]] = {}
    for device, one in enumerate(group):
        found.setdefault(one, []).append(device)
    return tuple(map(tuple, found.values())) if len({len(one) for one in found.values()}) == 1 else ()


def _all_get_the_same(
    groups: tuple[tuple[int, ...], ...], slots: dict[tuple[int, int], list[int]], place: np.ndarray, count: int
) -> bool:
    for group in groups:
        for a in group:
            sent = {tuple(place[b, slots.get((a, b), [])]) for b in group}
            if len(sent) > 1 or len(sent.pop()) != count:
                return False
    return True


def _matching(pairs: dict[tuple[int, int], list[int]]) -> list[tuple[int, int]]:
    """Pairs with every device once as sender and once as receiver, the busiest devices first."""
    sends, receives = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for a, b in sorted(pairs, key=lambda pair: (-max(sends[pair[0]], receives[pair[1]]), pair)):
        if a not in chosen and b not in taken:
            chosen[a] = b
            taken.add(b)
    return sorted(chosen.items())
