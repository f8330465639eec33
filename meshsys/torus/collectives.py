"""How long collectives take on a torus: closed forms.

Source: the scaling book (jax-ml/scaling-book, sharding and TPU chapters) for rings; lines, boxes of mixed sides and
all-to-all over several sides follow from counting the bytes on the busiest link (the tests do).

An all-gather over a box goes side by side, and parts of the array take the sides in different orders, so that all
links are busy. However the parts are cut, the links along some sides S carry at least what they carry if S goes
first, (N_S - 1) / N of the array for the product N_S of these sides; the busiest S is the bound, and a cut meets it.
A side that closes by a twist goes round a ring of twice its length, in which all comes twice, so that it is as good as
a ring of its own length.

Units: bytes, seconds; V bytes of the full array over the group, N devices of a group.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from meshsys.torus.generations import Chip

__all__ = ["KINDS", "Span", "all_gather", "all_reduce", "all_to_all", "permute", "reduce_scatter", "ring"]

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "permute", "rotate")
"""The collectives. `permute` sends from each device to the next, `rotate` from the last to the first too."""


@dataclass(frozen=True)
class Span:
    """How the devices of one group lie on the torus: a box, or a walk as a box of one side.

    Attributes:
        sides: devices along each side of the box, all above 1; () for one device.
        ways: links' worth of bandwidth along each side, both directions together: 2 for a ring and 1 for a line,
            divided by how many groups share the busiest link.
        hops: links between the two devices that are farthest apart; on a walk the way between them along it.
        routed: messages of an all-to-all that cross the busiest link, where that does not follow from the sides: in
            groups that close by a twist (`meshsys.torus.routes.twisted_span`).
    """

    sides: tuple[int, ...]
    ways: tuple[float, ...]
    hops: int
    routed: float | None = None

    @property
    def size(self) -> int:
        return math.prod(self.sides)

    @cached_property
    def gather(self) -> float:
        """The part of an all-gather's array that crosses the busiest link."""
        places = range(len(self.sides))
        chosen = (some for count in range(1, len(self.sides) + 1) for some in itertools.combinations(places, count))
        return max(
            ((math.prod(self.sides[i] for i in some) - 1) / sum(self.ways[i] for i in some) for some in chosen),
            default=0.0,
        ) / max(1, self.size)

    @cached_property
    def crossing(self) -> float:
        """The messages of an all-to-all that cross the busiest link, by dimension-ordered shortest ways.

        A ring of d carries d^2 / 8 of its pairs' messages over a link, a line d^2 / 4.
        """
        if self.routed is not None:
            return self.routed
        sides = zip(self.sides, self.ways, strict=True)
        return max(((side**2 - side % 2) / (4 * ways) * self.size / side for side, ways in sides), default=0.0)


def ring(size: int, closed: bool, step: int, share: float) -> Span:
    """A walk through devices, each of which sends to the next.

    Args:
        size: at least 2.
        closed: the last is as near to the first as any to the next; otherwise what it sends goes all the way back.
        step: the most hops from one to the next.
        share: walks that share the busiest link.
    """
    return Span((size,), ((2 if closed else 1) / share,), step * (size // 2 if closed else size - 1))


def all_gather(size: float, group: Span, chip: Chip) -> float:
    """Seconds until all have V = `size` bytes, of which each had its part: on one side V (1 - 1/N) / ways."""
    return max(group.hops * chip.hop, size * group.gather / chip.link_bandwidth)


def reduce_scatter(size: float, group: Span, chip: Chip) -> float:
    """Seconds until each has its part of the sum of arrays of V = `size` bytes: an all-gather backwards."""
    return all_gather(size, group, chip)


def all_reduce(size: float, group: Span, chip: Chip) -> float:
    """Seconds until all have the sum of arrays of V = `size` bytes: a reduce-scatter and an all-gather."""
    return reduce_scatter(size, group, chip) + all_gather(size, group, chip)


def all_to_all(size: float, group: Span, chip: Chip) -> float:
    """Seconds until each has 1/N of what each of the N had; V = `size` bytes is what all have together."""
    return max(group.hops * chip.hop, size / group.size**2 * group.crossing / chip.link_bandwidth)


def permute(size: float, hops: int, chip: Chip, sharing: float | None = None) -> float:
    """Seconds for `size` bytes from each device to another.

    Args:
        hops: the most links that a message crosses.
        sharing: messages that cross the busiest link; by default as many as hops, as where all go equally far in the
            same direction, over the links of those in between.
    """
    return max(hops * chip.hop, size * (hops if sharing is None else sharing) / chip.link_bandwidth)
