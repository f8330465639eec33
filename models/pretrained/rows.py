"""Parameters from tensors that are read by rows: those that have to be made from what is stored, as quantised ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from models.pretrained.layouts import Layout
from models.pretrained.source import Index

__all__ = ["Rows", "read_rows"]

Rows = Callable[[slice, slice], np.ndarray]
"""Some rows and columns of a tensor, all but its last dimension taken as rows: float32 [rows, columns]."""

_AT_ONCE = 1 << 22  # values that are read at a time; more would only take memory


def read_rows(layout: Layout, rows: Rows, shape: tuple[int, ...], index: Index, out: np.ndarray) -> None:
    """Writes a part of a parameter to `out`, as `Layout.read`; asks for no more of the tensor than it has to.

    Args:
        layout: whose heads, if they are interleaved, are so in all their dimensions.
        rows: of the tensor; what is asked for is contiguous.
        shape: of the parameter.
        index: of the part.
        out: of the part's shape.
    """
    letters = layout.stored.replace(" ", "")
    order = [layout.canonical.index(letter) for letter in letters]
    # Rows are numbered by two dimensions, outer and inner; of those that are absent there is one place.
    absent = 2 - sum(map(len, layout.stored.split()[:-1]))
    sizes = [1] * absent + [shape[axis] for axis in order]
    outer, inner, *rest = [slice(0, 1)] * absent + [index[axis] for axis in order]
    target = out.transpose(order)[(None,) * absent]
    halved = letters.index(layout.canonical[-1]) + absent if layout.interleaved else None
    step = math.prod(sizes[3:])  # columns of one place in the first dimension that columns hold
    columns = slice(rest[0].start * step, rest[0].stop * step)
    for o, i in _blocks(outer, inner, sizes[1], columns.stop - columns.start, whole=halved == 1):
        block = rows(slice(o.start * sizes[1] + i.start, (o.stop - 1) * sizes[1] + i.stop), columns)
        block = block.reshape(o.stop - o.start, i.stop - i.start, -1, *sizes[3:])
        block = block if halved is None else _halves(block, halved)
        first, last = max(i.start, inner.start), min(i.stop, inner.stop)
        part = block[:, first - i.start : last - i.start, :, *rest[1:]]
        there = slice(o.start - outer.start, o.stop - outer.start), slice(first - inner.start, last - inner.start)
        target[there] = part


def _blocks(outer: slice, inner: slice, size: int, width: int, *, whole: bool) -> Iterator[tuple[slice, slice]]:
    """The rows to read at a time, contiguous ones, as parts of the outer and the inner dimension.

    Args:
        size: of the inner dimension.
        width: columns of a row.
        whole: read all of the inner dimension, though not all is asked for.
    """
    if whole or (inner == slice(0, size) and size * width <= _AT_ONCE):
        step = max(1, _AT_ONCE // (size * width))
        for o in range(outer.start, outer.stop, step):
            yield slice(o, min(o + step, outer.stop)), slice(0, size)
        return
    step = max(1, _AT_ONCE // width)
    for o in range(outer.start, outer.stop):
        for i in range(inner.start, inner.stop, step):
            yield slice(o, o + 1), slice(i, min(i + step, inner.stop))


def _halves(block: np.ndarray, axis: int) -> np.ndarray:
    """Rotary pairs, neighbours on an axis, as halves of it."""
    pairs = block.reshape(*block.shape[:axis], -1, 2, *block.shape[axis + 1 :])
    return pairs.swapaxes(axis, axis + 1).reshape(block.shape)
