"""Along a Hilbert curve, as Slurm laid jobs on Cray's torus."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies.base import Cached, Shape, Wrap
from meshsys.cluster.wiring import grant

__all__ = ["Hilbert", "hilbert_order"]

_TRIES = 4


class Hilbert(Cached):
    """The free chips that lie closest together on the curve; neighbours need not be linked.

    Where links must not be shared, the first of the closest windows whose traffic crosses nobody else's.
    """

    name = "hilbert"

    def place(self, pod: Pod, shape: Shape, wrap: Wrap = None) -> Grant | None:
        size = math.prod(shape)
        if size > pod.free:
            return None
        order = hilbert_order(pod.dims)
        free = np.flatnonzero(pod.owner[order] == 0)
        spans = free[size - 1 :] - free[: len(free) - size + 1]
        for start in np.argsort(spans, kind="stable")[:_TRIES]:
            nodes = order[free[start : start + size]]
            found = grant(pod, nodes.reshape(shape), wrap, f"{size} chips along a Hilbert curve")
            if pod.admits(found):
                return found
        return None


@lru_cache(8)
def hilbert_order(dims: tuple[int, ...]) -> NDArray[np.int64]:
    """Chips in the order of a Hilbert curve through the smallest cube of a power of two that holds the box.

    After J. Skilling, Programming the Hilbert curve (2004).
    """
    ndim, bits = len(dims), max(1, (max(dims) - 1).bit_length())
    x = np.stack(np.unravel_index(np.arange(math.prod(dims)), dims)).astype(np.int64)
    bit = 1 << (bits - 1)
    while bit > 1:
        below = bit - 1
        for i in range(ndim):
            high = (x[i] & bit) > 0
            swap = np.where(high, 0, (x[0] ^ x[i]) & below)
            x[0] ^= np.where(high, below, swap)
            x[i] ^= swap
        bit >>= 1
    for i in range(1, ndim):
        x[i] ^= x[i - 1]
    turn = np.zeros_like(x[0])
    bit = 1 << (bits - 1)
    while bit > 1:
        turn ^= np.where(x[-1] & bit, bit - 1, 0)
        bit >>= 1
    x ^= turn
    index = np.zeros_like(x[0])
    for place in range(bits - 1, -1, -1):
        for i in range(ndim):
            index = index << 1 | (x[i] >> place & 1)
    return np.argsort(index, kind="stable")
