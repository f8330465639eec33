"""Orders of devices for a cost between pairs, against all orders tried one by one."""

from __future__ import annotations

import importlib
import itertools
import time

import numpy as np
import pytest

from meshsys.torus import Topology, order_cost, pair_costs, reorder

module = importlib.import_module("meshsys.torus.reorder")


def by_hand(cost: np.ndarray, order, uses: np.ndarray) -> float:
    places = range(len(order))
    return sum(uses[a, b] * cost[order[a], order[b]] for a, b in itertools.product(places, places) if a != b)


def ring(count: int) -> np.ndarray:
    uses = np.zeros((count, count))
    for place in range(count):
        uses[place, (place + 1) % count] = 1
    return uses


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("exhaustive", [True, False])
def test_the_best_of_all_orders(devices, seed, exhaustive, monkeypatch):
    """Asymmetric costs, over a ring and between all pairs; the moves alone find it too."""
    if not exhaustive:
        monkeypatch.setattr(module, "_EXHAUSTIVE", 4)
    random = np.random.default_rng(seed)
    cost = random.random((devices, devices))
    for uses in (ring(devices), random.random((devices, devices))):
        found = reorder(cost, range(devices), uses, tries=80)
        assert sorted(found) == list(range(devices))
        best = min(by_hand(cost, order, uses) for order in itertools.permutations(range(devices)))
        assert order_cost(cost, found, uses) == pytest.approx(by_hand(cost, found, uses)) == pytest.approx(best)


def test_eight_devices():
    cost = np.random.default_rng(0).random((8, 8))
    best = min(by_hand(cost, (0, *order), ring(8)) for order in itertools.permutations(range(1, 8)))
    assert order_cost(cost, reorder(cost, range(8))) == pytest.approx(best)


@pytest.mark.parametrize("text", ["4x4", "v5e:4x4", "v5p:2x2x4", "v5p:4x4x4"])
def test_a_ring_of_neighbours_is_found_again(text):
    """Shuffled chips of a torus: every step of the ring is one link."""
    cost = pair_costs(Topology.parse(text))
    shuffled = np.random.default_rng(1).permutation(len(cost)).tolist()
    found = reorder(cost, shuffled)
    assert order_cost(cost, found) <= (1.05 if len(cost) > 16 else 1) * len(cost) < order_cost(cost, shuffled)


def test_two_racks():
    """Links within a rack are cheap: the ring crosses between them twice, whatever order it was given."""
    rack = np.arange(12) % 2
    cost = np.where(rack[:, None] == rack, 1.0, 10.0)
    assert order_cost(cost, range(12)) == 120
    found = reorder(cost, range(12))
    assert order_cost(cost, found) == 10 + 20
    assert reorder(cost, range(12)) == found  # deterministic


def test_what_cannot_be_improved_stays_as_it_is():
    cost = np.ones((10, 10))
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    assert reorder(cost, order) == tuple(order)


@pytest.mark.parametrize("devices", [5, 10])
def test_some_devices_do_not_take_part(devices):
    cost = np.abs(np.subtract.outer(np.arange(20.0), np.arange(20.0)))
    order = np.random.default_rng(2).permutation(20)[:devices].tolist()
    found = reorder(cost, order)
    assert sorted(found) == sorted(order)
    assert order_cost(cost, found) == pytest.approx(2 * (max(order) - min(order)))


def test_swap_gains():
    random = np.random.default_rng(3)
    cost, uses = random.random((2, 6, 6))
    uses = uses * (1 - np.eye(6))
    gains = module._swap_gains(cost, uses)
    before = by_hand(cost, range(6), uses)
    for a, b in itertools.product(range(6), range(6)):
        order = list(range(6))
        order[a], order[b] = order[b], order[a]
        assert gains[a, b] == pytest.approx(by_hand(cost, order, uses) - before, abs=1e-12)


def test_many_devices_take_seconds():
    random = np.random.default_rng(4)
    places = random.random((128, 2))
    cost = np.linalg.norm(places[:, None] - places, axis=-1)
    started = time.process_time()
    found = reorder(cost, range(128), tries=2)
    assert time.process_time() - started < 20
    assert order_cost(cost, found) < 0.2 * order_cost(cost, range(128))


@pytest.mark.parametrize(
    ("cost", "order", "uses", "says"),
    [
        (np.ones((2, 3)), [0], None, "no square"),
        (np.full((2, 2), np.nan), [0, 1], None, "no finite numbers"),
        (np.ones((3, 3)), [0, 0], None, "twice"),
        (np.ones((3, 3)), [0, 3], None, "it has 0 to 2"),
        (np.ones((3, 3)), [0, 1], np.ones((3, 3)), "does not fit an order of 2"),
    ],
)
def test_bad_input(cost, order, uses, says):
    with pytest.raises(ValueError, match=says):
        reorder(cost, order, uses)
