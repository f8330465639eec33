"""A placement: which node of the torus each position of the logical mesh is."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.axes import assign
from meshsys.torus.topology import Topology, TopologyError
from meshsys.torus.traffic import AXES, Flow, Traffic, relevant

__all__ = ["Placement", "place", "placed"]


@dataclass(frozen=True, eq=False)
class Placement:
    """Logical axes on a torus.

    Attributes:
        topology: the torus.
        axes: (name, size) of each of `AXES`, in that order.
        coords: int64 [pipe, data, fsdp, expert, context, tensor, ndim], read-only: the node of each position.
        dims: (name, what it runs along) of each axis: "x", "y*z" (a walk through both), "x:2" (2 of x),
            "snake(x*y)" (a walk that leaves nodes out, or that axes share), "-" for an axis of size 1.

    Raises:
        TopologyError: a position outside the torus, or two positions on one node.
    """

    topology: Topology
    axes: tuple[tuple[str, int], ...]
    coords: NDArray[np.int64]
    dims: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if tuple(name for name, _ in self.axes) != AXES or tuple(name for name, _ in self.dims) != AXES:
            raise TopologyError(f"a placement has the axes {', '.join(AXES)}, in this order")
        if self.coords.shape != (*self.shape, self.topology.ndim):
            raise TopologyError(f"coords of shape {self.coords.shape} do not fit the axes {self.shape}")
        if not np.all((self.coords >= 0) & (self.coords < np.array(self.topology.dims))):
            raise TopologyError(f"a position lies outside mesh.topology={self.topology}")
        if len(np.unique(self.indices)) != self.size:
            raise TopologyError(f"two positions lie on one node of mesh.topology={self.topology}")
        self.coords.setflags(write=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, in the order of `AXES`."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Nodes in use."""
        return math.prod(self.shape)

    @property
    def indices(self) -> NDArray[np.int64]:
        """Row-major index in the torus of each position: int64 [pipe, data, fsdp, expert, context, tensor]."""
        return np.asarray(np.ravel_multi_index(tuple(np.moveaxis(self.coords, -1, 0)), self.topology.dims), np.int64)

    @property
    def box(self) -> tuple[int, ...]:
        """The sub-slice that holds all positions: nodes along each dimension of the torus."""
        nodes = self.coords.reshape(-1, self.topology.ndim)
        return tuple(int(side) for side in nodes.max(0) - nodes.min(0) + 1)

    def hops(self, axis: str) -> int:
        """The most links between consecutive positions along an axis; 0 for an axis of size 1."""
        line = self._along(axis)
        return int(self.topology.distances(line[1:], line[:-1]).max(initial=0))

    def closes(self, axis: str) -> int:
        """The most links from the last position along an axis to the first; 1 is a ring, 0 an axis of size 1."""
        line = self._along(axis)
        return int(self.topology.distances(line[-1], line[0]).max())

    def _along(self, axis: str) -> NDArray[np.int64]:
        return np.moveaxis(self.coords, AXES.index(axis), 0)


def placed(topology: Topology, axes: Mapping[str, int], coords: NDArray[np.int64]) -> Placement:
    """An order that was found elsewhere, with the dimensions that its axes run along.

    Args:
        coords: [pipe, data, fsdp, expert, context, tensor, ndim], the node of each position.

    Raises:
        TopologyError: axes or nodes that do not fit.
    """
    sizes = _checked(topology, axes)
    dims = []
    for axis, (name, size) in enumerate(sizes.items()):
        line = np.moveaxis(coords, axis, 0).reshape(size, -1, topology.ndim)[:, 0]
        sides = [len(np.unique(places)) for places in line.T]
        parts = [
            each if side == room else f"{each}:{side}"
            for each, side, room in zip(topology.names, sides, topology.dims, strict=True)
            if side > 1
        ]
        text = "*".join(parts) if math.prod(sides) == size else f"snake({'*'.join(parts)})"
        dims.append((name, text or "-"))
    return Placement(topology, tuple(sizes.items()), coords, tuple(dims))


def place(topology: Topology, axes: Mapping[str, int], traffic: Iterable[Flow] = ()) -> Placement:
    """Puts logical axes on a torus, so that what they send takes the least time.

    Axes whose product is smaller than the torus take a sub-slice of it, at the origin. The traffic's seconds by the
    closed forms count first, where it is known and the torus is one of a generation, among layouts that keep what the
    compiler sums along several dimensions (`meshsys.torus.axes`). Then, or else, hops along each axis (those of pipe
    and tensor most), then hops that close each axis to a ring, then whole dimensions before parts of them, then the
    extent of the sub-slice.

    Args:
        topology: the torus.
        axes: sizes by name; an axis that is missing has size 1.
        traffic: what a step sends.

    Raises:
        TopologyError: an unknown axis, a size below 1, or more positions than nodes.
    """
    sizes = _checked(topology, axes)
    return _place(topology, tuple(sizes.items()), relevant(traffic, sizes))


@lru_cache(maxsize=128)
def _place(topology: Topology, axes: tuple[tuple[str, int], ...], traffic: Traffic) -> Placement:
    sizes = dict(axes)
    assignment = assign(topology, [(name, size) for name, size in axes if size > 1], traffic)
    dims = assignment.dims()
    return Placement(
        topology,
        tuple(sizes.items()),
        assignment.coords().reshape(*sizes.values(), topology.ndim),
        tuple((name, dims.get(name, "-")) for name in AXES),
    )


def _checked(topology: Topology, axes: Mapping[str, int]) -> dict[str, int]:
    for name, size in axes.items():
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? The axes" if near else "the axes"
            raise TopologyError(f"mesh.axes.{name}={size}: no axis has this name; {hint} are {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise TopologyError(f"mesh.axes.{name}={size} is not a size; write a whole number of at least 1")
    sizes = {name: axes.get(name, 1) for name in AXES}
    total = math.prod(sizes.values())
    if total > topology.size:
        used = {name: size for name, size in sizes.items() if size > 1}
        fits = {name: topology.size // (total // size) for name, size in used.items()}
        alone = [f"{name} at most {most}" for name, most in fits.items() if most]
        way = f"with the others as they are, {' or '.join(alone)}" if alone else "lower several axes"
        raise TopologyError(
            f"{', '.join(f'mesh.axes.{name}={size}' for name, size in used.items())}: that is {total} devices, but "
            f"mesh.topology={topology} has {topology.size}; {way}, or a larger mesh.topology"
        )
    return sizes
