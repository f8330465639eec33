"""A torus of chips: its shape, its links, and distances on them."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshsys.torus.generations import GENERATIONS, Chip, Generation
from meshsys.torus.shapes import TWISTED, Shape, dimension_names, shape_text
from meshsys.torus.twist import twist_of

__all__ = ["Topology", "TopologyError"]

# Far above any pod; they keep a slip of the finger from filling the memory.
_MOST_CHIPS = 1 << 16
_MOST_DIMENSIONS = 6
_SPEC = re.compile(rf"(?:([a-z]\w*)\s*:\s*)?(\d+(?:\s*x\s*\d+)*)({TWISTED})?")


class TopologyError(ValueError):
    """A torus that cannot be, or axes that do not fit on it; one line that names the option and the way out."""


@dataclass(frozen=True)
class Topology:
    """A slice of a TPU pod, or a torus of chips of no particular kind.

    In a torus of no generation every dimension longer than 2 wraps around; at length 2 the two links
    between a pair of chips would coincide, and there is one. A generation wraps around where its
    hardware does (`Generation.wrap`).

    A node of the torus is what JAX shows as a device. That is a chip, except on Ironwood, whose chips
    show two cores each: there `dims` has a last dimension `core` of length 2.

    Attributes:
        shape: chips along each dimension.
        generation: a key of `GENERATIONS`, or "" for chips of no particular kind.
        twisted: whether the short dimensions close with a twist (`meshsys.torus.twist`).

    Raises:
        TopologyError: an unknown generation, or a shape that it does not have or cannot twist.
    """

    shape: Shape
    generation: str = ""
    twisted: bool = False

    def __post_init__(self) -> None:
        if problem := _problem(self.shape, self.generation, self.twisted):
            raise TopologyError(f"mesh.topology={self}{problem}")

    @classmethod
    def parse(cls, text: str, option: str = "mesh.topology") -> Topology:
        """Reads "2x2x2", "v5p:4x4x4" or "v4:4x4x8_twisted".

        Args:
            option: whose value the text is, for errors.

        Raises:
            TopologyError: the text has another form, or names no possible torus.
        """
        match = _SPEC.fullmatch(text.strip().lower())
        if not match:
            raise TopologyError(
                f"{option}={text!r} is not a torus; write sizes such as 8, 2x2x2, or v5p:4x4x4 for a TPU slice"
            )
        generation, sizes, twist = match.groups()
        asked = tuple(int(size) for size in sizes.split("x")), generation or "", twist is not None
        if problem := _problem(*asked):
            raise TopologyError(f"{option}={_spelling(*asked)}{problem}")
        return cls(*asked)

    def __str__(self) -> str:
        return _spelling(self.shape, self.generation, self.twisted)

    @property
    def _kind(self) -> Generation:
        return GENERATIONS[self.generation]

    @property
    def cores(self) -> int:
        """Devices a chip."""
        return self._kind.cores if self.generation else 1

    @property
    def chip(self) -> Chip | None:
        """Peak numbers of a device; None for chips of no particular kind."""
        return self._kind.chip if self.generation else None

    @property
    def dims(self) -> Shape:
        """Nodes along each dimension: `shape`, and the cores of a chip where it shows several."""
        return self.shape if self.cores == 1 else (*self.shape, self.cores)

    @property
    def names(self) -> tuple[str, ...]:
        """The dimensions' names: x, y, z, then d3, d4, ...; `core` for the cores of a chip."""
        names = dimension_names(len(self.shape))
        return names if self.cores == 1 else (*names, "core")

    @property
    def wrap(self) -> tuple[bool, ...]:
        """For each dimension whether its last node is linked to its first.

        Never where it is shorter than 3, nor along the short dimensions of a twisted torus, which `closes` knows of.
        """
        wrap = self._kind.wrap(self.shape) if self.generation else (True,) * len(self.shape)
        if self.twisted:
            wrap = tuple(not any(shift) for shift in self.twist)
        return tuple(size > 2 and closed for size, closed in itertools.zip_longest(self.dims, wrap, fillvalue=False))

    @cached_property
    def twist(self) -> tuple[Shape, ...]:
        """For each dimension how far a step over its end goes along each dimension; () without a twist."""
        return (twist_of(self.shape) or ()) if self.twisted else ()

    def closes(self, dim: int, whole: Collection[int]) -> bool:
        """Whether a line along a dimension comes back to its start within a box that is whole in some dimensions."""
        if self.wrap[dim] or not self.twisted:
            return self.wrap[dim]
        return dim in whole and all(other in whole for other, shift in enumerate(self.twist[dim]) if shift)

    @property
    def speeds(self) -> tuple[float, ...]:
        """For each dimension the bandwidth of its links over that of a link between chips."""
        speeds = (1.0,) * len(self.shape)
        return speeds if self.cores == 1 else (*speeds, self._kind.core_speed)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> int:
        """Number of nodes, that is of devices."""
        return math.prod(self.dims)

    def coords(self) -> Iterator[tuple[int, ...]]:
        """All nodes, row-major: the last dimension runs fastest."""
        return itertools.product(*map(range, self.dims))

    def index(self, coord: Sequence[int]) -> int:
        """The row-major index of a node."""
        self._check(coord)
        return int(np.ravel_multi_index(tuple(coord), self.dims))

    def coord(self, index: int) -> tuple[int, ...]:
        """The node with a row-major index."""
        if not 0 <= index < self.size:
            raise TopologyError(f"mesh.topology={self} has nodes 0 to {self.size - 1}, and no node {index}")
        return tuple(int(place) for place in np.unravel_index(index, self.dims))

    def neighbours(self, coord: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The nodes one link away, in the order of dimensions, down before up."""
        self._check(coord)
        found: dict[tuple[int, ...], None] = {}
        for dim, (size, wrap) in enumerate(zip(self.dims, self.wrap, strict=True)):
            for place in (coord[dim] - 1, coord[dim] + 1):
                if 0 <= place < size or wrap or (self.twisted and any(self.twist[dim])):
                    node = self.node((*coord[:dim], place, *coord[dim + 1 :]))
                    found[tuple(map(int, node))] = None
        return tuple(found)

    def node(self, places: ArrayLike) -> NDArray[np.int64]:
        """The nodes, int64 [..., ndim], at places that may lie beyond the ends of dimensions that close."""
        found = np.array(places, np.int64)
        for dim, shift in enumerate(self.twist):
            if any(shift):
                laps = found[..., dim] // self.dims[dim]
                found += laps[..., None] * np.array(shift)
        return found % np.array(self.dims)

    def distance(self, a: Sequence[int], b: Sequence[int]) -> int:
        """Hops on the shortest way between two nodes."""
        self._check(a)
        self._check(b)
        return int(self.distances(a, b))

    def distances(self, a: ArrayLike, b: ArrayLike) -> NDArray[np.int64]:
        """Hops between nodes [..., ndim] and nodes [..., ndim], broadcast: [...]."""
        return np.abs(self._candidates(a, b)).sum(-1).min(0)

    def ways(self, a: ArrayLike, b: ArrayLike) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """The shortest ways between nodes [..., ndim] and nodes [..., ndim], broadcast.

        Yields:
            Signed steps along each dimension, int64 [..., ndim], and the part of a message that goes this way, float64
            [...]. Of several shortest ways each takes the same part.
        """
        found = self._candidates(a, b)
        hops = np.abs(found).sum(-1)
        opposite = np.array(self.wrap) & (2 * found == np.array(self.dims))
        count = np.where(hops == hops.min(0), 2.0 ** opposite.sum(-1), 0.0)
        for steps, either, part in zip(found, opposite, count / count.sum(0), strict=True):
            if either.any():
                # Loads of one dimension do not depend on which way the others take.
                yield steps, part / 2
                yield np.where(either, -steps, steps), part / 2
            elif part.any():
                yield steps, part

    def _candidates(self, a: ArrayLike, b: ArrayLike) -> NDArray[np.int64]:
        """Steps from a to b, [laps, ..., ndim]: for each number of laps along twisted dimensions the fewest."""
        apart = np.asarray(b, np.int64) - np.asarray(a, np.int64)
        dims = np.array(self.dims)
        steps = apart + self._laps.reshape(-1, *(1,) * (apart.ndim - 1), self.ndim)
        back = (dims - 1) // 2
        return np.where(self.wrap, (steps + back) % dims - back, steps)

    @cached_property
    def _laps(self) -> NDArray[np.int64]:
        """Sums of steps that lead from a node to itself: none, or once round each twisted dimension."""
        found = np.zeros((1, self.ndim), np.int64)
        for dim, shift in enumerate(self.twist):
            if any(shift):
                lap = -np.array(shift)
                lap[dim] = self.dims[dim]
                found = np.concatenate([found - lap, found, found + lap])
        return found

    def _check(self, coord: Sequence[int]) -> None:
        if len(coord) != self.ndim or not all(0 <= place < size for place, size in zip(coord, self.dims, strict=True)):
            nodes = shape_text(self.dims)
            raise TopologyError(f"mesh.topology={self} has no node {tuple(coord)}; its nodes are {nodes}")


def _spelling(shape: Shape, generation: str, twisted: bool) -> str:
    text = shape_text(shape, twisted)
    return f"{generation}:{text}" if generation else text


def _problem(shape: Shape, generation: str, twisted: bool) -> str:
    """What is wrong with a torus, to follow its name; "" if nothing is."""
    if not shape or min(shape) < 1:
        return " has a dimension below 1; write sizes of at least 1, as in 2x2x2"
    kind = GENERATIONS.get(generation)
    if not generation:
        if len(shape) > _MOST_DIMENSIONS:
            return f" has {len(shape)} dimensions; the most is {_MOST_DIMENSIONS}"
        if math.prod(shape) > _MOST_CHIPS:
            return f" has {math.prod(shape)} chips; the most is {_MOST_CHIPS}"
    elif kind is None:
        near = difflib.get_close_matches(generation, GENERATIONS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ";"
        return (
            f": no TPU generation is called {generation!r}{hint} "
            f"there are {', '.join(GENERATIONS)}, or write the sizes alone for chips of any kind"
        )
    elif not kind.admits(shape):
        nearest = ", ".join(shape_text(near) for near in kind.nearest(shape))
        return (
            f" is not a shape of {generation} slices; the nearest are {nearest} "
            f"(or write {shape_text(shape)} alone for chips of any kind)"
        )
    return _twist_problem(shape, kind) if twisted else ""


def _twist_problem(shape: Shape, kind: Generation | None) -> str:
    if kind is not None and not kind.twists:
        return f": {kind.name} slices have no twist; leave out {TWISTED}"
    if twist_of(shape) is None or (kind is not None and not kind.in_cubes(shape)):
        what = "chips" if kind is None else "chips, k a multiple of 4"
        return (
            f" cannot be twisted: that takes k x k x 2k or k x 2k x 2k {what}, as in 4x4x8 and 4x8x8; "
            f"use such a shape, or leave out {TWISTED}"
        )
    return ""
