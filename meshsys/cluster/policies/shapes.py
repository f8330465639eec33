"""RFold's rules: which shapes it takes to be the same job folded."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from meshsys.cluster.factors import factorisations

__all__ = ["rfold_folds"]

Shape = tuple[int, ...]


@lru_cache(4096)
def rfold_folds(shape: Shape, cube: int) -> tuple[Shape, ...]:
    """The shape itself, and what RFold folds it to; three dimensions, longest last.

    - A line: any three factors.
    - A sheet: folded once; with cubes of 4, whose dimensions close to rings, also twice.
    - With cubes of 4, 2 becomes 4 where another dimension can be halved.
    """
    long = sorted(side for side in shape if side > 1)
    own = (*(1,) * (3 - len(long)), *long)
    found = {own: None}

    def add(*sides: float) -> None:
        if all(side == int(side) for side in sides):
            found[tuple(sorted(int(side) for side in sides))] = None

    if len(long) <= 1:
        for factors in factorisations(math.prod(shape), 3):
            add(*factors)
    if len(long) == 2:
        for a, b in itertools.permutations(long):
            add(a / 2, b, 2)
            if cube == 4:
                add(a / 4, b, 4)
                add(a / 2, b / 2, 4)
    if cube == 4 and 2 in own:
        rest = list(own)
        rest.remove(2)
        for i, side in enumerate(rest):
            if side > 1:
                add(side / 2, rest[1 - i], 4)
    return tuple(found)
