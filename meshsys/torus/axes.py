"""The search for the torus dimensions that each logical axis runs along.

Each axis takes a factor of every dimension, a sub-box of the torus, and walks through it link by link.
Where axes share a dimension the later one lies inside: its positions are adjacent, and the earlier one
steps over them. Sizes that no box has (3 on 2x2x2) take the beginning of the walk through a larger one,
and where even that does not fit, adjacent axes share one walk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.topology import Topology
from meshsys.torus.walks import walk

__all__ = ["AXES", "Assignment", "assign"]

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""The logical mesh axes, outermost first."""

# Stages send at every tick and tensor collectives sit inside every layer; gradients move once a step.
_WEIGHT = {"pipe": 4, "data": 1, "fsdp": 2, "expert": 2, "context": 2, "tensor": 4}

# Enough to be exhaustive on every usual split of a pod; a bound for tori of many dimensions.
_MOST_CANDIDATES = 20_000


@dataclass(frozen=True)
class _Run:
    """The walk of one group of axes.

    Attributes:
        axes: names and sizes; more than one only where the group shares a walk.
        box: digits along each dimension.
        strides: how far one step of a digit goes along each dimension.
        room: nodes along each dimension of the torus.
        wrap: where the torus wraps around.
    """

    axes: tuple[tuple[str, int], ...]
    box: tuple[int, ...]
    strides: tuple[int, ...]
    room: tuple[int, ...]
    wrap: tuple[bool, ...]

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def full(self) -> tuple[bool, ...]:
        """Where the digits go once round the torus."""
        reach = zip(self.box, self.strides, self.room, self.wrap, strict=True)
        return tuple(wrap and digits * stride == room for digits, stride, room, wrap in reach)

    @property
    def folds(self) -> tuple[bool, ...]:
        """Where the run cuts a ring into two halves: the second is walked backwards, so that they meet at both ends."""
        halves = zip(self.full, self.box, self.strides, strict=True)
        return tuple(full and digits == 2 and stride > 1 for full, digits, stride in halves)

    @cached_property
    def digits(self) -> NDArray[np.int64]:
        """The walk: [size, ndim]."""
        return np.array(walk(self.box, self.full)[: self.size], np.int64)

    @cached_property
    def cost(self) -> tuple[int, int]:
        """Weighted hops between consecutive positions, and from the last to the first."""
        hops = closes = 0
        shape = tuple(size for _, size in self.axes)
        digits = self.digits.reshape(*shape, -1)
        for position, (name, size) in enumerate(self.axes):
            if size > 1:
                line = np.moveaxis(digits, position, 0)
                hops += _WEIGHT[name] * self._farthest(line[1:] - line[:-1])
                closes += _WEIGHT[name] * self._farthest(line[0] - line[-1])
        return hops, closes

    def _farthest(self, steps: NDArray[np.int64]) -> int:
        return int(np.take_along_axis(self._reach, np.abs(steps).reshape(-1, len(self.box)), 0).sum(-1).max())

    @cached_property
    def _reach(self) -> NDArray[np.int64]:
        """Hops for a change of a digit, the most over the other digits of its dimension: [change, ndim]."""
        table = np.zeros((max(self.box), len(self.box)), np.int64)
        for dim, folds in enumerate(self.folds):
            way = np.arange(max(self.box)) * self.strides[dim]
            if folds:  # between c and room - 1 - c: at most the odd number up to the stride
                way[1] = self.strides[dim] - 1 + self.strides[dim] % 2
            elif self.wrap[dim]:
                way = np.minimum(way, np.abs(self.room[dim] - way))
            table[:, dim] = way
        return table


