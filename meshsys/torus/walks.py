"""Walks through a box of a torus in which every step is one link, closed to a ring where one exists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

__all__ = ["closes", "walk"]


def walk(sizes: Sequence[int], wraps: Sequence[bool]) -> list[tuple[int, ...]]:
    """Visits every place of a box once, neighbour after neighbour.

    It returns to a neighbour of its start whenever that is possible: where a dimension has even length
    (and another is longer than 1), or where one wraps around.

    Args:
        sizes: the box.
        wraps: for each dimension whether its last place is a neighbour of its first.
    """
    long = [dim for dim, size in enumerate(sizes) if size > 1]
    even = [dim for dim in long if sizes[dim] % 2 == 0]
    # An even number of rows closes any comb; failing that the comb closes if what it is made of does.
    order = sorted(long, key=lambda dim: (dim in even[-1:], not wraps[dim]))
    path = [(0,) * len(sizes)]
    for dim in order:
        path = _comb(path, dim, sizes[dim])
    return path


@lru_cache(maxsize=4096)
def closes(sizes: tuple[int, ...], wraps: tuple[bool, ...]) -> bool:
    """Whether the walk is a ring of at least three, so that both its directions can carry something of their own."""
    path = walk(sizes, wraps)
    ends = zip(path[0], path[-1], sizes, wraps, strict=True)
    near = [abs(a - b) == 1 or (wrap and abs(a - b) == size - 1) for a, b, size, wrap in ends if a != b]
    return len(path) > 2 and near == [True]


def _comb(path: list[tuple[int, ...]], dim: int, rows: int) -> list[tuple[int, ...]]:
    """Repeats a path over the rows of one more dimension: up through its head, and back down in a snake."""

    def at(place: tuple[int, ...], row: int) -> tuple[int, ...]:
        return (*place[:dim], row, *place[dim + 1 :])

    comb = [at(path[0], row) for row in range(rows)]
    for turn, row in enumerate(reversed(range(rows))):
        comb += [at(place, row) for place in (path[1:] if turn % 2 == 0 else path[:0:-1])]
    return comb
