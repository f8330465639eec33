"""RFold: folds, and cubes that switches put together (arXiv 2510.03891, and its public simulator)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.cubes import Cubes
from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies.base import Cached, Shape, Wrap
from meshsys.cluster.policies.boxes import padded
from meshsys.cluster.policies.chunks import cubes_needed
from meshsys.cluster.policies.reconfig import from_chunks
from meshsys.cluster.policies.shapes import rfold_folds
from meshsys.cluster.wiring import grant

__all__ = ["RFold"]

_STEPS = 2000  # of the search for a path, along each dimension; theirs stops after 10 seconds


class RFold(Cached):
    """Lines take all that is free in cubes in part use, and a path through the last; others are folded to few cubes.

    Of a line's cubes, those in use with most free chips come first, then empty ones. All but the last give
    every free chip, whether or not these hang together. In the last there must be a path of just the rest, between
    two opposite faces; if there is none the line is placed as `reconfig` does. Sheets and blocks become the
    fold with the fewest cubes, if that is no more than they need themselves, and are placed as `reconfig` does.
    """

    name = "rfold"

    def place(self, pod: Pod, shape: Shape, wrap: Wrap = None) -> Grant | None:
        sides = padded(shape, pod.ndim)
        if sides is None or math.prod(shape) > pod.free:
            return None
        if pod.cubes is not None and pod.ndim == 3:
            if sum(side > 1 for side in sides) == 1:
                nodes = _line(pod.cubes, math.prod(shape))
                if nodes is not None:
                    fold = f"{math.prod(shape)} as a path through cubes"
                    return grant(pod, nodes.reshape(shape), wrap, fold, detours=False)
            else:
                side = pod.cubes.side
                sides = min(rfold_folds(shape, side), key=lambda fold: cubes_needed(fold, side))
        return from_chunks(pod, shape, wrap, sides, self.name)


def _line(cubes: Cubes, size: int) -> NDArray[np.int64] | None:
    free = cubes.free
    order = np.lexsort((np.arange(cubes.count), -free, free == cubes.volume))
    order = order[free[order] > 0]
    total = np.cumsum(free[order])
    last = int(np.searchsorted(total, size))
    if last >= len(order):
        return None
    rest = size - (int(total[last - 1]) if last else 0)
    path = _path(_free_places(cubes, int(order[last])), rest, cubes.side)
    if path is None:
        return None
    snake = _snake(cubes.side)
    nodes = []
    for cube in order[:last]:
        places = _free_places(cubes, int(cube))
        nodes += [int(cubes.nodes[cube, place]) for place in snake if places >> place & 1]
    return np.array(nodes + [int(cubes.nodes[order[last], place]) for place in path], np.int64)


def _free_places(cubes: Cubes, cube: int) -> int:
    return sum(int(word) << 64 * i for i, word in enumerate(cubes.words[cube]))


def _path(free: int, size: int, side: int) -> list[int] | None:
    """A simple path of `size` free places of a cube, whose own ends are linked, between two opposite faces."""
    near = _near(side)
    for faces in _faces(side):
        for first, last in (faces, faces[::-1]):
            path = _search(free, size, near, first & free, last & free)
            if path is not None:
                return path
    return None


def _search(free: int, size: int, near: list[int], first: int, last: int) -> list[int] | None:
    budget = _STEPS
    starts = _bits(first)
    while starts and budget > 0:
        # Depth first with a list of what is still to try at each place of the path.
        path = [starts.pop(0)]
        used = 1 << path[0]
        todo = [_steps(near, path[0], free & ~used)]
        while path and budget > 0:
            budget -= 1
            if len(path) == size:
                if last >> path[-1] & 1:
                    return path
                todo[-1] = []
            if todo[-1]:
                path.append(todo[-1].pop(0))
                used |= 1 << path[-1]
                todo.append(_steps(near, path[-1], free & ~used))
            else:
                todo.pop()
                used &= ~(1 << path.pop())
    return None


def _steps(near: list[int], at: int, free: int) -> list[int]:
    """Where to go next, the place with fewest ways on first."""
    return sorted(_bits(near[at] & free), key=lambda place: (near[place] & free).bit_count())


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


@lru_cache(8)
def _near(side: int) -> list[int]:
    """The neighbours of each place, as a mask."""
    near = []
    for place in np.ndindex(side, side, side):
        mask = 0
        for dim in range(3):
            for step in (1, side - 1):
                there = list(place)
                there[dim] = (there[dim] + step) % side
                mask |= 1 << int(np.ravel_multi_index(tuple(there), (side,) * 3))
        near.append(mask)
    return near


@lru_cache(8)
def _faces(side: int) -> list[tuple[int, int]]:
    """The lower and the upper face of each dimension, as masks."""
    places = np.arange(side**3).reshape((side,) * 3)
    return [
        (
            sum(1 << int(i) for i in places.take(0, dim).ravel()),
            sum(1 << int(i) for i in places.take(side - 1, dim).ravel()),
        )
        for dim in range(3)
    ]


@lru_cache(8)
def _snake(side: int) -> list[int]:
    places = np.arange(side**3).reshape((side,) * 3)
    places[1::2] = places[1::2, ::-1]
    rows = places.reshape(-1, side)
    rows[1::2] = rows[1::2, ::-1]
    return [int(place) for place in rows.ravel()]
