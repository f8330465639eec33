"""Which chips of each cube are free, as bit masks.

A place in a cube of c a side has the number (x * c + y) * c + z, and is that bit of a mask: uint64 [words], the lowest
bits first; one word for cubes of up to 4 a side.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cubes", "box_mask", "mask_of", "packed"]

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]


class Cubes:
    """The cubes of one pod.

    Attributes:
        side: c.
        count: cubes.
        nodes: int64 [count, c^ndim]: the chip at each place of each cube.
        words: uint64 [count, words]: the free places.
        free: int64 [count]: how many these are.
        volume: chips of a cube.
        changes: goes up with every update.
    """

    def __init__(self, dims: tuple[int, ...], side: int) -> None:
        ndim = len(dims)
        self.side, self.volume = side, side**ndim
        grid = tuple(size // side for size in dims)
        self.count = math.prod(grid)
        numbers = np.arange(math.prod(dims)).reshape([n for size in grid for n in (size, side)])
        order = (*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2))
        self.nodes = np.ascontiguousarray(numbers.transpose(order).reshape(self.count, self.volume))
        self.words = np.zeros((self.count, -(-self.volume // 64)), np.uint64)
        self.free = np.zeros(self.count, np.int64)
        self.changes = 0

    def update(self, cubes: Ints, free: NDArray[np.bool_]) -> None:
        """Takes over which chips are free, bool [all chips], in some cubes."""
        self.changes += 1
        bits = free[self.nodes[cubes]]
        self.free[cubes] = bits.sum(1)
        self.words[cubes] = packed(bits)

    def copy(self) -> Cubes:
        """Those of a copy of the pod."""
        other = copy.copy(self)
        other.words, other.free = self.words.copy(), self.free.copy()
        return other

    def hold(self, mask: Words) -> NDArray[np.bool_]:
        """For each cube whether all places of a mask are free: bool [count]."""
        if len(mask) == 1:
            return (self.words[:, 0] & mask[0]) == mask[0]
        return ((self.words & mask) == mask).all(1)


@lru_cache(1 << 16)
def box_mask(side: int, corner: tuple[int, ...], box: tuple[int, ...]) -> Words:
    """The places of a box of a cube."""
    places = itertools.product(*(range(start, start + long) for start, long in zip(corner, box, strict=True)))
    return mask_of((int(np.ravel_multi_index(place, (side,) * len(box))) for place in places), side ** len(box))


def mask_of(places: Iterable[int], volume: int) -> Words:
    """A mask of some places of a cube."""
    bits = np.zeros(volume, bool)
    bits[list(places)] = True
    words = packed(bits[None])[0]
    words.setflags(write=False)
    return words


def packed(bits: NDArray[np.bool_]) -> Words:
    """Masks of places, bool [masks, places of a cube], as words."""
    pad = -bits.shape[1] % 64
    whole = np.pad(bits, ((0, 0), (0, pad))) if pad else bits
    return np.ascontiguousarray(np.packbits(whole, axis=1, bitorder="little")).view("<u8").astype(np.uint64, copy=False)
