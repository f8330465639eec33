from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshsys.cluster.folds import check_embedding
from meshsys.cluster.slots import Slots, slots_of

ALL = [
    slots
    for side, chips in ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (4, 8), (4, 16), (8, 8), (8, 64))
    for slots in slots_of(side, chips)
]


def linked(slots: Slots, one: int, other: int) -> bool:
    """Chip by chip; the dimensions of a section are closed by the cube's own ports."""
    for a, b in zip(slots.places[one], slots.places[other], strict=True):
        at, to = (np.unravel_index(place, (slots.side,) * 3) for place in (a, b))
        apart = [(dim, abs(int(x) - int(y))) for dim, (x, y) in enumerate(zip(at, to, strict=True)) if x != y]
        closed = [dim for dim in range(3) if dim not in slots.through]
        if len(apart) != 1 or not (apart[0][1] == 1 or (apart[0][1] == slots.side - 1 and apart[0][0] in closed)):
            return False
    return True


@pytest.mark.parametrize("slots", ALL, ids=lambda slots: f"{slots.side}:{'x'.join(map(str, slots.grid))}")
def test_snakes_and_ways_across(slots: Slots) -> None:
    assert sorted(slots.places.ravel()) == list(range(slots.side**3))
    for order in slots.orders:
        assert sorted(order) == list(range(slots.count))
        assert all(linked(slots, a, b) for a, b in itertools.pairwise(order))
    for slot in range(slots.count):
        dim = slots.port(slot)
        if dim is None:
            continue
        last = slots.opposite(slot, dim)
        assert last is not None
        way = slots.across(slot, last)
        assert way is not None and (way[0], way[-1]) == (slot, last)
        assert sorted(way) == list(range(slots.count))
        assert all(linked(slots, a, b) for a, b in itertools.pairwise(way))
        ends = [np.unravel_index(slots.places[at], (slots.side,) * 3) for at in (slot, last)]
        for other in range(3):  # the same place of opposite faces, for every chip
            apart = abs(ends[0][other] - ends[1][other])
            assert np.all(apart == (slots.side - 1 if other == dim else 0))


@pytest.mark.parametrize("slots", ALL, ids=lambda slots: f"{slots.side}:{'x'.join(map(str, slots.grid))}")
def test_the_chips_of_a_slot_are_a_box(slots: Slots) -> None:
    sides = slots.section or (1,)
    for chips in slots.places:
        places = np.stack(np.unravel_index(chips, (slots.side,) * 3), -1).reshape(*sides, 3)
        closed = tuple(dim not in slots.through for dim in range(3))
        wrap = slots.section_wrap or (False,)
        assert check_embedding(sides, wrap, (slots.side,) * 3, closed, places)
