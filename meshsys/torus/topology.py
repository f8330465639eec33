"""A torus of chips: its shape, its links, and distances on them."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshsys.torus.generations import GENERATIONS, Chip, Generation
from meshsys.torus.shapes import Shape, dimension_names, shape_text

__all__ = ["Topology", "TopologyError"]

# Far above any pod; they keep a slip of the finger from filling the memory.
_MOST_CHIPS = 1 << 16
_MOST_DIMENSIONS = 6
_SPEC = re.compile(r"(?:([a-z]\w*)\s*:\s*)?(\d+(?:\s*x\s*\d+)*)")


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

    Raises:
        TopologyError: an unknown generation, or a shape that it does not have.
    """

    shape: Shape
    generation: str = ""

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise TopologyError(f"mesh.topology={self} has a dimension below 1; write sizes of at least 1, as in 2x2x2")
        if not self.generation:
            if len(self.shape) > _MOST_DIMENSIONS:
                raise TopologyError(
                    f"mesh.topology={self} has {len(self.shape)} dimensions; the most is {_MOST_DIMENSIONS}"
                )
            if math.prod(self.shape) > _MOST_CHIPS:
                raise TopologyError(
                    f"mesh.topology={self} has {math.prod(self.shape)} chips; the most is {_MOST_CHIPS}"
                )
            return
        if self.generation not in GENERATIONS:
            near = difflib.get_close_matches(self.generation, GENERATIONS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ";"
            raise TopologyError(
                f"mesh.topology={self}: no TPU generation is called {self.generation!r}{hint} "
                f"there are {', '.join(GENERATIONS)}, or write the sizes alone for chips of any kind"
            )
        if not self._kind.admits(self.shape):
            near = [shape_text(shape) for shape in self._kind.nearest(self.shape)]
            raise TopologyError(
                f"mesh.topology={self} is not a shape of {self.generation} slices; the nearest are "
                f"{', '.join(near)} (or write {shape_text(self.shape)} alone for chips of any kind)"
            )

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Reads "2x2x2" or "v5p:4x4x4".

        Raises:
            TopologyError: the text has another form, or names no possible torus.
        """
        match = _SPEC.fullmatch(text.strip().lower())
        if not match:
            raise TopologyError(
                f"mesh.topology={text!r} is not a torus; write sizes such as 8, 2x2x2, or v5p:4x4x4 for a TPU slice"
            )
        generation, sizes = match.groups()
        return cls(tuple(int(size) for size in sizes.split("x")), generation or "")

    def __str__(self) -> str:
        return f"{self.generation}:{shape_text(self.shape)}" if self.generation else shape_text(self.shape)

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
        """For each dimension whether its last node is linked to its first (never where it is shorter than 3)."""
        wrap = self._kind.wrap(self.shape) if self.generation else (True,) * len(self.shape)
        return tuple(size > 2 and closed for size, closed in itertools.zip_longest(self.dims, wrap, fillvalue=False))

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
                if wrap or 0 <= place < size:
                    found[(*coord[:dim], place % size, *coord[dim + 1 :])] = None
        return tuple(found)

    def distance(self, a: Sequence[int], b: Sequence[int]) -> int:
        """Hops on the shortest way between two nodes."""
        self._check(a)
        self._check(b)
        return int(self.distances(a, b))

    def distances(self, a: ArrayLike, b: ArrayLike) -> NDArray[np.int64]:
        """Hops between nodes [..., ndim] and nodes [..., ndim], broadcast: [...]."""
        steps = np.abs(np.asarray(a, np.int64) - np.asarray(b, np.int64))
        return np.where(self.wrap, np.minimum(steps, np.asarray(self.dims) - steps), steps).sum(-1)

    def _check(self, coord: Sequence[int]) -> None:
        if len(coord) != self.ndim or not all(0 <= place < size for place, size in zip(coord, self.dims, strict=True)):
            nodes = shape_text(self.dims)
            raise TopologyError(f"mesh.topology={self} has no node {tuple(coord)}; its nodes are {nodes}")
