"""Folds: a logical mesh or torus laid on a box of chips so that logical neighbours are linked.

A mesh is a product of lines and rings, and so is a box. Most folds are products too: each dimension of the shape
walks through some dimensions of the box, all of them once (`meshsys.torus.walks`). A ring of 4 chips is the product of
two lines of 2, so a dimension of the box that is one can be shared by two dimensions of the shape; on a closed
4x4x4 cube, which is a 6-cube, that gives every shape of powers of 2. RFold's rules (fold once, fold twice, 2 becomes 4)
are such products. Where none fits, a search over all maps decides; it keeps for each logical position the chips that
are left for it, and gives up after a number of steps.

`check_embedding` shares nothing with the above.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.torus.shapes import Shape, shape_text
from meshsys.torus.walks import walk

__all__ = ["Fold", "Product", "check_embedding", "embed", "most_links", "products"]

Ints = NDArray[np.int64]
Wraps = tuple[bool, ...]

_STEPS = 20_000
_MOST_SEARCHED = 128  # chips in a box; beyond, only products


@dataclass(frozen=True, eq=False)
class Fold:
    """A shape in a box.

    Attributes:
        places: int64 [*shape, dimensions of the box], read-only: where in the box each logical position is.
        dilation: the most links between logical neighbours, 1 where the fold is exact.
        proved: that there is no exact fold, where this is none.
        how: for people, as "8x8 = 4*2 x 8".
    """

    places: Ints
    dilation: int
    proved: bool
    how: str

    def __post_init__(self) -> None:
        self.places.setflags(write=False)

    @property
    def exact(self) -> bool:
        return self.dilation == 1


@lru_cache(4096)
def embed(shape: Shape, wrap: Wraps, box: Shape, box_wrap: Wraps, steps: int = _STEPS) -> Fold | None:
    """The best way to lay a shape in a box; None where the box has too few chips.

    Args:
        shape: a logical mesh.
        wrap: which of its dimensions are to be rings; one of length 2 is one anyhow.
        box: chips along each dimension.
        box_wrap: which dimensions of the box have a link from the last chip to the first.
        steps: of the search for a fold that is no product.
    """
    if math.prod(shape) > math.prod(box):
        return None
    ways = [product for product in products(shape, box, box_wrap) if product.closes(wrap)]
    if ways:
        best = max(ways, key=lambda product: product.rank)
        return Fold(best.places(), 1, True, best.how)
    found, proved = _decide(shape, wrap, box, box_wrap, steps)
    name = shape_text(shape)
    if found is not None:
        return Fold(found, 1, True, f"{name} in {'x'.join(map(str, box))}, by search")
    places, dilation = _nearest(shape, wrap, box, box_wrap)
    return Fold(places, dilation, proved, f"{name} in {'x'.join(map(str, box))}, {dilation} links apart")


# The checker


def check_embedding(
    shape: Sequence[int], wrap: Sequence[bool], box: Sequence[int], box_wrap: Sequence[bool], places: Ints
) -> bool:
    """Whether all logical positions have a chip of their own, and all logical neighbours are linked.

    Args:
        places: int64 [*shape, dimensions of the box].
    """
    chips = {}
    for position in itertools.product(*map(range, shape)):
        chip = tuple(int(place) for place in places[position])
        if not all(0 <= place < side for place, side in zip(chip, box, strict=True)):
            return False
        chips[position] = chip
    if len(set(chips.values())) != len(chips):
        return False
    for position, chip in chips.items():
        for dim, side in enumerate(shape):
            after = position[dim] + 1
            if after == side and not wrap[dim]:
                continue
            other = chips[(*position[:dim], after % side, *position[dim + 1 :])]
            if other != chip and not _linked(chip, other, box, box_wrap):
                return False
    return True


def _linked(a: Shape, b: Shape, box: Sequence[int], box_wrap: Sequence[bool]) -> bool:
    apart = [(abs(x - y), side, wrap) for x, y, side, wrap in zip(a, b, box, box_wrap, strict=True) if x != y]
    return len(apart) == 1 and (apart[0][0] == 1 or (apart[0][2] and apart[0][0] == apart[0][1] - 1))


# Products


@dataclass(frozen=True)
class _Atom:
    """A dimension of the box, or half of one that is a ring of 4: its low bit (1) or its high bit (2)."""

    dim: int
    side: int
    wrap: bool
    half: int = 0


_GRAY = (0, 1, 3, 2)  # low bit + 2 * high bit -> place on a ring of 4; changing a bit is one step


@dataclass(frozen=True)
class Product:
    """Which dimensions of the box each dimension of the shape walks through.

    Attributes:
        atoms: for each dimension of the shape.
        closed: for each whether its walk is a ring.
    """

    shape: Shape
    box: Shape
    atoms: tuple[tuple[_Atom, ...], ...]
    closed: Wraps

    def closes(self, wrap: Wraps) -> bool:
        return all(closed or not asked for asked, closed in zip(wrap, self.closed, strict=True))

    def turned(self, order: Shape) -> Product:
        """In a box whose dimension i is this one's `order[i]`."""
        now = {dim: i for i, dim in enumerate(order)}
        atoms = tuple(tuple(replace(atom, dim=now[atom.dim]) for atom in held) for held in self.atoms)
        return Product(self.shape, tuple(self.box[dim] for dim in order), atoms, self.closed)

    @property
    def rank(self) -> tuple[float, ...]:
        """Higher is better: rings, then whole dimensions, then dimensions in their own order."""
        halves = sum(atom.half > 0 for atoms in self.atoms for atom in atoms)
        moved = sum(atom.dim != dim for dim, atoms in enumerate(self.atoms) for atom in atoms)
        return sum(self.closed), -halves, -sum(map(len, self.atoms)), -moved

    @property
    def split(self) -> tuple[int, ...]:
        """Dimensions of the box that have to be rings of 4."""
        return tuple(sorted({atom.dim for atoms in self.atoms for atom in atoms if atom.half}))

    @property
    def how(self) -> str:
        sides = ["*".join(str(atom.side) for atom in atoms) or "1" for atoms in self.atoms]
        name = shape_text(self.shape)
        folded = any(len(atoms) > 1 for atoms in self.atoms) or self.split
        return f"{name} = {' x '.join(sides)} in {'x'.join(map(str, self.box))}" if folded else name

    @property
    def rotation(self) -> tuple[int, ...]:
        """The dimension of the box that each dimension of the shape runs along; () for a fold."""
        if any(len(atoms) > 1 for atoms in self.atoms) or self.split:
            return ()
        used = [atoms[0].dim for atoms in self.atoms if atoms]
        rest = iter(dim for dim in range(len(self.box)) if dim not in used)
        return tuple(atoms[0].dim if atoms else next(rest, -1) for atoms in self.atoms)

    def places(self) -> Ints:
        """As in `Fold`."""
        sides = tuple(max(1, side) for side in self.shape)
        out = np.zeros((*sides, len(self.box)), np.int64)
        bits = np.zeros_like(out)
        for dim, atoms in enumerate(self.atoms):
            if not atoms:
                continue
            way = np.array(_walk(tuple(a.side for a in atoms), tuple(a.wrap for a in atoms))[0], np.int64)
            across = (slice(None),) + (None,) * (len(sides) - dim - 1)
            for i, atom in enumerate(atoms):
                if atom.half:
                    bits[..., atom.dim] += atom.half * way[:, i][across]
                else:
                    out[..., atom.dim] += way[:, i][across]
        for dim in self.split:
            out[..., dim] = np.take(_GRAY, bits[..., dim])
        return out


