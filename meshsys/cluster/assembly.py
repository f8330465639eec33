"""Boxes put together from chunks of several cubes, so that switches which join only same positions can do it.

Along a dimension that is shorter than a cube, all chunks lie at the same place of their cubes. Along a longer one
that is no multiple of the cube, the partial chunks are at one end of the box, and so lie at the face of their cubes
that looks to the others. Where a dimension is a multiple, the last cube is joined to the first: a ring.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.chains import best_product
from meshsys.cluster.cubes import Cubes, box_mask
from meshsys.cluster.factors import factorisations
from meshsys.cluster.folds import Product
from meshsys.cluster.pieces import BROKEN, Pieces, View

__all__ = ["Assemblies", "Assembly", "assemblies"]

Ints = NDArray[np.int64]
Shape = tuple[int, ...]
Wraps = tuple[bool, ...]

_FOLDS = 6  # boxes a shape, those that need fewest cubes
_LOOKED_AT = 200  # boxes to find them among
_EXACT = 8  # of the assemblies that promise most, how many are tried


@dataclass(frozen=True)
class _Segments:
    """The equal segments of one dimension of a box: where in their cubes they lie, how long, and where in the box."""

    offset: int
    length: int
    starts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Assembly:
    """One box, in one rotation, with its chunks at certain places.

    Attributes:
        product: of the shape in the box.
        axes: how each dimension is cut.
    """

    product: Product
    axes: tuple[tuple[_Segments, ...], ...]

    def nodes(self, cubes: Cubes, whole: Sequence[int], parts: Sequence[Sequence[int]]) -> Ints:
        """Chips in the order of the shape, from a cube for each chunk."""
        room = np.empty(self.product.box, np.int64)
        cubes_of = iter(parts)
        for segments in itertools.product(*self.axes):
            held = whole if _is_whole(segments, cubes.side) else next(cubes_of)
            local = tuple(slice(one.offset, one.offset + one.length) for one in segments)
            starts = itertools.product(*(one.starts for one in segments))
            for start, cube in zip(starts, held, strict=True):
                here = tuple(slice(at, at + one.length) for at, one in zip(start, segments, strict=True))
                room[here] = cubes.nodes[cube].reshape((cubes.side,) * 3)[local]
        return room[tuple(np.moveaxis(self.product.places(), -1, 0))]


def _is_whole(segments: tuple[_Segments, ...], side: int) -> bool:
    return all(one.length == side for one in segments)


def _count(segments: tuple[_Segments, ...]) -> int:
    return math.prod(len(one.starts) for one in segments)


class Assemblies:
    """All assemblies of one shape.

    Attributes:
        all: the assemblies.
        pieces: the partial chunks of all of them.
        whole: int64 [assemblies]: whole cubes.
        piece: int64 [assemblies, 7]: of each kind of partial chunk the piece.
        need: int64 [assemblies, 7]: and how many; 0 where there are fewer kinds.
    """

    def __init__(self, found: Sequence[Assembly], side: int) -> None:
        self.all = found
        self.piece = np.zeros((len(found), 7), np.int64)
        self.need = np.zeros((len(found), 7), np.int64)
        self.whole = np.zeros(len(found), np.int64)
        masks: dict[tuple[Shape, Shape], int] = {}
        for i, one in enumerate(found):
            kind = 0
            for segments in itertools.product(*one.axes):
                if _is_whole(segments, side):
                    self.whole[i] = _count(segments)
                    continue
                key = (tuple(one.offset for one in segments), tuple(one.length for one in segments))
                self.piece[i, kind], self.need[i, kind] = masks.setdefault(key, len(masks)), _count(segments)
                kind += 1
        words = np.array([box_mask(side, *key) for key in masks], np.uint64).reshape(len(masks), -(-(side**3) // 64))
        self.pieces = Pieces(side, words, np.zeros(len(masks), np.int64))

    def best(self, view: View) -> tuple[int, Assembly, list[int], list[list[int]]] | None:
        """Cost, assembly, whole cubes, and the cubes of each kind of chunk; those that leave most room."""
        pieces, count = self.pieces, len(view.partial)
        able = np.flatnonzero(self.whole <= len(view.empty))
        if not len(able):
            return None
        if not len(pieces.masks):
            return 0, self.all[int(able[0])], view.empty[: self.whole[able[0]]].tolist(), []
        fitting = pieces.held(view, view.partial)
        held = fitting.sum(1)
        kind, need = self.piece[able], self.need[able]
        partial = np.minimum(need, held[kind])
        broken = need - partial
        fits = np.flatnonzero(broken.sum(1) + self.whole[able] <= len(view.empty))
        if not len(fits):
            return None
        piece, cube = np.nonzero(fitting)
        costs = np.full(fitting.shape, BROKEN, np.int64)
        costs[piece, cube] = pieces.costs(view, piece, view.partial[cube])
        order = costs.argsort(1, kind="stable")
        sums = np.zeros((len(costs), count + 1), np.int64)
        np.cumsum(np.take_along_axis(costs, order, 1), 1, out=sums[:, 1:])
        bound = (sums[kind, partial] + broken * (BROKEN + pieces.fresh[kind])).sum(1)
        best = None
        for at in fits[np.argsort(bound[fits], kind="stable")[:_EXACT]]:
            if best is not None and bound[at] >= best[0]:
                break
            found = self._assign(int(able[at]), view, costs, order, held)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        return best

    def _assign(
        self, number: int, view: View, costs: Ints, order: Ints, held: Ints
    ) -> tuple[int, Assembly, list[int], list[list[int]]] | None:
        """Every chunk a cube of its own; kinds that fit into fewest cubes choose first."""
        empty = view.empty.tolist()
        whole, rest = empty[: self.whole[number]], empty[self.whole[number] :]
        pieces, needs = self.piece[number].tolist(), self.need[number].tolist()
        used: set[int] = set()
        parts: list[list[int]] = [[] for need in needs if need]
        total = 0
        for kind in sorted(range(len(parts)), key=lambda kind: held[pieces[kind]]):
            piece = pieces[kind]
            for column in order[piece, : held[piece]].tolist():
                if len(parts[kind]) == needs[kind]:
                    break
                if column not in used:
                    used.add(column)
                    parts[kind].append(int(view.partial[column]))
                    total += int(costs[piece, column])
            missing = needs[kind] - len(parts[kind])
            if missing > len(rest):
                return None
            parts[kind] += rest[:missing]
            rest = rest[missing:]
            total += missing * (BROKEN + int(self.pieces.fresh[piece]))
        return total, self.all[number], whole, parts


@lru_cache(1 << 12)
def assemblies(shape: Shape, wrap: Wraps, side: int, cubes: int) -> Assemblies | None:
    """Those of the boxes that need fewest cubes; None where there is none."""
    size = math.prod(shape)
    boxes = [
        (math.prod(-(-length // side) for length in box), box)
        for box in {*factorisations(size, 3), *([tuple(sorted(shape))] if len(shape) == 3 else [])}
    ]
    found: list[Assembly] = []
    folds = 0
    own = tuple(sorted(shape))
    fitting = sorted((need, box != own, box) for need, box in boxes if 1 < need <= cubes)
    for *_, box in fitting[:_LOOKED_AT]:
        if not all(any(size % length == 0 for size in shape) or length == side == 4 for length in box):
            continue
        best = best_product(shape, wrap, box, tuple(length > 2 and length % side == 0 for length in box))
        if best is None:
            continue
        seen = set()
        for order in itertools.permutations(range(3)):
            turned = best.turned(order)
            if turned.box not in seen:
                seen.add(turned.box)
                found += _placed(turned, side)
        folds += 1
        if folds == _FOLDS:
            break
    return Assemblies(found, side) if found else None


def _placed(product: Product, side: int) -> list[Assembly]:
    """The box with its partial chunks at all places they can have."""
    choices: list[list[tuple[_Segments, ...]]] = []
    for length in product.box:
        rest = length % side
        if length < side:
            choices.append([(_Segments(offset, length, (0,)),) for offset in range(side - length + 1)])
        elif not rest:
            choices.append([(_Segments(0, side, tuple(range(0, length, side))),)])
        else:
            first = _Segments(0, side, tuple(range(0, length - rest, side))), _Segments(0, rest, (length - rest,))
            last = _Segments(0, side, tuple(range(rest, length, side))), _Segments(side - rest, rest, (0,))
            choices.append([first, last])
    return [Assembly(product, axes) for axes in itertools.product(*choices)]
