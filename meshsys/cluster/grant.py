"""What a job gets of a pod."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Grant"]


@dataclass(frozen=True, eq=False)
class Grant:
    """Chips and links for one job.

    Attributes:
        shape: as the job asked for it.
        nodes: int64 of that shape, read-only: the chip of each logical position, that is the device order.
        fold: how the shape is laid on chips, for people: "4x4x8", or "8x8 = 4*2 x 8".
        rotation: for a box, the dimension of the pod that each dimension of the shape runs along; () for a fold.
        cubes: ids of the cubes, ascending; () on a pod without.
        links: int64, ascending, read-only: the links and face ports that the job's traffic uses (`Pod.link_name`).
        wrap: for each dimension of the shape whether its ends are neighbours, so that it is a closed ring.
        wireable: whether the switches can join every pair of logical neighbours that needs it.
        dilation: the most links between logical neighbours: 1 where every pair has a link of its own. Rings that
            were asked for count. Where switches cannot join a pair, the way over the nearest ports that could be.
    """

    shape: tuple[int, ...]
    nodes: NDArray[np.int64]
    fold: str
    rotation: tuple[int, ...]
    cubes: tuple[int, ...]
    links: NDArray[np.int64]
    wrap: tuple[bool, ...]
    wireable: bool
    dilation: int

    def __post_init__(self) -> None:
        if self.nodes.shape != self.shape:
            raise ValueError(f"nodes of shape {self.nodes.shape} are not a grant of {self.shape}")
        self.nodes.setflags(write=False)
        self.links.setflags(write=False)

    @property
    def size(self) -> int:
        """Chips."""
        return int(self.nodes.size)
