"""A cube cut into equal slots, for jobs whose longest dimension walks from slot to slot and from cube to cube.

A job of shape L x (cross-section) puts one cross-section into each slot, and its long dimension is a path through
slots that are linked chip by chip. A cross-section of S chips lies along some dimensions of the cube. In a cube of 4
every dimension is a ring of 4 once its opposite ports are joined, that is a product of two lines of 2; so sections
of 1, 2, 4, 8 and 16 chips all leave no chip of a cube over:

    section             slots
    1                   4 x 4 x 4
    2                   4 x 4 x 2   the pairs 0,1 and 3,2 of a ring of 4
    4                   4 x 4       whole rings
    2 x 4               4 x 2
    4 x 4               4

Other cubes take sections of a chip, of whole lines of chips, and of whole layers.

A path goes on in the next cube through the faces of the dimensions that are not cut.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.walks import walk

__all__ = ["Slots", "slots_of"]

Ints = NDArray[np.int64]
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Slots:
    """One way to cut a cube.

    Attributes:
        side: of the cube.
        section: the box, with its wraparound, that the chips of a slot form.
        section_wrap: its wraparound.
        grid: slots along each dimension of the cube.
        through: the dimensions through whose faces a path can leave the cube.
        places: int64 [slots, chips of a slot]: places of the cube, as numbered in `Cubes`, row-major in both.
        orders: int64 [orders, slots]: snakes through all slots.
    """

    side: int
    section: Shape
    section_wrap: tuple[bool, ...]
    grid: Shape
    through: tuple[int, ...]
    places: Ints
    orders: Ints

    @property
    def count(self) -> int:
        return len(self.places)

    def opposite(self, slot: int, dim: int) -> int | None:
        """The slot at the same place of the opposite face; None if `slot` is at no face of this dimension."""
        place = list(np.unravel_index(slot, self.grid))
        if dim not in self.through or place[dim] not in (0, self.side - 1):
            return None
        place[dim] = self.side - 1 - place[dim]
        return int(np.ravel_multi_index(tuple(place), self.grid))

    def across(self, first: int, last: int) -> tuple[int, ...] | None:
        """A path from a slot to another through all slots of the cube."""
        return _across(self.grid, first, last)

    def port(self, slot: int) -> int | None:
        """The first dimension through which a path can leave whole cubes that lie in a row, and go on at this slot."""
        return _port(self, slot)


@lru_cache(1 << 14)
def _port(slots: Slots, slot: int) -> int | None:
    for dim in slots.through:
        opposite = slots.opposite(slot, dim)
        if opposite is not None and slots.across(slot, opposite) is not None:
            return dim
    return None


@lru_cache(64)
def slots_of(side: int, chips: int) -> tuple[Slots, ...]:
    """All ways to cut a cube into slots of so many chips that leave none over."""
    found = []
    for cut in itertools.product(("none", "half", "whole"), repeat=3):
        if "half" in cut and side != 4:
            continue
        section = {"none": 1, "half": 2, "whole": side}
        if math.prod(section[kind] for kind in cut) == chips and "none" in cut:
            if side == 4 and cut.count("half") > 1:
                continue  # two halves hold no more than one whole ring
            found.append(_cut(side, cut))
    return tuple(found)


def _cut(side: int, cut: tuple[str, ...]) -> Slots:
    grid = tuple({"none": side, "half": 2, "whole": 1}[kind] for kind in cut)
    section = tuple({"none": 1, "half": 2, "whole": side}[kind] for kind in cut)
    numbers = np.arange(side**3).reshape(side, side, side)
    places = np.empty((*grid, *section), np.int64)
    for slot in np.ndindex(*grid):
        for chip in np.ndindex(*section):
            at = []
            for kind, i, j in zip(cut, slot, chip, strict=True):
                at.append({"none": i, "half": 3 - j if i else j, "whole": j}[kind])
            places[(*slot, *chip)] = numbers[tuple(at)]
    kept = [dim for dim in range(3) if section[dim] > 1]
    return Slots(
        side=side,
        section=tuple(section[dim] for dim in kept),
        section_wrap=tuple(cut[dim] == "whole" and side > 2 for dim in kept),
        grid=grid,
        through=tuple(dim for dim in range(3) if cut[dim] == "none"),
        places=places.reshape(math.prod(grid), -1),
        orders=_snakes(grid),
    )


@lru_cache(64)
def _snakes(grid: Shape) -> Ints:
    """Snakes through a grid, fast dimension first or last, from any corner; no two the same."""
    numbers = np.arange(math.prod(grid)).reshape(grid)
    found: dict[bytes, Ints] = {}
    for order in itertools.permutations(range(3)):
        for flips in itertools.product((1, -1), repeat=3):
            view = numbers[tuple(slice(None, None, flip) for flip in flips)].transpose(order).copy()
            view[1::2] = view[1::2, ::-1]
            rows = view.reshape(-1, view.shape[-1])
            rows[1::2] = rows[1::2, ::-1]
            way = rows.ravel()
            key = min(way.tobytes(), way[::-1].tobytes())
            found.setdefault(key, way)
    return np.stack(list(found.values()))


@lru_cache(1 << 14)
def _across(grid: Shape, first: int, last: int) -> tuple[int, ...] | None:
    """By turns around each layer, or along it, there and back; otherwise by trying."""
    start, end = np.unravel_index(first, grid), np.unravel_index(last, grid)
    differ = [dim for dim in range(3) if start[dim] != end[dim]]
    if len(differ) == 1 and grid[differ[0]] % 2 == 0:
        dim = differ[0]
        layer = tuple(size for other, size in enumerate(grid) if other != dim)
        ring = walk(layer, (False, False))
        at = ring.index(tuple(int(place) for other, place in enumerate(start) if other != dim))
        closed = len(ring) > 2 and sum(abs(a - b) for a, b in zip(ring[0], ring[-1], strict=True)) == 1
        if closed or at in (0, len(ring) - 1):
            turn = ring[at:] + ring[:at] if closed or at == 0 else ring[::-1]
            way = []
            layers = range(grid[dim]) if start[dim] == 0 else range(grid[dim] - 1, -1, -1)
            for i, level in enumerate(layers):
                for place in turn if i % 2 == 0 else turn[::-1]:
                    way.append(int(np.ravel_multi_index((*place[:dim], level, *place[dim:]), grid)))
            return tuple(way)
    return _tried(grid, first, last) if math.prod(grid) <= 32 else None


def _tried(grid: Shape, first: int, last: int) -> tuple[int, ...] | None:
    places = list(np.ndindex(*grid))
    near = [
        [j for j, b in enumerate(places) if sum(abs(x - y) for x, y in zip(a, b, strict=True)) == 1] for a in places
    ]
    path, used = [first], {first}
    budget = 20_000

    def go() -> bool:
        nonlocal budget
        budget -= 1
        if len(path) == len(places):
            return path[-1] == last
        if budget < 0 or path[-1] == last:
            return False
        ways = [slot for slot in near[path[-1]] if slot not in used]
        for slot in sorted(ways, key=lambda slot: sum(other not in used for other in near[slot])):
            path.append(slot)
            used.add(slot)
            if go():
                return True
            used.remove(path.pop())
        return False

    return tuple(path) if go() else None
