"""Free boxes of a torus."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.pod import Pod

__all__ = ["box_nodes", "first_free", "free_boxes", "padded", "rotations", "touched"]


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
    room = free_boxes(pod, box)
    if room is None:
        return None
    return tuple(int(place) for place in np.unravel_index(int(room.argmax()), pod.dims))


def free_boxes(pod: Pod, box: tuple[int, ...]) -> NDArray[np.bool_] | None:
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


def touched(pod: Pod, box: Sequence[int]) -> NDArray[np.int64]:
    """How many free chips are next to a box, for every corner: int64 [*dims]."""
    free = pod.free_nodes.astype(np.int64)
    around = np.zeros(pod.dims, np.int64)
    for dim, (side, size) in enumerate(zip(box, pod.dims, strict=True)):
        if side == size:
            continue
        face = free
        for other, long in enumerate(box):
            if other != dim:
                face = _summed(face, other, long)
        if not pod.wrap[dim]:  # no neighbours beyond the ends
            edge = np.zeros((*face.shape[:dim], 1, *face.shape[dim + 1 :]), np.int64)
            face = np.concatenate([edge, face, np.repeat(edge, side, dim)], dim)
            below = np.take(face, range(size), dim)
            above = np.take(face, range(side + 1, side + 1 + size), dim)
            around += below + above
        else:
            around += np.roll(face, 1, dim)
            if side + 1 < size:
                around += np.roll(face, -side, dim)
    return around


def _summed(counts: NDArray[np.int64], dim: int, long: int) -> NDArray[np.int64]:
    """Sums of `long` in a row along a dimension, around its end."""
    if long == 1:
        return counts
    size = counts.shape[dim]
    around = np.concatenate([counts, np.take(counts, range(long - 1), dim)], dim)
    total = np.concatenate([np.zeros_like(np.take(counts, [0], dim)), around.cumsum(dim)], dim)
    return np.take(total, range(long, size + long), dim) - np.take(total, range(size), dim)