@lru_cache(4096)
def products(shape: Shape, box: Shape, box_wrap: Wraps) -> tuple[Product, ...]:
    """All ways to fill the box with walks, one for each dimension of the shape."""
    if math.prod(shape) != math.prod(box):
        return ()
    rings = [dim for dim, side in enumerate(box) if side == 4 and box_wrap[dim]]
    found = {}
    for count in range(len(rings) + 1):
        for split in itertools.combinations(rings, count):
            atoms = []
            for dim, side in enumerate(box):
                if dim in split:
                    atoms += [_Atom(dim, 2, False, 1), _Atom(dim, 2, False, 2)]
                elif side > 1:
                    atoms.append(_Atom(dim, side, box_wrap[dim] and side > 2))
            for deal in _deals(atoms, shape):
                closed = tuple(side > 2 and _closes(held) for side, held in zip(shape, deal, strict=True))
                found[deal] = Product(shape, box, deal, closed)
    return tuple(found.values())


def _deals(atoms: Sequence[_Atom], shape: Shape) -> Iterator[tuple[tuple[_Atom, ...], ...]]:
    """Gives each dimension of the shape atoms whose product it is. The halves of a ring are alike."""
    held: list[list[_Atom]] = [[] for _ in shape]

    def deal(index: int, left: Shape) -> Iterator[tuple[tuple[_Atom, ...], ...]]:
        if index == len(atoms):
            if all(side == 1 for side in left):
                yield tuple(map(tuple, held))
            return
        atom = atoms[index]
        first = 0
        if atom.half == 2:
            first = next(dim for dim, some in enumerate(held) if atoms[index - 1] in some)
        for dim in range(first, len(shape)):
            if left[dim] % atom.side == 0 and left[dim] > 1:
                held[dim].append(atom)
                yield from deal(index + 1, (*left[:dim], left[dim] // atom.side, *left[dim + 1 :]))
                held[dim].pop()

    yield from deal(0, shape)


def _closes(atoms: tuple[_Atom, ...]) -> bool:
    return _walk(tuple(atom.side for atom in atoms), tuple(atom.wrap for atom in atoms))[1]


@lru_cache(4096)
def _walk(sides: Shape, wraps: Wraps) -> tuple[list[Shape], bool]:
    """A walk, and whether its ends are linked."""
    way = walk(sides, wraps)
    return way, _linked(way[0], way[-1], sides, wraps)


# Search


class _Graph:
    """Neighbours as bit masks."""

    def __init__(self, sides: Shape, wraps: Wraps) -> None:
        self.places = list(itertools.product(*map(range, sides)))
        number = {place: i for i, place in enumerate(self.places)}
        self.near: list[list[int]] = []
        for place in self.places:
            near = set()
            for dim, side in enumerate(sides):
                for there in (place[dim] - 1, place[dim] + 1):
                    if 0 <= there < side or wraps[dim]:
                        near.add(number[(*place[:dim], there % side, *place[dim + 1 :])])
            self.near.append(sorted(near - {number[place]}))
        self.masks = [sum(1 << other for other in near) for near in self.near]
        self.degrees = [len(near) for near in self.near]
        # The colour of a place is that of a chess board, if the links go from black to white only.
        self.black = sum(1 << i for i, place in enumerate(self.places) if sum(place) % 2 == 0)
        self.bipartite = all(side % 2 == 0 or side < 3 or not wrap for side, wrap in zip(sides, wraps, strict=True))

    def in_touch(self) -> list[int]:
        """All places, each next one with the most neighbours before it, and near the first."""
        order: list[int] = []
        left, done = set(range(len(self.places))), 0
        while left:
            place = max(left, key=lambda i: ((self.masks[i] & done).bit_count(), -sum(self.places[i]), -i))
            order.append(place)
            left.remove(place)
            done |= 1 << place
        return order

    def reach(self) -> list[int]:
        """Summed over all places, how many others are within 1, 2, ... links."""
        totals: list[int] = []
        balls = [1 << i for i in range(len(self.places))]
        while not totals or totals[-1] < len(balls) * (len(balls) - 1):
            grown = []
            for ball in balls:
                more = ball
                for i in _bits(ball):
                    more |= self.masks[i]
                grown.append(more)
            balls = grown
            totals.append(sum(ball.bit_count() - 1 for ball in balls))
        return totals


def _decide(shape: Shape, wrap: Wraps, box: Shape, box_wrap: Wraps, steps: int) -> tuple[Ints | None, bool]:
    """An exact fold, or None and whether it is proved that there is none."""
    if math.prod(box) > _MOST_SEARCHED:
        return None, False
    logical, physical = _Graph(shape, wrap), _Graph(box, box_wrap)
    if _obstacle(logical, physical):
        return None, True
    orders = (None, list(range(len(logical.places))), logical.in_touch())
    for order in orders:
        images, proved = _search(logical, physical, steps, order)
        if proved:
            break
    if images is None:
        return None, proved
    places = np.array([physical.places[image] for image in images], np.int64)
    return places.reshape(*shape, len(box)), True


def _obstacle(logical: _Graph, physical: _Graph) -> bool:
    """Whether counting shows that there is no fold."""
    ours, theirs = sorted(logical.degrees, reverse=True), sorted(physical.degrees, reverse=True)
    if any(mine > other for mine, other in zip(ours, theirs, strict=False)):
        return True
    fills = len(ours) == len(theirs)
    if physical.bipartite:
        if not logical.bipartite:
            return True
        if fills:
            black = logical.black.bit_count()
            if physical.black.bit_count() not in (black, len(ours) - black):
                return True
    # Links only bring positions nearer.
    return fills and any(mine > other for mine, other in zip(logical.reach(), physical.reach(), strict=False))


def _search(logical: _Graph, physical: _Graph, steps: int, order: list[int] | None) -> tuple[list[int] | None, bool]:
    """Depth first: the positions in an order, or next the one with the fewest chips left.

    Returns the chips; or None, and whether everything was tried.
    """
    count = len(logical.places)
    fills = count == len(physical.places)
    least = [sum(1 << chip for chip, has in enumerate(physical.degrees) if has >= degree) for degree in range(16)]
    images = [-1] * count
    budget = steps

    def go(left: list[int], domains: list[int], unused: int) -> bool:
        nonlocal budget
        if not left:
            return True
        at = 0
        if order is None:
            placed = [len([1 for other in logical.near[i] if images[other] >= 0]) for i in left]
            ranks = ((domains[i].bit_count(), -near, -logical.degrees[i]) for i, near in zip(left, placed, strict=True))
            at = min(enumerate(ranks), key=lambda rank: rank[1])[0]
        position = left[at]
        rest = left[:at] + left[at + 1 :]
        for chip in _bits(domains[position]):
            budget -= 1
            if budget < 0:
                return False
            images[position] = chip
            after = list(domains)
            free = unused & ~(1 << chip)
            for other in rest:
                after[other] &= free
            for other in logical.near[position]:
                if images[other] < 0:
                    after[other] &= physical.masks[chip]
            if all(after[other] for other in rest) and (not fills or _covers(after, rest, free)):
                if go(rest, after, free):
                    return True
            images[position] = -1
            if budget < 0:
                return False
        return False

    domains = [least[degree] for degree in logical.degrees]
    found = go(list(range(count)) if order is None else order, domains, (1 << len(physical.places)) - 1)
    return (images, True) if found else (None, budget >= 0)


def _covers(domains: list[int], left: list[int], free: int) -> bool:
    """Whether every free chip is still one for somebody."""
    union = 0
    for position in left:
        union |= domains[position]
    return union & free == free


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


# No exact fold


def most_links(shape: Shape, wrap: Wraps, box: Shape, box_wrap: Wraps, places: Ints) -> int:
    """The most links between logical neighbours."""
    most = 1
    for dim, side in enumerate(shape):
        if side < 2:
            continue
        after = np.roll(places, -1, dim)
        pairs = abs(after - places)
        sides = np.array(box)
        hops = np.where(box_wrap, np.minimum(pairs, sides - pairs), pairs).sum(-1)
        lines = hops if wrap[dim] else np.take(hops, range(side - 1), dim)
        most = max(most, int(lines.max()))
    return most


def _nearest(shape: Shape, wrap: Wraps, box: Shape, box_wrap: Wraps) -> tuple[Ints, int]:
    """Of some orders, the one whose neighbours are least far apart."""
    size = math.prod(shape)
    best: tuple[Ints, int] | None = None
    rows = np.stack(np.unravel_index(np.arange(math.prod(box)), box), -1)
    snake = np.array(walk(box, box_wrap), np.int64)
    for order in itertools.permutations(range(len(shape))):
        for chips in (rows, snake):
            turned = chips[:size].reshape(*(shape[dim] for dim in order), len(box))
            places = np.transpose(turned, (*np.argsort(order), len(shape)))
            dilation = most_links(shape, wrap, box, box_wrap, places)
            if best is None or dilation < best[1]:
                best = np.ascontiguousarray(places), dilation
    assert best is not None
    return best