@dataclass(frozen=True)
class Assignment:
    """Axes on dimensions.

    Attributes:
        topology: the torus.
        runs: one for each group of axes longer than 1, outermost first.
    """

    topology: Topology
    runs: tuple[_Run, ...]

    @property
    def box(self) -> tuple[int, ...]:
        """The sub-slice that the axes take."""
        return tuple(math.prod(run.box[dim] for run in self.runs) for dim in range(self.topology.ndim))

    @property
    def score(self) -> tuple[int, int, int, int]:
        """Smaller is better: hops, hops to close the rings, pieces (whole dimensions before parts), spread."""
        hops = sum(run.cost[0] for run in self.runs)
        closes = sum(run.cost[1] for run in self.runs)
        pieces = sum(digits > 1 for run in self.runs for digits in run.box)
        return hops, closes, pieces, sum(self.box)

    def coords(self) -> NDArray[np.int64]:
        """Nodes: one dimension for each axis longer than 1, then [ndim]."""
        ndim = self.topology.ndim
        total = np.zeros((1,) * len(self.runs) + (ndim,), np.int64)
        for place in reversed(range(len(self.runs))):
            run = self.runs[place]
            digits = run.digits.reshape(*(run.size if i == place else 1 for i in range(len(self.runs))), ndim)
            straight = total + digits * np.array(run.strides)
            backwards = np.where(digits == 0, total, np.array(run.room) - 1 - total)
            total = np.where(run.folds, backwards, straight)
        return total.reshape(*(size for run in self.runs for _, size in run.axes), ndim)

    def dims(self) -> dict[str, str]:
        """For each axis longer than 1 what it runs along: "x", "y*z", "x:2" (2 of x), "snake(x*y)"."""
        found = {}
        for run in self.runs:
            parts = [
                name if digits == room else f"{name}:{digits}"
                for name, digits, room in zip(self.topology.names, run.box, run.room, strict=True)
                if digits > 1
            ]
            exact = len(run.axes) == 1 and math.prod(run.box) == run.size
            text = "*".join(parts) if exact else f"snake({'*'.join(parts)})"
            found.update({name: text for name, _ in run.axes})
        return found


def assign(topology: Topology, axes: Sequence[tuple[str, int]]) -> Assignment:
    """The best assignment of axes to the torus; their product must be at most its size.

    Args:
        topology: the torus.
        axes: names and sizes above 1, outermost first.
    """
    for groups in range(len(axes), 0, -1):
        for exact in (True, False):
            found = list(itertools.islice(_assignments(topology, axes, groups, exact), _MOST_CANDIDATES))
            if found:
                return min(found, key=lambda assignment: assignment.score)
    return Assignment(topology, ())


def _assignments(topology: Topology, axes: Sequence[tuple[str, int]], groups: int, exact: bool) -> Iterator[Assignment]:
    """All assignments that put the axes into so many groups of adjacent ones."""
    run = lru_cache(maxsize=None)(_Run)  # the candidates share most of their runs, and a run knows its cost
    for cuts in itertools.combinations(range(1, len(axes)), groups - 1):
        parts = [tuple(axes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(axes)))]
        sizes = [math.prod(size for _, size in part) for part in parts]
        for boxes in _boxes(sizes, topology.dims, exact):
            strides = [(1,) * topology.ndim]
            for box in boxes[:0:-1]:
                strides.insert(0, tuple(stride * digits for stride, digits in zip(strides[0], box, strict=True)))
            yield Assignment(
                topology,
                tuple(run(*each, topology.dims, topology.wrap) for each in zip(parts, boxes, strides, strict=True)),
            )


def _boxes(sizes: Sequence[int], room: tuple[int, ...], exact: bool) -> Iterator[tuple[tuple[int, ...], ...]]:
    """One box for each size, so that the product of the boxes fits into `room` along every dimension."""
    if not sizes:
        yield ()
    elif math.prod(sizes) <= math.prod(room):
        for box in _box(sizes[0], room, exact):
            left = tuple(total // digits for total, digits in zip(room, box, strict=True))
            for rest in _boxes(sizes[1:], left, exact):
                yield box, *rest


def _box(size: int, room: tuple[int, ...], exact: bool) -> Iterator[tuple[int, ...]]:
    """Boxes in `room` of just this size, or those that hold it and hold it no more if any side is cut by 1."""
    for box in _covers(size, room, exact):
        volume = math.prod(box)
        if all(volume // side * (side - 1) < size for side in box if side > 1):
            yield box


def _covers(size: int, room: tuple[int, ...], exact: bool) -> Iterator[tuple[int, ...]]:
    if not room:
        if size == 1:
            yield ()
        return
    for side in range(min(size, room[0]), 0, -1):
        if not exact or size % side == 0:
            for rest in _covers(-(-size // side), room[1:], exact):
                yield side, *rest
