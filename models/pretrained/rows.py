"""Parameters from tensors that are read by rows: those that have to be made from what is stored, as quantised ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from models.pretrained.layouts import Layout
from models.pretrained.source import Index

__all__ = ["Rows", "read_rows"]

Rows = Callable[[int, int], np.ndarray]
"""Rows `start` to `stop` of a tensor, all but its last dimension taken as one: float32 [stop - start, in]."""

_AT_ONCE = 1 << 22  # values that are read at a time; more would only take memory


def read_rows(layout: Layout, rows: Rows, shape: tuple[int, ...], index: Index, out: np.ndarray) -> None:
    """Writes a part of a parameter to `out`, as `Layout.read`; asks for no more rows than it has to.

    Args:
        layout: whose heads, if they are interleaved, are so in all their dimensions.
        rows: of the tensor.
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
    for o, i in _blocks(outer, inner, sizes, whole=halved == 1):
        block = rows(o.start * sizes[1] + i.start, (o.stop - 1) * sizes[1] + i.stop)
        block = block.reshape(o.stop - o.start, i.stop - i.start, *sizes[2:])
        block = block if halved is None else _halves(block, halved)
        first, last = max(i.start, inner.start), min(i.stop, inner.stop)
        part = block[:, first - i.start : last - i.start, *rest]
        there = slice(o.start - outer.start, o.stop - outer.start), slice(first - inner.start, last - inner.start)
        target[there] = part


def _blocks(outer: slice, inner: slice, sizes: list[int], *, whole: bool) -> Iterator[tuple[slice, slice]]:
    """The rows to read at a time, contiguous ones, as parts of the outer and the inner dimension.

    Args:
        whole: read all of the inner dimension, though not all is asked for.
    """
    size, width = sizes[1], math.prod(sizes[2:])
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
