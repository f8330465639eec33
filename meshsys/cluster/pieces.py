"""Pieces of jobs within one cube, and the cube that each leaves best.

Leaving room: a piece should lie in a nook, so what counts is how many free chips it touches (`rim`), then how much
of the cube stays free. Breaking an empty cube costs more than anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.cubes import Cubes, mask_of, packed

__all__ = ["BROKEN", "Pieces", "View", "distinct"]

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

BROKEN = 1 << 24
"""Cost of breaking an empty cube; above any sum of other costs of a piece."""


class View:
    """The cubes of a pod at one moment.

    Attributes:
        partial: int64: cubes that are free in part.
        empty: int64: cubes that are free as a whole.
        kept: what others have found out about them.
    """

    def __init__(self, cubes: Cubes) -> None:
        self.cubes = cubes
        free = cubes.free
        self.partial = np.flatnonzero((free > 0) & (free < cubes.volume))
        self.empty = np.flatnonzero(free == cubes.volume)
        self.kept: dict[Any, Any] = {}


@dataclass(frozen=True, eq=False)
class Pieces:
    """Sets of places of a cube, any of which will do.

    Attributes:
        side: of the cube.
        masks: uint64 [pieces, words]: see `Cubes`.
        malus: int64 [pieces], 0 to 3: which of equally good pieces to prefer.
    """

    side: int
    masks: Words
    malus: Ints

    @cached_property
    def chips(self) -> Ints:
        return _count(self.masks)

    @cached_property
    def rims(self) -> Words:
        """The places that touch each piece."""
        return _grown(self.masks, self.side) & ~self.masks

    @cached_property
    def fresh(self) -> Ints:
        """Costs in an empty cube, without `BROKEN`: int64 [pieces]."""
        volume = self.side**3
        return self._cost(_count(self.rims), volume, self.chips, self.malus)

    def held(self, view: View, cubes: Ints) -> NDArray[np.bool_]:
        """Which pieces fit into which cubes: bool [pieces, cubes]."""
        words = view.cubes.words[cubes]
        if words.shape[1] == 1:
            return (words[:, 0] & self.masks) == self.masks
        return ((words[None] & self.masks[:, None]) == self.masks[:, None]).all(2)

    def costs(self, view: View, piece: Ints, cube: Ints) -> Ints:
        """Costs of pieces in cubes that they fit into: int64 [n], as each of the two."""
        rim = _count(self.rims[piece] & view.cubes.words[cube])
        return self._cost(rim, view.cubes.free[cube], self.chips[piece], self.malus[piece])

    def _cost(self, rim: Ints, free: Ints | int, chips: Ints, malus: Ints) -> Ints:
        return (rim * self.side**3 + free - chips) * 4 + malus

    def best(self, view: View, spare: bool) -> tuple[int, int, int] | None:
        """Cost, piece and cube of the piece that leaves most room; the cube is -1 for any empty one.

        Args:
            spare: whether an empty cube may be broken.
        """
        size = int(self.chips.min(initial=view.cubes.volume))
        cubes = view.partial[view.cubes.free[view.partial] >= size]
        if len(cubes):
            piece, column = np.nonzero(self.held(view, cubes))
            if len(piece):
                costs = self.costs(view, piece, cubes[column])
                at = int(costs.argmin())
                return int(costs[at]), int(piece[at]), int(cubes[column[at]])
        if spare:
            at = int(self.fresh.argmin())
            return BROKEN + int(self.fresh[at]), at, -1
        return None


def _count(words: Words) -> Ints:
    return np.bitwise_count(words).sum(-1, dtype=np.int64)


def _grown(masks: Words, side: int) -> Words:
    """With all neighbours in the cube."""
    if masks.shape[1] == 1:
        grown = masks.copy()
        for dim in range(3):
            step = np.uint64(side ** (2 - dim))
            lower, upper = _edges(side, dim)
            grown |= ((masks & ~upper) << step) | ((masks & ~lower) >> step)
        return grown
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : side**3]
    room = bits.reshape(-1, side, side, side).astype(bool)
    grown_room = room.copy()
    for dim in (1, 2, 3):
        up = (slice(None),) * dim + (slice(1, None),)
        down = (slice(None),) * dim + (slice(None, -1),)
        grown_room[up] |= room[down]
        grown_room[down] |= room[up]
    return packed(grown_room.reshape(len(masks), -1))


@lru_cache(16)
def _edges(side: int, dim: int) -> tuple[Words, Words]:
    """The lower and the upper face."""
    places = np.arange(side**3).reshape(side, side, side)
    lower, upper = (mask_of(places.take(at, dim).ravel().tolist(), side**3) for at in (0, side - 1))
    return lower, upper


def distinct(masks: Words) -> Ints:
    """Indices of the first of each mask."""
    keys = masks[:, 0] if masks.shape[1] == 1 else np.ascontiguousarray(masks).view(f"V{8 * masks.shape[1]}")[:, 0]
    return np.sort(np.unique(keys, return_index=True)[1])
