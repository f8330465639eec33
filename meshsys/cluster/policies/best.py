"""The placement that leaves the most room."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.assembly import assemblies
from meshsys.cluster.chains import best_product, chains, menu
from meshsys.cluster.cubes import Cubes
from meshsys.cluster.factors import factorisations
from meshsys.cluster.gather import gather
from meshsys.cluster.grant import Grant
from meshsys.cluster.pieces import View
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies.base import Cached, Shape, Wrap
from meshsys.cluster.policies.boxes import box_nodes, free_boxes, rotations, touched
from meshsys.cluster.wiring import grant

__all__ = ["Best"]

Ints = NDArray[np.int64]
Laid = tuple[int, Ints, str, tuple[int, ...]]  # cost, chips, fold, rotation
_BOXES = 8  # boxes a shape on a torus, the most compact
_VIEWS = 3  # pods whose cubes are remembered
_SPARE = 16  # positions that a line may be short of its box


class Best(Cached):
    """Exact folds only; the fewest newly broken cubes, then the piece that touches the fewest free chips.

    On cubes a job is laid as a chain through whole cubes and one piece of another, or as a box of chunks, in every
    way that joins same positions of opposite faces; so it is wireable whatever the switches can do. On a torus it is
    laid in the box that lies closest among others.

    Rings that are asked for are closed wherever any fold closes them; others where it costs nothing.
    """

    name = "best"

    def __init__(self) -> None:
        super().__init__()
        self._views: list[tuple[View, int]] = []  # the youngest last

    def place(self, pod: Pod, shape: Shape, wrap: Wrap = None) -> Grant | None:
        if math.prod(shape) > pod.free:
            return None
        asked = tuple(ring and side > 2 for ring, side in zip(wrap or (False,) * len(shape), shape, strict=True))
        rings = asked
        while not _known(pod, shape, rings) and any(rings):
            # No fold closes them all: the ring of the shortest dimension is laid along a line.
            shortest = min((dim for dim, ring in enumerate(rings) if ring), key=lambda dim: shape[dim])
            rings = (*rings[:shortest], False, *rings[shortest + 1 :])
        if pod.cubes is not None and pod.ndim == 3:
            laid = _on_cubes(self._view_of(pod.cubes), shape, rings)
        else:
            laid = _on_torus(pod, shape, rings)
        if laid is None:
            return None
        found = grant(pod, laid[1], rings, laid[2], laid[3])
        for dim, side in enumerate(shape):
            if asked[dim] and not found.wrap[dim]:
                # A ring along a line, by every second chip there and the others back: all neighbours 2 links apart.
                order = [*range(0, side, 2), *range(side - 1 - side % 2, 0, -2)]
                fold = f"{found.fold}, {side} there and back over a line"
                found = replace(found, nodes=np.take(found.nodes, order, dim), fold=fold, dilation=2)
        return found

    def _view_of(self, cubes: Cubes) -> View:
        """The same one while nothing changes: a queue asks for many shapes, of a pod and of copies of it."""
        for view, changes in self._views:
            if view.cubes is cubes and changes == cubes.changes:
                return view
        others = [(view, changes) for view, changes in self._views if view.cubes is not cubes]
        self._views = [*others[1 - _VIEWS :], (View(cubes), cubes.changes)]
        return self._views[-1][0]


def _known(pod: Pod, shape: Shape, wrap: tuple[bool, ...]) -> bool:
    """Whether an empty pod has a place for the shape with these rings."""
    if pod.cubes is not None and pod.ndim == 3:
        ways = menu(shape, wrap, pod.cubes.side)
        few = ways is not None and ways.whole + (ways.pieces is not None) <= pod.cubes.count
        return few or assemblies(shape, wrap, pod.cubes.side, pod.cubes.count) is not None
    return bool(_boxes(shape, wrap, pod.dims, pod.wrap))


def _on_cubes(view: View, shape: Shape, wrap: tuple[bool, ...]) -> Laid | None:
    cubes = view.cubes
    best: Laid | None = None
    ways = menu(shape, wrap, cubes.side)
    if ways is not None and ways.pieces is not None and ways.whole <= len(view.empty):
        found = ways.pieces.best(view, spare=len(view.empty) > ways.whole)
        if found is not None:
            cost, piece, cube = found
            whole = view.empty[: ways.whole].tolist()
            best = (cost, *ways.nodes(cubes, whole, piece, cube if cube >= 0 else int(view.empty[ways.whole])))
    if best is None or best[0] > 0:
        boxes = assemblies(shape, wrap, cubes.side, cubes.count)
        put = boxes.best(view) if boxes is not None else None
        if put is not None and (best is None or put[0] < best[0]):
            cost, assembly, taken, parts = put
            best = cost, assembly.nodes(cubes, taken, parts), assembly.product.how, assembly.product.rotation
    if (best is None or best[0] > 0) and ways is not None and ways.pieces is None and ways.whole <= len(view.empty):
        return 0, *ways.nodes(cubes, view.empty[: ways.whole].tolist(), -1, -1)
    if best is None:
        for chain in chains(shape, wrap, cubes.side):
            if chain.doubled == wrap[chain.along]:
                nodes = gather(view, chain)
                if nodes is not None:
                    return 0, nodes, chain.how(), ()
    return best


@lru_cache(1 << 12)
def _boxes(
    shape: Shape, wrap: tuple[bool, ...], dims: Shape, dims_wrap: tuple[bool, ...]
) -> tuple[tuple[Shape, Ints, str, Shape], ...]:
    """Boxes of a torus that the shape folds to, the most compact first.

    A shape that folds to none may leave some chips of a box over: the longest dimension that is no ring ends early.
    """
    found = _full_boxes(shape, wrap, dims, dims_wrap)
    lines = [dim for dim, ring in enumerate(wrap) if not ring]
    if found or not lines:
        return found
    longest = max(lines, key=lambda dim: shape[dim])
    for more in range(1, _SPARE + 1):
        longer = (*shape[:longest], shape[longest] + more, *shape[longest + 1 :])
        found = _full_boxes(longer, wrap, dims, dims_wrap)
        if found:
            kept = (slice(None),) * longest + (slice(shape[longest]),)
            return tuple((box, places[kept], f"{how}, {more} short", rot) for box, places, how, rot in found)
    return ()


def _full_boxes(
    shape: Shape, wrap: tuple[bool, ...], dims: Shape, dims_wrap: tuple[bool, ...]
) -> tuple[tuple[Shape, Ints, str, Shape], ...]:
    found = []
    for sides in sorted(factorisations(math.prod(shape), len(dims)), key=lambda sides: (sum(sides), sides)):
        some = []
        for box, _ in rotations(sides):
            if any(side > size for side, size in zip(box, dims, strict=True)):
                continue
            closed = tuple(w and side == size for w, side, size in zip(dims_wrap, box, dims, strict=True))
            product = best_product(shape, wrap, box, closed)
            if product is not None:
                some.append((box, product.places(), product.how, product.rotation))
        found.append(some)
        if sum(map(bool, found)) == _BOXES:
            break
    return tuple(box for some in found for box in some)


def _on_torus(pod: Pod, shape: Shape, wrap: tuple[bool, ...]) -> Laid | None:
    best: Laid | None = None
    sides: list[int] = []
    for box, places, how, rotation in _boxes(shape, wrap, pod.dims, pod.wrap):
        if best is not None and sorted(box) != sides:
            break
        room = free_boxes(pod, box)
        if room is None:
            continue
        costs = np.where(room, touched(pod, box), pod.size)
        at = int(costs.argmin())
        if best is None or costs.flat[at] < best[0]:
            sides = sorted(box)
            corner = pod.coords[at].tolist()
            chips = box_nodes(pod, corner, box)[tuple(np.moveaxis(places, -1, 0))]
            best = int(costs.flat[at]), chips, how, rotation
    return best
