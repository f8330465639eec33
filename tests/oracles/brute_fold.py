"""Whether a shape can be laid on a box of a torus, by trying chips one after another.

What counting shows is not tried: too few neighbours, or too few chips of a colour of the chess board. The first
position has one chip of each kind that the box's symmetries leave, and each next position is one with many neighbours
in place.
"""

from __future__ import annotations

import itertools

Sides = tuple[int, ...]
Wraps = tuple[bool, ...]
Graph = dict[Sides, set[Sides]]


def edges(sides: Sides, wraps: Wraps) -> Graph:
    """The neighbours of each place of a mesh whose marked dimensions are rings."""
    near: Graph = {place: set() for place in itertools.product(*map(range, sides))}
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
    if _too_few(wanted, linked):
        return False
    positions = _in_touch(wanted)
    before = [[other for other in wanted[at] if other in positions[:place]] for place, at in enumerate(positions)]
    chip_of: dict[Sides, Sides] = {}
    used: set[Sides] = set()

    def go(index: int) -> bool:
        nonlocal steps
        if index == len(positions):
            return True
        steps -= 1
        at, placed = positions[index], [chip_of[other] for other in before[index]]
        choice = linked[placed[0]] - used if placed else kinds(box, box_wrap)
        for chip in sorted(choice, key=lambda chip: len(linked[chip] - used)):  # those that are soon cut off first
            if len(linked[chip]) < len(wanted[at]) or any(chip not in linked[one] for one in placed):
                continue
            chip_of[at] = chip
            used.add(chip)
            # Neighbours that are still to come need chips.
            if len(wanted[at]) - len(placed) <= len(linked[chip] - used) and go(index + 1):
                return True
            used.remove(chip)
            del chip_of[at]
            if steps < 0:
                return False
        return False

    found = go(0)
    return None if steps < 0 and not found else found


def _too_few(wanted: Graph, linked: Graph) -> bool:
    """Whether positions have more neighbours than chips have, or need more of one colour."""
    ours, theirs = (sorted(map(len, graph.values()), reverse=True) for graph in (wanted, linked))
    if any(mine > other for mine, other in zip(ours, theirs, strict=False)):
        return True
    colours, available = _colours(wanted), _colours(linked)
    if available is None:
        return False
    return colours is None or min(colours) > min(available) or max(colours) > max(available)


def _colours(graph: Graph) -> tuple[int, int] | None:
    """How many are black and white, where neighbours always differ."""
    black = {place for place in graph if sum(place) % 2 == 0}
    if any((place in black) == (other in black) for place in graph for other in graph[place]):
        return None
    return len(black), len(graph) - len(black)


def _in_touch(wanted: Graph) -> list[Sides]:
    """All positions, each next one with the most neighbours among those before it."""
    found: list[Sides] = []
    left = list(wanted)
    while left:
        after = max(left, key=lambda place: (len(wanted[place] & set(found)), -sum(place)))
        found.append(after)
        left.remove(after)
    return found


def kinds(box: Sides, box_wrap: Wraps) -> list[Sides]:
    """Of chips that mirrors, turns round rings and exchanges of like dimensions make the same, one each."""
    found = {}
    for chip in itertools.product(*map(range, box)):
        dims = sorted(
            (side, wrap, 0 if wrap else min(at, side - 1 - at))
            for at, side, wrap in zip(chip, box, box_wrap, strict=True)
        )
        found.setdefault(tuple(dims), chip)
    return list(found.values())
