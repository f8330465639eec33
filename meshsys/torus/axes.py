"""The search for the torus dimensions that each logical axis runs along.

Each axis takes a factor of every dimension, a sub-box of the torus, and walks through it link by link.
Where axes share a dimension one lies inside: its positions are adjacent, and those outside step over them.
Sizes that no box has (3 on 2x2x2) take the beginning of the walk through a larger one, and where even that
does not fit, adjacent axes share one walk.

The search is exhaustive over boxes and over which axis lies inside which. It places axes from the inside out;
what the rest costs depends on how far the axes so far reach along each dimension, and not on which they are, so
that each such state is looked at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.collectives import Span, ring
from meshsys.torus.topology import Topology
from meshsys.torus.traffic import AXES, Flow, Traffic, flow_seconds
from meshsys.torus.walks import closes, walk

__all__ = ["AXES", "Assignment", "assign"]

# Where the traffic is not known: stages send at every tick and tensor collectives sit inside every layer; gradients
# move once a step.
_WEIGHT = {"pipe": 4, "data": 1, "fsdp": 2, "expert": 2, "context": 2, "tensor": 4}

_SECOND = 1e15  # scores are whole numbers, so that ties are ties: femtoseconds

Axis = tuple[str, int]
Score = tuple[int, ...]


@dataclass(frozen=True)
class _Run:
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


def where(runs: Sequence[_Run], kind: str) -> Span:
    """The groups of devices that differ along the axes of these runs, which all fill their boxes.

    A gather or a sum goes along all sides at once where the group takes whole dimensions of the torus, and otherwise
    round a ring: so the TPU compiler chooses, whatever the order of a group's devices is.
    """
    topology = runs[0].topology
    sides = _sides(runs)
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


def _sides(runs: Sequence[_Run]) -> list[tuple[int, int, float, bool]]:
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


@dataclass(frozen=True)
class Assignment:
    """Axes on dimensions.

    Attributes:
        topology: the torus.
        runs: one for each group of axes longer than 1, outermost first in the mesh.
        nesting: the places of the runs, innermost on the torus first.
    """

    topology: Topology
    runs: tuple[_Run, ...]
    nesting: tuple[int, ...]

    def coords(self) -> NDArray[np.int64]:
        """Nodes: one dimension for each axis longer than 1, then [ndim]."""
        ndim = self.topology.ndim
        total = np.zeros((1,) * len(self.runs) + (ndim,), np.int64)
        for place in self.nesting:
            run = self.runs[place]
            digits = run.digits.reshape(*(run.size if i == place else 1 for i in range(len(self.runs))), ndim)
            straight = total + digits * np.array(run.strides)
            backwards = np.where(digits == 0, total, np.array(self.topology.dims) - 1 - total)
            total = np.where(run.folds, backwards, straight)
        return total.reshape(*(size for run in self.runs for _, size in run.axes), ndim)

    def dims(self) -> dict[str, str]:
        """For each axis longer than 1 what it runs along: "x", "y*z", "x:2" (2 of x), "snake(x*y)"."""
        found = {}
        for run in self.runs:
            parts = [
                name if digits == room else f"{name}:{digits}"
                for name, digits, room in zip(self.topology.names, run.box, self.topology.dims, strict=True)
                if digits > 1
            ]
            text = "*".join(parts) if run.exact else f"snake({'*'.join(parts)})"
            found.update({name: text for name, _ in run.axes})
        return found


def assign(topology: Topology, axes: Sequence[Axis], traffic: Traffic = ()) -> Assignment:
    """The best assignment of axes to the torus; their product must be at most its size.

    Args:
        topology: the torus.
        axes: names and sizes above 1, outermost first.
        traffic: along these axes; it counts on a torus of a generation.
    """
    for groups in range(len(axes), 0, -1):
        for exact in (True, False):
            found = [
                _Search(topology, parts, traffic if topology.chip else (), exact).best()
                for cuts in itertools.combinations(range(1, len(axes)), groups - 1)
                for parts in [[tuple(axes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(axes)))]]
            ]
            possible = [each for each in found if each is not None]
            if possible:
                return min(possible, key=lambda each: each[0])[1]
    return Assignment(topology, (), ())


class _Search:
    """The best boxes and nesting for groups of axes.

    A score's parts, of which smaller is better and the earlier ones come first: the traffic's seconds; hops, and hops
    to close the rings; pieces (whole dimensions before parts); spread; axes inside others that are before them in the
    mesh; and the order of boxes, those that are long in the first dimensions first.
    """

    def __init__(self, topology: Topology, parts: Sequence[tuple[Axis, ...]], traffic: Traffic, exact: bool):
        self._topology, self._parts = topology, parts
        self._sizes = [math.prod(size for _, size in part) for part in parts]
        self._boxes = [sorted(_box(size, topology.dims, exact), reverse=True) for size in self._sizes]
        self._base = 1 + max(map(len, self._boxes), default=0)
        place_of = {name: place for place, part in enumerate(parts) for name, _ in part}
        self._own: list[list[Flow]] = [[] for _ in parts]
        self._joint: list[tuple[frozenset[int], Flow]] = []
        for flow in traffic:
            places = frozenset(place_of[name] for name in flow.axes)
            if len(flow.axes) == 1:
                self._own[min(places)].append(flow)
            elif all(len(parts[place]) == 1 for place in places) and exact:
                self._joint.append((places, flow))
        self._run = lru_cache(maxsize=None)(self._make_run)
        self._rest = lru_cache(maxsize=None)(self._find_rest)

    def best(self) -> tuple[Score, Assignment] | None:
        if math.prod(self._sizes) > self._topology.size:
            return None
        left, strides = frozenset(range(len(self._parts))), (1,) * self._topology.ndim
        open_runs: tuple[tuple[int, _Run], ...] = ()
        whole = self._rest(left, strides, open_runs)
        if whole is None:
            return None
        runs, nesting = {}, []
        while left:
            found = self._rest(left, strides, open_runs)
            assert found is not None
            _, place, run = found
            runs[place] = run
            nesting.append(place)
            left, strides, open_runs = self._after(left, place, run, open_runs)
        assignment = Assignment(self._topology, tuple(runs[place] for place in sorted(runs)), tuple(nesting))
        return whole[0], assignment

    def _find_rest(
        self, left: frozenset[int], strides: tuple[int, ...], open_runs: tuple[tuple[int, _Run], ...]
    ) -> tuple[Score, int, _Run] | None:
        """The best score of what is left, and what of it comes next."""
        best: tuple[Score, int, _Run] | None = None
        room = tuple(size // stride for size, stride in zip(self._topology.dims, strides, strict=True))
        if math.prod(self._sizes[place] for place in left) > math.prod(room):
            return None
        for place in sorted(left, reverse=True):
            inside = sum(other > place for other in left)
            for rank, box in enumerate(self._boxes[place]):
                if any(side > most for side, most in zip(box, room, strict=True)):
                    continue
                run, score = self._run(place, box, strides)
                after = self._after(left, place, run, open_runs)
                if after[0]:
                    rest = self._rest(*after)
                    if rest is None:
                        continue
                    more = rest[0]
                else:
                    more = (0, 0, 0, 0, sum(after[1]), 0, 0)
                total = tuple(map(sum, zip(score, more, strict=True)))
                total = (
                    total[0] + self._together(left, place, run, open_runs),
                    *total[1:5],
                    total[5] + inside,
                    total[6] + rank * self._base ** (len(self._parts) - 1 - place),
                )
                if best is None or total < best[0]:
                    best = total, place, run
        return best

    def _make_run(self, place: int, box: tuple[int, ...], strides: tuple[int, ...]) -> tuple[_Run, Score]:
        run = _Run(self._parts[place], box, strides, self._topology)
        seconds = sum(round(_SECOND * run.seconds(flow)) for flow in self._own[place])
        return run, (seconds, *run.cost, sum(digits > 1 for digits in box), 0, 0, 0)

    def _together(
        self, left: frozenset[int], place: int, run: _Run, open_runs: tuple[tuple[int, _Run], ...]
    ) -> int:
        """Of flows along several axes of which this is the last to be placed."""
        chip, total = self._topology.chip, 0
        for places, flow in self._joint:
            if places & left == {place}:
                assert chip is not None
                runs = [each for other, each in open_runs if other in places]
                total += round(_SECOND * flow_seconds(flow, where((*runs, run), flow.kind), chip))
        return total

    def _after(
        self, left: frozenset[int], place: int, run: _Run, open_runs: tuple[tuple[int, _Run], ...]
    ) -> tuple[frozenset[int], tuple[int, ...], tuple[tuple[int, _Run], ...]]:
        """The state with one more placed: what is left, how far all reach, and runs that others still go with."""
        left = left - {place}
        reach = tuple(stride * side for stride, side in zip(run.strides, run.box, strict=True))
        waiting = frozenset[int]().union(*(places for places, _ in self._joint if places & left))
        return left, reach, tuple(each for each in (*open_runs, (place, run)) if each[0] in waiting)


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
