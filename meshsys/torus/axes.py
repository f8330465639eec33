"""The search for the torus dimensions that each logical axis runs along.

Each axis takes a factor of every dimension, a sub-box of the torus, and walks through it link by link.
Where axes share a dimension one lies inside: its positions are adjacent, and those outside step over them.
Sizes that no box has (3 on 2x2x2) take the beginning of the walk through a larger one, and where even that
does not fit, adjacent axes share one walk.

The search is exhaustive over boxes and over which axis lies inside which. It places axes from the inside out;
what the rest costs depends on how far the axes so far reach along each dimension, and not on which they are, so
that each such state is looked at once.

On a TPU slice predicted time is not all that counts. The compiler sums along several dimensions at once where an axis
takes them whole, and otherwise round a ring. The former is seen in compiled programs, what a ring gains is predicted.
So where all axes can take whole dimensions, as many are along several of them as in the fastest layout of that kind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.runs import Axis, Run, where
from meshsys.torus.topology import Topology
from meshsys.torus.traffic import Flow, Traffic, flow_seconds

__all__ = ["Assignment", "assign"]

_SECOND = 1e15  # scores are whole numbers, so that ties are ties: femtoseconds

Score = tuple[int, ...]


@dataclass(frozen=True)
class Assignment:
    """Axes on dimensions.

    Attributes:
        topology: the torus.
        runs: one for each group of axes longer than 1, outermost first in the mesh.
        nesting: the places of the runs, innermost on the torus first.
    """

    topology: Topology
    runs: tuple[Run, ...]
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
                _best(topology, parts, traffic if topology.chip else (), exact)
                for cuts in itertools.combinations(range(1, len(axes)), groups - 1)
                for parts in [[tuple(axes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(axes)))]]
            ]
            possible = [each for each in found if each is not None]
            if possible:
                return min(possible, key=lambda each: each[0])[1]
    return Assignment(topology, (), ())


def _best(
    topology: Topology, parts: Sequence[tuple[Axis, ...]], traffic: Traffic, exact: bool
) -> tuple[Score, Assignment] | None:
    """Of one division of the axes into groups; None where it has no layout.

    Args:
        exact: every axis fills its box.
    """
    fastest = _Search(topology, parts, traffic, exact).best()
    # Of chips that are several devices the compiler does not say how it sums.
    compiled = topology.chip is not None and topology.cores == 1
    if fastest is None or not (compiled and exact and all(len(part) == 1 for part in parts)):
        return fastest
    plain = _Search(topology, parts, traffic, exact, whole=dict.fromkeys(range(len(parts)), 1)).best()
    several = _several(plain[1]) if plain else []
    if len(_several(fastest[1])) >= len(several):
        return fastest
    return _Search(topology, parts, traffic, exact, whole=dict.fromkeys(several, 2)).best()


def _several(assignment: Assignment) -> list[int]:
    """The runs that take several dimensions, all of them whole."""
    return [place for place, run in enumerate(assignment.runs) if _whole(run.box, assignment.topology.dims) > 1]


class _Search:
    """The best boxes and nesting for groups of axes; `whole` has how many dimensions, all of them whole, some take.

    A score's parts, of which smaller is better and the earlier ones come first: the traffic's seconds; hops, and hops
    to close the rings; pieces (whole dimensions before parts); spread; axes inside others that are before them in the
    mesh; and the order of boxes, those that are long in the first dimensions first.
    """

    def __init__(
        self,
        topology: Topology,
        parts: Sequence[tuple[Axis, ...]],
        traffic: Traffic,
        exact: bool,
        whole: Mapping[int, int] = MappingProxyType({}),
    ):
        self._topology, self._parts = topology, parts
        self._sizes = [math.prod(size for _, size in part) for part in parts]
        self._boxes = [
            [
                box
                for box in sorted(_box(size, topology.dims, exact), reverse=True)
                if _whole(box, topology.dims) >= whole.get(place, 0)
            ]
            for place, size in enumerate(self._sizes)
        ]
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
        open_runs: tuple[tuple[int, Run], ...] = ()
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
        self, left: frozenset[int], strides: tuple[int, ...], open_runs: tuple[tuple[int, Run], ...]
    ) -> tuple[Score, int, Run] | None:
        """The best score of what is left, and what of it comes next."""
        best: tuple[Score, int, Run] | None = None
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

    def _make_run(self, place: int, box: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Run, Score]:
        run = Run(self._parts[place], box, strides, self._topology)
        seconds = sum(round(_SECOND * run.seconds(flow)) for flow in self._own[place])
        return run, (seconds, *run.cost, sum(digits > 1 for digits in box), 0, 0, 0)

    def _together(self, left: frozenset[int], place: int, run: Run, open_runs: tuple[tuple[int, Run], ...]) -> int:
        """Of flows along several axes of which this is the last to be placed."""
        chip, total = self._topology.chip, 0
        for places, flow in self._joint:
            if places & left == {place}:
                assert chip is not None
                runs = [each for other, each in open_runs if other in places]
                total += round(_SECOND * flow_seconds(flow, where((*runs, run), flow.kind), chip))
        return total

    def _after(
        self, left: frozenset[int], place: int, run: Run, open_runs: tuple[tuple[int, Run], ...]
    ) -> tuple[frozenset[int], tuple[int, ...], tuple[tuple[int, Run], ...]]:
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


def _whole(box: Sequence[int], room: Sequence[int]) -> int:
    """How many dimensions a box takes if it takes all of them whole, and otherwise 0."""
    long = [side == most for side, most in zip(box, room, strict=True) if side > 1]
    return len(long) if all(long) else 0


def _covers(size: int, room: tuple[int, ...], exact: bool) -> Iterator[tuple[int, ...]]:
    if not room:
        if size == 1:
            yield ()
        return
    for side in range(min(size, room[0]), 0, -1):
        if not exact or size % side == 0:
            for rest in _covers(-(-size // side), room[1:], exact):
                yield side, *rest
