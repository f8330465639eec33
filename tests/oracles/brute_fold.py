"""Whether a shape can be laid on a box of a torus, by trying chips one after another."""

from __future__ import annotations

import itertools

Sides = tuple[int, ...]
Wraps = tuple[bool, ...]


def edges(sides: Sides, wraps: Wraps) -> dict[Sides, set[Sides]]:
    """The neighbours of each place of a mesh whose marked dimensions are rings."""
    near: dict[Sides, set[Sides]] = {place: set() for place in itertools.product(*map(range, sides))}
    for place in near:
        for dim, side in enumerate(sides):
            after = place[dim] + 1
            if after < side or wraps[dim]:
                other = (*place[:dim], after % side, *place[dim + 1 :])
                if other != place:
                    near[place].add(other)
                    near[other].add(place)
    return near


def brute_fold(shape: Sides, wrap: Wraps, box: Sides, box_wrap: Wraps, steps: int = 10**9) -> bool | None:
    """Whether there is a fold; None if it has not been decided after so many steps."""
    wanted, linked = edges(shape, wrap), edges(box, box_wrap)
    positions = list(wanted)
    chip_of: dict[Sides, Sides] = {}

    def go(index: int) -> bool:
        nonlocal steps
        if index == len(positions):
            return True
        steps -= 1
        placed = [chip_of[other] for other in wanted[positions[index]] if other in chip_of]
        for chip in linked[placed[0]] if placed else linked:
            if chip not in chip_of.values() and all(chip in linked[other] for other in placed):
                chip_of[positions[index]] = chip
                if go(index + 1):
                    return True
                del chip_of[positions[index]]
                if steps < 0:
                    return False
        return False

    found = go(0)
    return None if steps < 0 and not found else found
