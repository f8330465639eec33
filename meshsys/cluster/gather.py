"""Chains through what is left in many cubes in part use, where whole cubes are too few."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.chains import Chain
from meshsys.cluster.pieces import View
from meshsys.cluster.slots import Slots

__all__ = ["gather"]

Ints = NDArray[np.int64]

_STARTS = 4  # pieces that a chain may begin with, the longest ones
_ENDS = 4  # how much earlier than it could a piece may end, to go on better
_LEAST = 2  # chips below which a piece is not worth a cube


@lru_cache(64)
def _both_ways(slots: Slots) -> tuple[Ints, Ints]:
    """Snakes forwards and backwards, int64 [2 * snakes, slots], and where they have a slot, int64 [slots, 2 * snakes].

    The latter counts from the first slots of all snakes over their second ones to the last.
    """
    orders = np.concatenate([slots.orders, slots.orders[:, ::-1]])
    return orders, np.argsort(orders, 1).T * len(orders) + np.arange(len(orders))


@lru_cache(1 << 14)
def _exits(slots: Slots, slot: int) -> tuple[tuple[int, int], ...]:
    """The dimensions through which a path can leave the cube at a slot, and where it goes on in the next."""
    found = ((dim, slots.opposite(slot, dim)) for dim in slots.through)
    return tuple((dim, there) for dim, there in found if there is not None)


class _Runs:
    """The longest run along a snake from each slot of each cube in part use.

    Attributes:
        length: int64 [slots, cubes].
    """

    def __init__(self, free: NDArray[np.bool_], slots: Slots) -> None:
        self._orders, rows = _both_ways(slots)
        cubes = len(free)
        # Rows of cubes, as the loop goes from the ends of all snakes to their starts.
        along = free.T.astype(np.min_scalar_type(slots.count))[self._orders.T].reshape(slots.count, -1)
        for at in range(slots.count - 2, -1, -1):
            along[at] *= along[at + 1] + 1
        self._by_slot = along.reshape(-1, cubes)[rows]  # [slots, 2 * snakes, cubes]
        self.length = self._by_slot.max(1).astype(np.int64)

    def path(self, cube: int, slot: int, count: int) -> list[int]:
        """The first slots of the run."""
        order = self._orders[int(self._by_slot[slot, :, cube].argmax())]
        at = int((order == slot).argmax())
        path: list[int] = order[at : at + count].tolist()
        return path


def gather(view: View, chain: Chain) -> Ints | None:
    """Chips for a chain of as many whole cubes as there are, and pieces of others joined at the same places.

    Greedy: each piece is the longest that can be joined to the one before.
    """
    slots = chain.slots
    whole = view.empty[: chain.whole].tolist()
    need = chain.length - len(whole) * slots.count
    if need <= 0 or view.cubes.free[view.partial].sum() < need * slots.places.shape[1]:
        return None
    if slots not in view.kept:
        bits = np.unpackbits(view.cubes.words[view.partial].view(np.uint8), axis=1, bitorder="little")
        view.kept[slots] = _Runs(bits[:, slots.places].all(2), slots)
    runs = view.kept[slots]
    if int(runs.length.max(0).sum()) < need:
        return None
    starts = runs.length.copy()
    if whole:
        starts[[slot for slot in range(slots.count) if slots.port(slot) is None]] = 0
    longest = starts.max(0)
    for cube in np.argsort(-longest, kind="stable")[:_STARTS].tolist():
        if longest[cube] < 1:
            break
        slot = int(starts[:, cube].argmax())
        pieces = _greedy(runs, slots, cube, slot, slots.port(slot) if whole else None, need)
        if pieces is not None:
            placed = [(int(view.partial[cube]), path) for cube, path in pieces]
            return chain.along_path(view.cubes, whole, placed)
    return None


def _greedy(
    runs: _Runs, slots: Slots, cube: int, slot: int, entered: int | None, need: int
) -> list[tuple[int, list[int]]] | None:
    """Pieces that begin at a slot, which the chain enters through a dimension's port."""
    left = runs.length.copy()
    least = -(-_LEAST // slots.places.shape[1])
    pieces: list[tuple[int, list[int]]] = []
    while True:
        most = int(runs.length[slot, cube])
        if most >= need:
            return [*pieces, (cube, runs.path(cube, slot, need))]
        path = runs.path(cube, slot, most)
        left[:, cube] = 0
        others = left.argmax(1)
        lengths = left[np.arange(len(left)), others].tolist()
        best = (0, 0, 0, 0, 0)
        for count in range(most, max(0, most - _ENDS), -1):
            for dim, there in _exits(slots, path[count - 1]):
                if count == 1 and dim == entered:  # that port is in use
                    continue
                if lengths[there] >= least:
                    best = max(best, (count + min(lengths[there], need - count), count, int(others[there]), there, dim))
        if not best[0]:
            return None
        _, count, other, there, entered = best
        pieces.append((cube, path[:count]))
        need -= count
        cube, slot = other, there
