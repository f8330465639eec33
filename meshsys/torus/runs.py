"""Walks of mesh axes along the torus: how far they go, which links they share, and what their traffic takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.collectives import Span, ring
from meshsys.torus.routes import twisted_span
from meshsys.torus.topology import Topology
from meshsys.torus.traffic import Flow, flow_seconds
from meshsys.torus.walks import closes, walk

__all__ = ["Axis", "Run", "where"]

# Where the traffic is not known: stages send at every tick and tensor collectives sit inside every layer; gradients
# move once a step.
_WEIGHT = {"pipe": 4, "data": 1, "fsdp": 2, "expert": 2, "context": 2, "tensor": 4}

Axis = tuple[str, int]


@dataclass(frozen=True)
class Run:
    """The walk of one group of axes.

    Attributes:
        axes: names and sizes; more than one only where the group shares a walk.
        box: digits along each dimension.
        strides: how far one step of a digit goes along each dimension.
        topology: the torus.
    """

    axes: tuple[Axis, ...]
    box: tuple[int, ...]
    strides: tuple[int, ...]
    topology: Topology

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def exact(self) -> bool:
        """Whether one axis fills the box."""
        return len(self.axes) == 1 and math.prod(self.box) == self.size

    @property
    def full(self) -> tuple[bool, ...]:
        """Where the digits go once round the torus."""
        reach = zip(self.box, self.strides, self.topology.dims, self.topology.wrap, strict=True)
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
    def steps(self) -> dict[str, tuple[int, int]]:
        """For each axis the most hops between consecutive positions, and from the last to the first."""
        digits = self.digits.reshape(*(size for _, size in self.axes), -1)
        found = {}
        for position, (name, _) in enumerate(self.axes):
            line = np.moveaxis(digits, position, 0)
            found[name] = self._farthest(line[1:] - line[:-1]), self._farthest(line[0] - line[-1])
        return found

    @cached_property
    def cost(self) -> tuple[int, int]:
        """Weighted hops between consecutive positions, and from the last to the first."""
        steps = self.steps
        hops, closes = (sum(_WEIGHT[name] * steps[name][i] for name, _ in self.axes) for i in (0, 1))
        return hops, closes

    def seconds(self, flow: Flow) -> float:
        """Of a flow along one of the axes."""
        chip, name = self.topology.chip, flow.axes[0]
        assert chip is not None
        hops, back = self.steps[name]
        if flow.shifts:
            far = max(hops, back) if flow.kind == "rotate" else hops
            return flow_seconds(flow, (far, self._sharing if self.exact else far), chip)
        if self.exact:
            return flow_seconds(flow, where((self,), flow.kind), chip)
        return flow_seconds(flow, ring(dict(self.axes)[name], back <= hops, hops, hops), chip)

    @cached_property
    def _sharing(self) -> float:
        """The most messages over one link if each position sends to the next."""
        return max((1 / ways for _, _, ways, _ in _sides((self,))), default=0.0)

    @cached_property
    def reach_of_step(self) -> tuple[int, ...]:
        """The hops of a change by 1 of the digit of each dimension."""
        return tuple(int(self._reach[1, dim]) if digits > 1 else 0 for dim, digits in enumerate(self.box))

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """The most hops between two digits of each dimension."""
        return tuple(int(self._reach[:digits, dim].max()) for dim, digits in enumerate(self.box))

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
            elif self.topology.wrap[dim]:
                way = np.minimum(way, np.abs(self.topology.dims[dim] - way))
            table[:, dim] = way
        return table


def where(runs: Sequence[Run], kind: str) -> Span:
    """The groups of devices that differ along the axes of these runs, which all fill their boxes.

    A gather or a sum goes along all sides at once where the group takes whole dimensions of the torus, and otherwise
    round a ring: so the TPU compiler chooses, whatever the order of a group's devices is.
    """
    topology = runs[0].topology
    sides = _sides(runs)
    twisted = twisted_span(topology, {dim: side for dim, side, _, _ in sides})
    if twisted is not None:
        return twisted
    whole = all(side == topology.dims[dim] for dim, side, _, _ in sides)
    if kind == "all-to-all" or whole:
        hops = 0
        for dim, *_ in sides:
            far = sum(run.reach[dim] for run in runs)
            hops += min(far, topology.dims[dim] // 2) if topology.wrap[dim] else far
        both = tuple(ways * (2 if full and side > 2 else 1) for _, side, ways, full in sides)
        return Span(tuple(side for _, side, _, _ in sides), both, hops)
    size = math.prod(side for _, side, _, _ in sides)
    closed = closes(tuple(side for _, side, _, _ in sides), tuple(full for *_, full in sides))
    step = max(max(run.reach_of_step[dim] for run in runs) for dim, *_ in sides)
    return ring(size, closed, step, 1 / min(ways for _, _, ways, _ in sides))


def _sides(runs: Sequence[Run]) -> list[tuple[int, int, float, bool]]:
    """For each dimension that the runs' box is long in: its number, the side, the part of a link that a group has in
    one direction, and whether the side goes round the torus."""
    topology, found = runs[0].topology, []
    for dim, (room, wrap, speed) in enumerate(zip(topology.dims, topology.wrap, topology.speeds, strict=True)):
        side = math.prod(run.box[dim] for run in runs)
        if side > 1:
            top = max(run.box[dim] * run.strides[dim] for run in runs if run.box[dim] > 1)
            full = wrap and top == room
            # Between two opposite places messages take both ways, by halves.
            found.append((dim, side, side / top * speed * (2 if full and side == 2 else 1), full))
    return found
