"""A box of chips put together from chunks of cubes, as RFold does: whole cubes, and what is left at the ends.

Along a dimension a box has as many whole cubes as go into it, and a partial one at its end. Chunks that are partial
along the same dimensions are of one kind; all of a kind lie at the same corner of their cubes, which may be any. A
cube serves one chunk of a job. Nobody looks whether the switches can join the chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.cubes import Cubes, box_mask

__all__ = ["cubes_needed", "find_chunks"]

Shape = tuple[int, ...]


def cubes_needed(box: Shape, side: int) -> int:
    """Cubes that have a part of a box."""
    return math.prod(-(-size // side) for size in box)


def find_chunks(cubes: Cubes, box: Shape) -> NDArray[np.int64] | None:
    """Chips for a box, int64 [*box]; None if some kind of chunk finds too few cubes."""
    side = cubes.side
    if cubes_needed(box, side) > cubes.count:
        return None
    nodes = np.empty(box, np.int64)
    taken = np.zeros(cubes.count, bool)
    anywhere = any(size < side for size in box)
    for starts, chunk in sorted(_kinds(box, side), key=lambda kind: -math.prod(kind[1])):
        for corner in itertools.product(*(_offsets(part, side, anywhere) for part in chunk)):
            able = np.flatnonzero(cubes.hold(box_mask(side, corner, chunk)) & ~taken)
            if len(able) >= len(starts):
                break
        else:
            return None
        taken[able[: len(starts)]] = True
        local = tuple(slice(at, at + part) for at, part in zip(corner, chunk, strict=True))
        for cube, start in zip(able, starts, strict=False):
            here = tuple(slice(at, at + part) for at, part in zip(start, chunk, strict=True))
            nodes[here] = cubes.nodes[cube].reshape((side,) * len(box))[local]
    return nodes


def _kinds(box: Shape, side: int) -> Iterator[tuple[list[Shape], Shape]]:
    """Of each kind of chunk where in the box they start, and their size."""
    for partial in itertools.product((False, True), repeat=len(box)):
        chunk = tuple(size % side if part else side for size, part in zip(box, partial, strict=True))
        starts = [
            [size // side * side] if part else range(0, size // side * side, side)
            for size, part in zip(box, partial, strict=True)
        ]
        if all(chunk) and all(map(len, starts)):
            yield list(itertools.product(*starts)), chunk


def _offsets(part: int, side: int, anywhere: bool) -> range | tuple[int, ...]:
    if part == side:
        return (0,)
    return range(side - part + 1) if anywhere else (0, side - part)
