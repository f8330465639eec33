"""What happens to one array, and what it takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np

from meshsys.reshard.geometry import Geometry, Side
from meshsys.reshard.routes import Route

__all__ = ["LeafMove"]


@dataclass(frozen=True, eq=False)
class LeafMove:
    """What happens to one array.

    Attributes:
        name: its path in the tree.
        dtypes: before and after.
        pieces: into how many each unit is cut; they move one after another.
    """

    name: str
    source: Side
    destination: Side
    dtypes: tuple[np.dtype, np.dtype]
    geometry: Geometry
    route: Route
    pieces: int = 1

    @functools.cached_property
    def kept(self) -> bool:
        """Every device holds what it is to hold, in the form that it is to have: nothing is done."""
        here = np.arange(len(self.geometry.sender))[:, None]
        units = np.arange(self.geometry.sender.shape[1])
        same = np.array_equal(self.geometry.place, np.broadcast_to(units, self.geometry.place.shape))
        return (
            self.dtypes[0] == self.dtypes[1]
            and self.geometry.source_grid == self.geometry.destination_grid
            and same
            and bool(np.all(self.geometry.sender == here))
            and self.source.block == self.destination.block
        )

    @property
    def wire(self) -> np.dtype:
        """The dtype in which it travels: the narrower of the two."""
        return min(reversed(self.dtypes), key=lambda dtype: dtype.itemsize)

    @property
    def bits(self) -> np.dtype:
        """Unsigned integers as wide as the wire's; booleans and complex numbers, which have no bits to JAX, stay."""
        return self.wire if self.wire.kind in "bc" else np.dtype(f"uint{8 * self.wire.itemsize}")

    @property
    def unit_bytes(self) -> int:
        return math.prod(self.geometry.unit) * self.wire.itemsize

    @property
    def moved_bytes(self) -> int:
        return self.unit_bytes * self.route.moved_units

    @property
    def lower_bound_bytes(self) -> int:
        return self.unit_bytes * self.geometry.moved_units

    @property
    def source_bytes(self) -> int:
        """Of one device's block; `destination_bytes` alike."""
        return math.prod(self.source.block) * self.dtypes[0].itemsize

    @property
    def destination_bytes(self) -> int:
        return math.prod(self.destination.block) * self.dtypes[1].itemsize

    @functools.cached_property
    def transit_bytes(self) -> int:
        """On one device, the most while a piece moves: packed, received, and put in order."""
        if self.kept:
            return 0
        exchanges, pick = self.route.exchanges, self.route.pick
        brought, own = sum(exchange.received for exchange in exchanges), math.prod(self.geometry.source_grid)
        rows = brought + sum(exchange.send.shape[1] for exchange in exchanges)
        if own > 1 or pick.max() >= brought:  # cast and cut to units
            rows += own
        parts = len(exchanges) + int(pick.max() >= brought)
        if parts > 1:
            rows += brought + own
        if np.any(pick != np.arange(pick.shape[1])) or any(size > 1 for size in self.geometry.destination_grid[1:]):
            rows += 2 * pick.shape[1]
        return -(-self.unit_bytes * rows // self.pieces)

    @functools.cached_property
    def key(self) -> tuple:
        """What programs of two arrays have to share to be the same."""
        return self.source.key, self.destination.key, self.dtypes, self.pieces

    def cut(self, pieces: int) -> LeafMove:
        """The same array in at least so many pieces, as far as its units can be cut."""
        sizes = self.geometry.unit
        divisors = [d for size in sizes for d in range(1, size + 1) if size % d == 0]
        enough = min((d for d in divisors if d >= pieces), default=max(divisors, default=1))
        return dataclasses.replace(self, pieces=enough)
