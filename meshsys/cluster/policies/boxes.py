"""Free boxes of a torus."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.pod import Pod

__all__ = ["box_nodes", "first_free", "free_corners", "padded", "rotations"]


def padded(shape: Sequence[int], ndim: int) -> tuple[int, ...] | None:
    """The shape with as many dimensions as the pod; None where it has more that are longer than 1."""
    if len(shape) <= ndim:
        return (*shape, *(1,) * (ndim - len(shape)))
    long = [side for side in shape if side > 1]
    return None if len(long) > ndim else padded(long, ndim)


def rotations(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (no two the same), each with the dimension of the box that each dimension of the shape runs along."""
    seen = set()
    for order in itertools.permutations(range(len(shape))):
        box = tuple(shape[dim] for dim in order)
        if box not in seen:
            seen.add(box)
            yield box, tuple(order.index(dim) for dim in range(len(shape)))


def first_free(pod: Pod, box: tuple[int, ...]) -> tuple[int, ...] | None:
    """The first corner, lexicographic, from which a box is free; it may reach around where the torus wraps."""
    room = _corners(pod, box)
    if room is None:
        return None
    return tuple(int(place) for place in np.unravel_index(int(room.argmax()), pod.dims))


def free_corners(pod: Pod, box: tuple[int, ...]) -> NDArray[np.int64]:
    """All corners from which a box is free: int64 [corners, dimensions]."""
    room = _corners(pod, box)
    return np.argwhere(room) if room is not None else np.empty((0, pod.ndim), np.int64)


def _corners(pod: Pod, box: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Where the corner of a free box can be: bool [*dims]; None where nowhere."""
    if math.prod(box) > pod.free or any(side > size for side, size in zip(box, pod.dims, strict=True)):
        return None
    room = pod.free_nodes
    for dim, side in enumerate(box):
        room = _runs(room, dim, side, pod.wrap[dim] or side == pod.dims[dim])
        if not room.any():
            return None
    return room


def _runs(room: NDArray[np.bool_], dim: int, side: int, wraps: bool) -> NDArray[np.bool_]:
    """Where `side` places in a row along `dim` are all marked; doubles the row's length each time."""
    length, size = 1, room.shape[dim]
    while length < side:
        step = min(length, side - length)
        room = room & _shifted(room, dim, step)
        length += step
    if not wraps and side > 1:
        room = room.copy() if not room.flags.writeable else room
        room[(slice(None),) * dim + (slice(size - side + 1, None),)] = False
    elif side == size and side > 1:
        room = room.copy() if not room.flags.writeable else room
        room[(slice(None),) * dim + (slice(1, None),)] = False
    return room


def _shifted(room: NDArray[np.bool_], dim: int, step: int) -> NDArray[np.bool_]:
    before = (slice(None),) * dim
    return np.concatenate([room[(*before, slice(step, None))], room[(*before, slice(None, step))]], dim)


def box_nodes(pod: Pod, corner: Sequence[int], box: Sequence[int]) -> NDArray[np.int64]:
    """Chips of a box, int64 [*box]."""
    places = [(start + np.arange(side)) % size for start, side, size in zip(corner, box, pod.dims, strict=True)]
    return np.ravel_multi_index(tuple(np.meshgrid(*places, indexing="ij")), pod.dims)
