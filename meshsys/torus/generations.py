"""TPU generations: which slice shapes can be had, where their links wrap around, and what a chip can do.

Source: Google Cloud's TPU documentation (v4, v5p, v5e, v6e, Ironwood); for the number of cubes in a pod the table
of slice shapes in XPK, for the links' bandwidth the scaling book.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshsys.torus.shapes import Shape

__all__ = ["GENERATIONS", "Chip", "Generation"]


_CUBE = 4  # chips along the edge of a cube, the block that optical switches join
_FULL = 16  # the length at which a dimension of a 2-D generation closes on itself


@dataclass(frozen=True)
class Chip:
    """Peak numbers of what JAX shows as a device.

    Attributes:
        flops: bfloat16 floating-point operations a second.
        hbm: bytes of its memory that the compiler lets a program have.
        hbm_bandwidth: bytes a second.
        link_bandwidth: bytes a second of one link, one way.
        hop: seconds that a message takes over one link, however short it is.
    """

    flops: float
    hbm: float
    hbm_bandwidth: float
    link_bandwidth: float
    hop: float = 1e-6


@dataclass(frozen=True)
class Generation:
    """One TPU generation.

    Attributes:
        name: as in `mesh.topology=NAME:4x4x4`.
        chip: peak numbers of a device.
        shapes: the shapes listed one by one, in the order of dimensions that the cloud sells.
        cubes: the most 4x4x4 cubes that one slice joins, in any arrangement; 0 where there are none.
        cores: devices that JAX shows a chip.
        core_speed: bandwidth between the cores of a chip, over that of a link between chips.
        twists: whether slices can be had as twisted tori.
    """

    name: str
    chip: Chip
    shapes: tuple[Shape, ...]
    cubes: int = 0
    cores: int = 1
    core_speed: float = 1.0
    twists: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shapes[0])

    def admits(self, shape: Shape) -> bool:
        """Whether the shape is one that can be had."""
        return shape in self.shapes or (
            len(shape) == self.ndim
            and self.in_cubes(shape)
            and math.prod(size // _CUBE for size in shape) <= self.cubes
        )

    def wrap(self, shape: Shape) -> tuple[bool, ...]:
        """For each dimension whether its last chip is linked to its first.

        Optical switches close a dimension, and they join whole cubes: 2x4x4 is part of a cube and has no
        wraparound, although two of its dimensions are multiples of 4.
        """
        if self.cubes:
            return (self.in_cubes(shape),) * len(shape)
        return tuple(size == _FULL for size in shape)

    def nearest(self, shape: Shape, count: int = 3) -> list[Shape]:
        """The valid shapes that differ least from `shape`, by the ratio of each dimension; rotations first."""

        def difference(valid: Shape) -> tuple[float, float]:
            padded = (shape + (1,) * self.ndim)[: max(self.ndim, len(shape))]
            target = valid + (1,) * (len(padded) - self.ndim)
            return _log_ratio(sorted(padded), sorted(target)), _log_ratio(padded, target)

        return sorted(self._valid(), key=difference)[:count]

    def in_cubes(self, shape: Shape) -> bool:
        """Whether a slice of this shape is made of whole cubes."""
        return bool(self.cubes) and all(size % _CUBE == 0 for size in shape)

    def _valid(self) -> Iterator[Shape]:
        yield from self.shapes
        for cubes in itertools.product(range(1, self.cubes + 1), repeat=2):
            for last in range(1, self.cubes // math.prod(cubes) + 1):
                yield tuple(_CUBE * size for size in (*cubes, last))


def _log_ratio(a: list[int] | Shape, b: list[int] | Shape) -> float:
    return sum(abs(math.log(x / y)) for x, y in zip(a, b, strict=True))


_PARTS_OF_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_GIB = 2.0**30
_V4 = Chip(2.75e14, 30.75 * _GIB, 1.2e12, 4.5e10)
_V5P = Chip(4.59e14, 95.73 * _GIB, 2.765e12, 9e10)
_V5E = Chip(1.97e14, 15.75 * _GIB, 8.1e11, 4.5e10)
_V6E = Chip(9.18e14, 31.24 * _GIB, 1.64e12, 9e10)
_IRONWOOD_CORE = Chip(1.1535e15, 94.74 * _GIB, 3.69e12, 9e10)  # half a chip
_IRONWOOD = Generation("ironwood", _IRONWOOD_CORE, ((1, 1, 1), *_PARTS_OF_A_CUBE), cubes=144, cores=2, core_speed=6.0)

GENERATIONS: dict[str, Generation] = {
    "v4": Generation("v4", _V4, _PARTS_OF_A_CUBE, cubes=64, twists=True),
    "v5p": Generation("v5p", _V5P, _PARTS_OF_A_CUBE, cubes=140, twists=True),
    "v5e": Generation("v5e", _V5E, _FLAT),
    "v6e": Generation("v6e", _V6E, _FLAT),
    "ironwood": _IRONWOOD,
    "v7": _IRONWOOD,
    "tpu7x": _IRONWOOD,
}
"""The generations by the names that `mesh.topology` takes."""
