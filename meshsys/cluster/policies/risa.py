"""One block first, and blocks in turn, as RISA fills racks (arXiv 2310.03997)."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies.base import Cached, Shape, Wrap
from meshsys.cluster.wiring import grant
from meshsys.torus.walks import walk

__all__ = ["Risa"]

_BLOCK = 4  # side of a block on a pod without cubes


class Risa(Cached):
    """The first block that holds the job, beginning after the block of the job before; else blocks in turn.

    A block is a cube, or on a torus a box of up to 4 chips a side. Chips are taken in the order of a snake through
    the block; neighbours need not be linked.
    """

    name = "risa"

    def place(self, pod: Pod, shape: Shape, wrap: Wrap = None) -> Grant | None:
        size = math.prod(shape)
        if size > pod.free:
            return None
        blocks = _blocks(pod.dims, pod.cube or _BLOCK)
        free = pod.owner[blocks] == 0
        counts = free.sum(1)
        turn = (np.arange(len(blocks)) + self._next(pod, blocks)) % len(blocks)
        whole = turn[counts[turn] >= size]
        for chosen in [*([block] for block in whole.tolist()), turn.tolist()]:
            nodes = blocks[chosen][free[chosen]][:size]
            found = grant(pod, nodes.reshape(shape), wrap, f"{size} chips, block by block")
            if pod.admits(found):
                return found
        return None

    @staticmethod
    def _next(pod: Pod, blocks: NDArray[np.int64]) -> int:
        """The block after the last chip of the youngest job."""
        if not pod.jobs:
            return 0
        youngest = next(reversed(pod.jobs.values()))
        return int(np.argwhere(blocks == youngest.nodes.flat[-1])[0, 0]) + 1


@lru_cache(8)
def _blocks(dims: tuple[int, ...], most: int) -> NDArray[np.int64]:
    """Chips of each block, in the order of a snake: int64 [blocks, chips]."""
    sides = tuple(max(side for side in range(1, most + 1) if size % side == 0) for size in dims)
    snake = np.array(walk(sides, (False,) * len(dims)), np.int64)
    corners = np.stack(
        [
            axis.ravel()
            for axis in np.meshgrid(
                *(np.arange(0, size, side) for size, side in zip(dims, sides, strict=True)), indexing="ij"
            )
        ],
        -1,
    )
    places = corners[:, None] + snake
    return np.ravel_multi_index(tuple(np.moveaxis(places, -1, 0)), dims)
