from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from meshsys.cluster.factors import factorisations
from meshsys.cluster.folds import check_embedding, embed
from tests.oracles.brute_fold import brute_fold, edges
from tests.oracles.sat_fold import sat_fold

Case = tuple[tuple[int, ...], tuple[bool, ...], tuple[int, ...], tuple[bool, ...]]


def rings(sides: tuple[int, ...]) -> list[tuple[bool, ...]]:
    return list(itertools.product(*((False, True) if side > 2 else (False,) for side in sides)))


def cases(most: int, spare: int = 1) -> list[Case]:
    """Shapes that fill boxes of up to 4 chips a side, or leave some chips over."""
    return [
        (shape, wrap, box, box_wrap)
        for box in itertools.combinations_with_replacement(range(1, 5), 3)
        if 2 <= math.prod(box) <= most
        for box_wrap in rings(box)
        for size in range(math.prod(box) - spare, math.prod(box) + 1)
        for ndim in (1, 2, 3)
        for shape in factorisations(size, ndim)
        if min(shape) > 1
        for wrap in rings(shape)
    ]


@pytest.mark.parametrize("box", sorted({case[2] for case in cases(12)}), ids=str)
def test_finds_what_brute_force_finds(box: tuple[int, ...]) -> None:
    for case in cases(12):
        if case[2] != box:
            continue
        fold = embed(*case)
        assert fold is not None
        exists = brute_fold(*case)
        assert (fold.exact, fold.proved) == (exists, True), case
        assert check_embedding(*case, fold.places) == fold.exact, case


# Too much for brute force; a solver finds that even with all links of a closed cube there is no fold.
HARD = {((3, 21), (4, 4, 4)), ((7, 9), (4, 4, 4))}


@pytest.mark.slow
def test_misses_nothing_in_boxes_of_up_to_four_chips_a_side() -> None:
    """All 1,880 shapes of up to three dimensions that fill such a box, or leave one or two chips over."""
    exact, none = 0, 0
    for case in cases(64, spare=2):
        shape, wrap, box, box_wrap = case
        fold = embed(*case)
        assert fold is not None
        if fold.exact:
            wanted, linked = edges(shape, wrap), edges(box, box_wrap)
            chip = {at: tuple(map(int, fold.places[at])) for at in wanted}
            assert len(set(chip.values())) == len(chip)
            assert all(chip[other] in linked[chip[at]] for at in wanted for other in wanted[at]), case
            exact += 1
        else:
            assert (shape, box) in HARD or brute_fold(*case, steps=200_000) is False, case
            none += 1
    assert (exact, none) == (1141, 739)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "box"), sorted(HARD), ids=str)
def test_what_is_left_has_no_fold(shape: tuple[int, ...], box: tuple[int, ...]) -> None:
    """Without rings in the shape, and with all in the box: other cases ask for more links, or have fewer."""
    pytest.importorskip("ortools")
    assert sat_fold(shape, (False,) * len(shape), box, (True,) * len(box), seconds=300) is False
    assert (
        sat_fold((2, 32), (True, True), box, (True,) * len(box), seconds=60) is True
    )  # the solver knows folds from none


@pytest.mark.parametrize(
    "shape", [shape for ndim in (1, 2, 3) for shape in factorisations(64, ndim) if min(shape) > 1], ids=str
)
def test_a_closed_cube_holds_every_shape_of_powers_of_two_with_all_rings(shape: tuple[int, ...]) -> None:
    wrap = (True,) * len(shape)
    fold = embed(shape, wrap, (4, 4, 4), (True, True, True))
    assert fold is not None and fold.exact
    assert check_embedding(shape, wrap, (4, 4, 4), (True,) * 3, fold.places)


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((12, 10), (6, 10, 2)),  # folded once
        ((16, 6), (4, 6, 4)),  # folded twice
        ((12, 10), (6, 5, 4)),
        ((12, 6, 2), (6, 6, 4)),  # 2 becomes 4
        ((250, 2, 2), (125, 2, 4)),
        ((24, 24), (12, 12, 4)),
    ],
    ids=str,
)
def test_the_rules_of_rfold_are_products(shape: tuple[int, ...], box: tuple[int, ...]) -> None:
    closed = tuple(side % 4 == 0 for side in box)
    fold = embed(shape, (False,) * len(shape), box, closed)
    assert fold is not None and fold.exact
    assert check_embedding(shape, (False,) * len(shape), box, closed, fold.places)


def test_a_ring_needs_no_wraparound() -> None:
    for box in ((2, 8), (4, 4), (3, 6), (2, 3, 3)):
        size = math.prod(box)
        fold = embed((size,), (True,), box, (False,) * len(box))
        assert fold is not None and fold.exact
        assert check_embedding((size,), (True,), box, (False,) * len(box), fold.places)


def test_says_that_there_is_none_and_how_far_apart_neighbours_are() -> None:
    fold = embed((8, 8), (False, False), (4, 4, 4), (False,) * 3)  # wants the wraparound of a dimension of 4
    assert fold is not None and not fold.exact
    assert not check_embedding((8, 8), (False, False), (4, 4, 4), (False,) * 3, fold.places)
    odd = embed((9,), (True,), (3, 3), (False, False))
    assert odd is not None and (odd.exact, odd.proved) == (False, True)
    apart = [np.abs(odd.places[i] - odd.places[(i + 1) % 9]).sum() for i in range(9)]
    assert max(apart) == odd.dilation
    assert embed((9,), (False,), (2, 4), (False, False)) is None


def test_the_checker_sees_mistakes() -> None:
    line = np.array([[0, 0], [0, 1], [1, 1], [1, 0]])
    assert check_embedding((4,), (True,), (2, 2), (False, False), line)
    assert not check_embedding((4,), (False,), (2, 2), (False, False), line[[0, 2, 1, 3]])  # a diagonal step
    assert not check_embedding((4,), (False,), (2, 2), (False, False), line[[0, 1, 0, 3]])  # a chip twice
    assert not check_embedding((4,), (False,), (2, 1), (False, False), line)  # outside the box
    ends = np.array([[0], [1], [2]])
    assert check_embedding((3,), (True,), (3,), (True,), ends)
    assert not check_embedding((3,), (True,), (3,), (False,), ends)
