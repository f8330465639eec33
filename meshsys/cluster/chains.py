"""Ways to lay a job into whole cubes and one piece of another: chains of slots, and boxes of less than a cube.

A chain walks through whole cubes in a row, each from a slot at one face to the slot at the same place of the opposite
face, and ends in a piece of a cube that begins at that place: a switch that joins only same positions can do
that, whichever cubes these are. With no rest to place the last cube leads back into the first.

A long dimension whose ends must meet goes there and back: two of its positions share a slot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshsys.cluster.cubes import Cubes, box_mask, packed
from meshsys.cluster.folds import Product, products
from meshsys.cluster.pieces import Pieces, distinct
from meshsys.cluster.slots import Slots, slots_of
from meshsys.torus.shapes import Shape

__all__ = ["Chain", "Menu", "best_product", "chains", "menu"]

Ints = NDArray[np.int64]
Wraps = tuple[bool, ...]
Words = NDArray[np.uint64]

_STARTS = 64  # of a piece along a snake, in cubes that are large


@dataclass(frozen=True, eq=False)
class Chain:
    """One dimension of the shape from slot to slot, the others within.

    Attributes:
        along: the dimension of the shape.
        doubled: whether it goes there and back.
        section: a slot's chip, as an index, of each position of the other dimensions: int64 [*section shape];
            the first is there (0) or back (1) where doubled.
        length: slots.
    """

    shape: Shape
    along: int
    doubled: bool
    slots: Slots
    section: Ints
    length: int
    closed: Wraps

    @property
    def whole(self) -> int:
        """Cubes that are filled."""
        return self.length // self.slots.count

    @property
    def rest(self) -> int:
        """Slots in one more cube."""
        return self.length % self.slots.count

    def how(self) -> str:
        chips = self.slots.places.shape[1]
        links = f"{self.length} chips" if chips == 1 else f"{self.length} slots of {chips} chips"
        back = ", there and back" if self.doubled else ""
        return f"{'x'.join(map(str, self.shape))} as a chain of {links}{back}"

    def pieces(self) -> tuple[Words, Ints]:
        """What the rest can be, as masks, and where it is: int64 [pieces, 2] of a snake and its start."""
        return _runs(self.slots, self.rest, self.whole > 0)

    def nodes(self, cubes: Cubes, whole: Sequence[int], piece: Ints | None, cube: int) -> Ints:
        """Chips in the order of the shape."""
        path: list[int] = []
        if piece is not None:
            path = self.slots.orders[piece[0], piece[1] : piece[1] + self.rest].tolist()
            if self.whole and self.slots.port(path[0]) is None:
                path.reverse()
        return self.along_path(cubes, whole, [(cube, path)] if path else [])

    def along_path(self, cubes: Cubes, whole: Sequence[int], pieces: Sequence[tuple[int, list[int]]]) -> Ints:
        """Chips in the order of the shape: whole cubes in a row, then pieces, of which each is a cube and its slots."""
        slots = self.slots
        turn: tuple[int, ...] = ()
        if whole:
            first = pieces[0][1][0] if pieces else next(at for at in range(slots.count) if slots.port(at) is not None)
            dim = slots.port(first)
            assert dim is not None
            last = slots.opposite(first, dim)
            assert last is not None
            turn = slots.across(first, last) or ()
        chips = [cubes.nodes[full][slots.places[list(turn)]] for full in whole]
        chips += [cubes.nodes[cube][slots.places[path]] for cube, path in pieces]
        laid = np.concatenate(chips)[:, self.section]  # [slots, *section shape]
        if self.doubled:
            laid = np.concatenate([laid[:, 0], laid[::-1, 1]])
        return np.moveaxis(laid, 0, self.along).reshape(self.shape)


@lru_cache(1 << 12)
def _runs(slots: Slots, count: int, ported: bool) -> tuple[Words, Ints]:
    """Runs of so many slots along snakes: masks, and int64 [runs, 2] of a snake and where it starts.

    Args:
        ported: only those that whole cubes can be joined to.
    """
    orders = slots.orders
    starts = np.arange(slots.count - count + 1)
    if len(starts) > _STARTS:
        starts = np.unique(np.linspace(0, starts[-1], _STARTS).astype(np.int64))
    rank = np.argsort(orders, 1)[:, None]
    member = (rank >= starts[:, None]) & (rank < starts[:, None] + count)
    where = np.stack(np.meshgrid(np.arange(len(orders)), starts, indexing="ij"), -1).reshape(-1, 2)
    member = member.reshape(-1, slots.count)
    if ported:
        able = np.array([slots.port(slot) is not None for slot in range(slots.count)])
        first = orders[where[:, 0], where[:, 1]]
        last = orders[where[:, 0], where[:, 1] + count - 1]
        kept = able[first] | able[last]
        member, where = member[kept], where[kept]
    slot_of = np.empty(slots.side**3, np.int64)
    slot_of[slots.places] = np.arange(slots.count)[:, None]
    masks = packed(member[:, slot_of])
    kept = distinct(masks)
    return masks[kept], where[kept]


def _open(shape: Shape, closed: Wraps) -> int:
    """How many dimensions are lines that could be rings; at most 3."""
    return min(3, sum(side > 2 and not ring for side, ring in zip(shape, closed, strict=True)))


@lru_cache(1 << 12)
def chains(shape: Shape, wrap: Wraps, side: int) -> tuple[Chain, ...]:
    """All chains of a shape that can close the rings that are asked for."""
    return tuple(_chains(shape, wrap, side))


def _chains(shape: Shape, wrap: Wraps, side: int) -> Iterator[Chain]:
    longs = [dim for dim, size in enumerate(shape) if size > 1] or [0]
    for along in longs:
        others = shape[:along] + shape[along + 1 :]
        asked = wrap[:along] + wrap[along + 1 :]
        for doubled in (True, False):
            if doubled and (shape[along] % 2 or shape[along] < 4):
                continue
            length = shape[along] // (1 + doubled)
            chips = math.prod(others) * (1 + doubled)
            if chips >= side**3:
                continue
            section_shape = (2, *others) if doubled else others
            section_asked = (False, *asked) if doubled else asked
            for slots in slots_of(side, chips):
                section, section_closed = _section(section_shape, section_asked, slots)
                closes = doubled or (length % slots.count == 0 and bool(slots.through)) or shape[along] <= 2
                if section is None or (wrap[along] and not closes):
                    continue
                if length > slots.count and all(slots.port(slot) is None for slot in range(slots.count)):
                    continue
                own = section_closed[1:] if doubled else section_closed
                closed = (*own[:along], closes and shape[along] > 2, *own[along:])
                yield Chain(shape, along, doubled, slots, section, length, closed)


def _section(shape: Shape, wrap: Wraps, slots: Slots) -> tuple[Ints | None, Wraps]:
    """The chip of a slot for each position of a section."""
    if not slots.section:
        return np.zeros(shape, np.int64), (False,) * len(shape)
    ways = [way for way in products(shape, slots.section, slots.section_wrap) if _suits(way, wrap)]
    if not ways:
        return None, ()
    best = max(ways, key=lambda way: way.rank)
    return np.ravel_multi_index(tuple(np.moveaxis(best.places(), -1, 0)), slots.section), best.closed


def _suits(way: Product, wrap: Wraps) -> bool:
    return way.closes(tuple(asked and size > 2 for asked, size in zip(wrap, way.shape, strict=True)))


# Boxes of less than a cube


@lru_cache(1 << 14)
def best_product(shape: Shape, wrap: Wraps, box: Shape, box_wrap: Wraps) -> Product | None:
    """The best product for a box that closes the rings that are asked for."""
    ways = [way for way in products(shape, box, box_wrap) if _suits(way, wrap)]
    return max(ways, key=lambda way: way.rank) if ways else None


@dataclass(frozen=True, eq=False)
class _Box:
    """A box within a cube, anywhere."""

    shape: Shape
    box: Shape
    side: int
    product: Product

    whole = 0

    @property
    def closed(self) -> Wraps:
        return self.product.closed

    def how(self) -> str:
        return self.product.how

    def pieces(self) -> tuple[Words, Ints]:
        """Where the box can be, as masks, and its corners: int64 [pieces, 3]."""
        rooms = [range(self.side - size + 1) for size in self.box]
        corners = np.array(list(itertools.product(*rooms)), np.int64)
        return np.stack([box_mask(self.side, tuple(corner.tolist()), self.box) for corner in corners]), corners

    def nodes(self, cubes: Cubes, whole: Sequence[int], piece: Ints | None, cube: int) -> Ints:
        """Chips in the order of the shape."""
        assert piece is not None and not whole
        room = cubes.nodes[cube].reshape((self.side,) * 3)
        return room[tuple(np.moveaxis(self.product.places() + piece, -1, 0))]


def _boxes(shape: Shape, wrap: Wraps, side: int) -> Iterator[_Box]:
    size = math.prod(shape)
    for box in itertools.product(range(1, side + 1), repeat=3):
        if math.prod(box) != size:
            continue
        product = best_product(shape, wrap, box, tuple(length == side and side > 2 for length in box))
        if product is not None:
            yield _Box(shape, box, side, product)


# All of them


@dataclass(frozen=True, eq=False)
class Menu:
    """All ways of one shape that take whole cubes and at most one piece of another.

    Attributes:
        whole: cubes that are filled, the same for all ways.
        pieces: what else is needed; none where nothing is.
        ways: the ways.
        where: of each way its pieces, as it knows them.
        source: int64 [pieces, 2]: the way, and the piece of its own.
    """

    whole: int
    pieces: Pieces | None
    ways: tuple[Chain | _Box, ...]
    where: tuple[Ints, ...]
    source: Ints

    def nodes(self, cubes: Cubes, whole: Sequence[int], piece: int, cube: int) -> tuple[Ints, str, Shape]:
        """Chips in the order of the shape, how they are laid, and the rotation."""
        if self.pieces is None:
            way = self.ways[0]
            return way.nodes(cubes, whole, None, -1), way.how(), ()
        number, own = self.source[piece]
        way = self.ways[number]
        rotation = way.product.rotation if isinstance(way, _Box) else ()
        return way.nodes(cubes, whole, self.where[number][own], cube), way.how(), rotation


@lru_cache(1 << 12)
def menu(shape: Shape, wrap: Wraps, side: int) -> Menu | None:
    """The menu of a shape; None where it has no such way."""
    whole, rest = divmod(math.prod(shape), side**3)
    ways: list[Chain | _Box] = list(chains(shape, wrap, side))
    if not whole or (whole == 1 and not rest):
        ways += _boxes(shape, wrap, side)
    if not ways:
        return None
    ways.sort(key=lambda way: _open(shape, way.closed))
    if not rest:
        rows = [way for way in ways if isinstance(way, Chain)]
        if rows:
            return Menu(whole, None, tuple(rows[:1]), (), np.empty((0, 2), np.int64))
        whole = 0  # a box that is a whole cube, as a piece
    found, where = zip(*(way.pieces() for way in ways), strict=True)
    masks = np.concatenate(found)
    kept = distinct(masks)
    malus = np.concatenate([np.full(len(own), _open(shape, way.closed)) for way, own in zip(ways, where, strict=True)])
    source = np.concatenate([np.stack([np.full(len(own), i), np.arange(len(own))], -1) for i, own in enumerate(where)])
    return Menu(whole, Pieces(side, masks[kept], malus[kept]), tuple(ways), tuple(where), source[kept])
