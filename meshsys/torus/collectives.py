"""How long collectives take on a torus: closed forms.

Source: the scaling book (jax-ml/scaling-book, sharding and TPU chapters) for rings; lines, boxes of mixed axes and
all-to-all over several axes follow from counting the bytes on the busiest link (the tests do).

Every device of a group injects and receives over both directions of each dimension that wraps around, and at a corner
over one direction of each that does not. That bound is met by the algorithms for rings and lines in turn.

Units: bytes, seconds; V bytes of the full array over the group, N devices of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshsys.torus.axes import AXES
from meshsys.torus.generations import Chip
from meshsys.torus.placement import Placement

__all__ = ["Span", "all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter", "span"]


@dataclass(frozen=True)
class Span:
    """How the devices of one group lie on the torus: a box, or a walk as a box of one side.

    Attributes:
        sides: devices along each dimension of the box, all above 1; () for one device.
        wraps: where the last device of a side is linked to the first.
        strides: links from one device of a side to the next. Groups that lie between one another share these
            links, so each has that part of their bandwidth.
    """

    sides: tuple[int, ...]
    wraps: tuple[bool, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.sides)

    @property
    def ways(self) -> float:
        """Links' worth of bandwidth, one way, into the device that has the fewest."""
        return sum((2 if wraps else 1) / stride for wraps, stride in zip(self.wraps, self.strides, strict=True))

    @property
    def hops(self) -> int:
        """Links between the two devices that are farthest apart."""
        reach = ((side // 2 if wraps else side - 1) for side, wraps in zip(self.sides, self.wraps, strict=True))
        return sum(hops * stride for hops, stride in zip(reach, self.strides, strict=True))


def all_gather(size: float, group: Span, chip: Chip) -> float:
    """Seconds until all have V = `size` bytes, of which each had its part: V (1 - 1/N) / ways."""
    if group.size < 2:
        return 0.0
    return max(group.hops * chip.hop, size * (1 - 1 / group.size) / (chip.link_bandwidth * group.ways))


def reduce_scatter(size: float, group: Span, chip: Chip) -> float:
    """Seconds until each has its part of the sum of arrays of V = `size` bytes: an all-gather backwards."""
    return all_gather(size, group, chip)


def all_reduce(size: float, group: Span, chip: Chip) -> float:
    """Seconds until all have the sum of arrays of V = `size` bytes: a reduce-scatter and an all-gather."""
    return reduce_scatter(size, group, chip) + all_gather(size, group, chip)


def all_to_all(size: float, group: Span, chip: Chip) -> float:
    """Seconds until each has 1/N of what each of the N had; V = `size` bytes is what all have together.

    By dimension-ordered shortest ways: a ring of d carries d^2/8 of its pairs' messages over a link, a line d^2/4.
    """
    if group.size < 2:
        return 0.0
    message = size / group.size**2
    busiest = 0.0
    for side, wraps, stride in zip(group.sides, group.wraps, group.strides, strict=True):
        pairs = (side**2 - side % 2) / (8 if wraps else 4)
        busiest = max(busiest, pairs * group.size / side * message * stride)
    return max(group.hops * chip.hop, busiest / chip.link_bandwidth)


def permute(size: float, hops: int, chip: Chip) -> float:
    """Seconds for `size` bytes from each device to another, all over `hops` links in the same direction.

    Neighbours' transfers share the links in between, so farther is slower in proportion.
    """
    return max(hops * chip.hop, size * hops / chip.link_bandwidth) if hops else 0.0


def span(placement: Placement, axes: Sequence[str]) -> Span:
    """Where the groups of devices lie that differ along these mesh axes alone."""
    names = [name for name in AXES if name in axes]
    index = tuple(slice(None) if name in names else 0 for name in AXES)
    nodes = placement.coords[index].reshape(-1, placement.topology.ndim)
    sides, wraps, strides = [], [], []
    for dim, (room, wrap) in enumerate(zip(placement.topology.dims, placement.topology.wrap, strict=True)):
        places = np.unique(nodes[:, dim])
        if len(places) > 1:
            stride = int(np.diff(places).max())
            sides.append(len(places))
            strides.append(stride)
            wraps.append(wrap and len(places) * stride == room)
    if math.prod(sides) == len(nodes):
        return Span(tuple(sides), tuple(wraps), tuple(strides))
    # A walk through part of a box: as a ring or a line of its longest step.
    steps = placement.topology.distances(nodes[1:], nodes[:-1])
    closes = int(placement.topology.distance(nodes[-1].tolist(), nodes[0].tolist())) <= int(steps.max())
    return Span((len(nodes),), (closes and len(nodes) > 2,), (int(steps.max()),))
