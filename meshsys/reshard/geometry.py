"""Which parts of an array each device holds before and after, and from whom it gets those it lacks.

Both layouts cut every dimension of the array at their own places. Between all these places lies a grid of equal boxes,
the units: each device's block is a grid of whole units in either layout, and a unit is the smallest thing that moves.

Layers that are stacked by stage ([P, V, J, ...], `schedules.stages`) count as the same array by layer ([L, ...]):
the first three dimensions of a block are one, whose places hold runs of successive layers.

Shapes: N devices, T units of a destination block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Sharding

__all__ = ["Geometry", "Side", "intersect"]


@dataclass(frozen=True, eq=False)
class Side:
    """An array in one of the two layouts.

    Attributes:
        shape: of the whole array in this layout.
        table: global layer numbers of the places of a stack by stage, int32 [P, V, J], -1 in unused places; None for
            any other array.
    """

    shape: tuple[int, ...]
    sharding: Sharding
    table: np.ndarray | None = None

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of a device's block."""
        return self.sharding.shard_shape(self.shape)

    @property
    def key(self) -> tuple:
        """What two sides have to share to be the same layout."""
        return self.shape, self.sharding, None if self.table is None else (self.table.shape, self.table.tobytes())

    def places(self, devices: Sequence[jax.Device]) -> list[list[np.ndarray]]:
        """For each device and dimension, the global numbers of the block's places; -1 for unused ones."""
        indices = self.sharding.devices_indices_map(self.shape)
        return [self._places(indices[device]) for device in devices]

    def _places(self, index: tuple[slice, ...]) -> list[np.ndarray]:
        ranges = [np.arange(size)[part] for part, size in zip(index, self.shape, strict=True)]
        if self.table is None:
            return ranges
        return [self.table[np.ix_(*ranges[:3])].reshape(-1), *ranges[3:]]


@dataclass(frozen=True, eq=False)
class Geometry:
    """An array between two layouts.

    Attributes:
        unit: the shape of a unit.
        source_grid: units of a block in each dimension; `destination_grid` alike.
        sender: the device that a destination block's unit comes from, int [N, T], row-major in the grid; -1 where no
            layer takes the place, which holds zeros. A device that holds a unit sends it to itself.
        place: the unit's number in the sender's grid, int [N, T].
    """

    unit: tuple[int, ...]
    source_grid: tuple[int, ...]
    destination_grid: tuple[int, ...]
    sender: np.ndarray
    place: np.ndarray

    @property
    def moved_units(self) -> int:
        """Units that a device needs and does not hold, over all devices."""
        return int(np.sum((self.sender >= 0) & (self.sender != np.arange(len(self.sender))[:, None])))


def intersect(source: Side, destination: Side, devices: Sequence[jax.Device]) -> Geometry:
    """Finds the units, and who sends each.

    Of several holders of a unit the one sends it that is in the receiver's own replica of the source: who is the k-th
    holder of its own block asks the k-th holder of any other. So replicas exchange among themselves, evenly.
    """
    if not source.shape:
        here = np.arange(len(devices))[:, None]
        return Geometry((1,), (1,), (1,), here, np.zeros_like(here))
    before, after = source.places(devices), destination.places(devices)
    dims = range(len(before[0]))
    both = [*before, *after]
    unit = tuple(math.gcd(*(cut for places in both for cut in _cuts(places[k]))) for k in dims)
    held = [[_units(places[k], unit[k]) for k in dims] for places in before]
    wanted = [[_units(places[k], unit[k]) for k in dims] for places in after]
    counts = [1 + max(int(parts[k].max(initial=-1)) for parts in [*held, *wanted]) for k in dims]

    cells: dict[bytes, list[int]] = {}
    for device, parts in enumerate(held):
        cells.setdefault(b"|".join(part.tobytes() for part in parts), []).append(device)
    holders = list(cells.values())
    replica = {device: number for held_by in holders for number, device in enumerate(held_by)}
    # Of every unit: the cell that holds it, and its place in the grid of a block there.
    cell, place = np.full(counts, -1), np.full(counts, -1)
    for which, (first, *_) in enumerate(holders):
        used = [np.flatnonzero(part >= 0) for part in held[first]]
        grid = [len(part) for part in held[first]]
        at = np.ix_(*(part[one] for part, one in zip(held[first], used, strict=True)))
        cell[at] = which
        place[at] = np.arange(math.prod(grid)).reshape(grid)[np.ix_(*used)]

    senders, places = [], []
    for device, parts in enumerate(wanted):
        at = np.ix_(*parts)  # an unused place reads the last entry, and is put right below
        unused = np.zeros([len(part) for part in parts], bool)
        for k, part in enumerate(parts):
            unused |= (part < 0).reshape([-1 if dim == k else 1 for dim in dims])
        from_cell = [held_by[replica[device] % len(held_by)] for held_by in holders]
        sender = np.asarray(from_cell)[cell[at]]
        senders.append(np.where(unused, -1, sender).reshape(-1))
        places.append(np.where(unused, 0, place[at]).reshape(-1))
    source_grid, destination_grid = (tuple(len(part) for part in side[0]) for side in (held, wanted))
    return Geometry(unit, source_grid, destination_grid, np.stack(senders), np.stack(places))


def _cuts(places: np.ndarray) -> list[int]:
    """Where runs of successive places begin and end, locally and globally."""
    if not len(places):
        return [0]
    breaks = np.flatnonzero(np.diff(places) != np.where(places[:-1] < 0, 0, 1)) + 1
    starts, ends = [0, *map(int, breaks)], [*map(int, breaks), len(places)]
    used = [(start, end) for start, end in zip(starts, ends, strict=True) if places[start] >= 0]
    local = [*starts, *ends]
    return [*local, *(int(places[start]) for start, _ in used), *(int(places[end - 1]) + 1 for _, end in used)]


def _units(places: np.ndarray, unit: int) -> np.ndarray:
    """Global numbers of a block's units in one dimension; -1 for unused ones."""
    first = places[::unit] if unit else places
    return np.where(first < 0, -1, first // max(unit, 1))
