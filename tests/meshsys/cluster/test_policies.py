from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest

from meshsys.cluster import policies
from meshsys.cluster.folds import embed
from meshsys.cluster.pod import FAILED, FREE, Pod
from meshsys.cluster.policies.base import Shape
from meshsys.cluster.policies.hilbert import hilbert_order
from meshsys.cluster.wiring import grant
from meshsys.errors import ConfigError
from meshsys.torus import Topology
from tests.oracles.pod_links import unlinked

ON_CUBES = ("reconfig", "rfold")
PODS = [
    ((8, 8, 8), None, "same_position"),
    ((8, 8, 8), 4, "same_position"),
    ((8, 8, 8), 4, "any"),
    ((8, 4, 12), 2, "same_position"),
    ((8, 16), None, "same_position"),
]


def random_shape(rng: random.Random, size: int) -> Shape:
    kind = rng.random()
    if kind < 0.5:
        return (rng.randint(1, size // 4),)
    if kind < 0.8:
        return (rng.randint(1, 12), rng.randint(1, 12))
    return (rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 6))


def churn(pod: Pod, policy: policies.Policy, operations: int, seed: int, failures: bool = True) -> int:
    """Places and releases at random, chips fail and come back; returns how many jobs were placed."""
    rng = random.Random(seed)
    holders: dict[int, int] = {}  # chip -> job, as it should be
    links: dict[int, int] = {}
    jobs: dict[int, list[int]] = {}
    failed: set[int] = set()
    placed = 0
    for job in range(1, operations + 1):
        shape = random_shape(rng, pod.size)
        wrap = tuple(rng.random() < 0.2 for _ in shape)
        before = pod.owner.copy()
        found = policy.place(pod, shape, wrap)
        assert np.array_equal(before, pod.owner), "a policy changes no pod"
        if found is not None:
            chips = found.nodes.ravel().tolist()
            assert found.shape == shape and len(set(chips)) == len(chips) == math.prod(shape)
            assert not holders.keys() & set(chips) and not failed & set(chips)
            assert pod.shared_links or not links.keys() & set(found.links.tolist())
            assert found.cubes == (tuple(sorted({int(pod.cube_of[chip]) for chip in chips})) if pod.cube else ())
            rings = tuple(asked or closed for asked, closed in zip(wrap, found.wrap, strict=True))
            if found.dilation == 1 and found.wireable and pod.wiring == "same_position":
                assert unlinked(pod, found, rings) == 0
            pod.take(job, found)
            placed += 1
            jobs[job] = chips
            holders.update(dict.fromkeys(chips, job))
            links.update(dict.fromkeys(found.links.tolist(), job))
        while jobs and (found is None or rng.random() < 0.3):
            gone = rng.choice(list(jobs))
            for link in pod.jobs[gone].links.tolist():
                links.pop(link, None)
            pod.release(gone)
            for chip in jobs.pop(gone):
                del holders[chip]
            if found is None and rng.random() < 0.5:
                break
        if failures and rng.random() < 0.1:
            broken = rng.sample(range(pod.size), 2)
            hit = pod.fail(broken)
            failed |= set(broken)
            assert set(hit) == {holders[chip] for chip in broken if chip in holders}
        if failures and failed and rng.random() < 0.3:
            back = rng.choice(sorted(failed))
            pod.repair([back])
            failed.discard(back)
        if job % 25 == 0:
            wanted = np.full(pod.size, FREE)
            wanted[list(failed)] = FAILED
            wanted[list(holders)] = list(holders.values())
            assert np.array_equal(wanted, pod.owner)
            assert pod.free == np.count_nonzero(wanted == FREE)
    for job in list(pod.jobs):
        pod.release(job)
    pod.repair(sorted(failed))
    assert pod.free == pod.size and not pod.owner.any() and pod.shared == 0
    assert pod.admits(grant(pod, np.arange(pod.size).reshape(pod.dims), None, "all"))
    return placed


@pytest.mark.parametrize("name", policies.names())
@pytest.mark.parametrize(("dims", "cube", "wiring"), PODS, ids=str)
def test_random_operations(name, dims, cube, wiring) -> None:
    if name in ON_CUBES and cube is None:
        pytest.skip("puts cubes together, and there are none")
    assert churn(Pod(Topology(dims), cube, wiring), policies.get(name), 150, seed=1) > 30


@pytest.mark.parametrize("name", policies.names())
def test_random_operations_with_shared_links(name) -> None:
    assert churn(Pod(Topology((8, 8, 8)), 4, shared_links=True), policies.get(name), 150, seed=2) > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", policies.names())
def test_many_random_operations_on_a_large_pod(name) -> None:
    assert churn(Pod(Topology((16, 16, 16)), 4), policies.get(name), 2000, seed=3) > 300


@pytest.mark.parametrize("cube", [2, 4, None])
@pytest.mark.parametrize("seed", range(3))
def test_best_is_exact_and_wireable(cube, seed) -> None:
    rng = random.Random(seed)
    pod, best = Pod(Topology((8, 8, 8)), cube), policies.get("best")
    pod.fail(rng.sample(range(512), 5))
    placed = 0
    for job in range(1, 200):
        shape = random_shape(rng, pod.size)
        found = best.place(pod, shape)
        if found is not None:
            placed += 1
            assert found.wireable and found.dilation == 1
            assert unlinked(pod, found, found.wrap) == 0
            pod.take(job, found)
        while pod.jobs and (found is None or rng.random() < 0.3):
            pod.release(rng.choice(list(pod.jobs)))
            if found is None:
                break
    assert placed > 50


@pytest.mark.parametrize("cube", [4, None])
def test_best_closes_the_rings_that_are_asked_for(cube) -> None:
    pod, best = Pod(Topology((8, 8, 8)), cube), policies.get("best")
    shapes = [(6,), (14,), (64,), (100,), (8, 16), (24, 8), (8, 8, 8)]
    for shape in shapes + ([(6, 4), (10, 4), (4, 4, 4), (2, 4, 30)] if cube else [(6, 8), (2, 8, 8)]):
        wrap = (True,) * len(shape)
        found = best.place(pod, shape, wrap)
        assert found is not None, shape
        assert found.dilation == 1 and found.wireable, shape
        assert all(ring or side <= 2 for ring, side in zip(found.wrap, shape, strict=True)), shape
        assert unlinked(pod, found, wrap) == 0


@pytest.mark.parametrize(("shape", "cube"), [((5, 4), 4), ((7,), 4), ((129,), 4), ((5,), None), ((4, 4, 4), None)])
def test_best_lays_an_impossible_ring_along_a_line(shape, cube) -> None:
    # An odd ring, as links of a cube join black to white; 4x4x4 is no torus within one of 8x8x8.
    pod = Pod(Topology((8, 8, 8)), cube)
    found = policies.get("best").place(pod, shape, (True,) * len(shape))
    assert found is not None and found.wireable and found.dilation == 2
    assert not all(found.wrap)
    line = found.nodes
    for dim, (side, closed) in enumerate(zip(shape, found.wrap, strict=True)):
        if not closed:
            line = np.take(line, np.argsort([*range(0, side, 2), *range(side - 1 - side % 2, 0, -2)]), dim)
    straight = grant(pod, line, None, "")  # in the order of the lines, neighbours are linked by what the job holds
    assert straight.dilation == 1 and straight.wireable
    assert set(straight.links.tolist()) <= set(found.links.tolist())


def test_best_spares_empty_cubes_and_fills_gaps() -> None:
    pod, best = Pod(Topology((8, 8, 8)), 4), policies.get("best")
    first = best.place(pod, (2, 4, 4))
    assert first is not None
    pod.take(1, first)
    rest = best.place(pod, (4, 8))  # folded into the other half
    assert rest is not None and rest.cubes == first.cubes
    pod.take(2, rest)
    line = best.place(pod, (96,))
    assert line is not None and len(line.cubes) == 2
    pod.take(3, line)
    short = best.place(pod, (30,))  # what is left of the second cube
    assert short is not None and set(short.cubes) <= set(line.cubes)


@pytest.mark.parametrize(
    "shape", [(3, 5, 2), (7, 3), (61,), (2, 2, 13), (8, 8, 8), (6, 6, 6), (512,), (2, 256), (1,), (2,) * 6]
)
def test_best_places_on_an_empty_pod_what_has_chips_enough(shape) -> None:
    pod = Pod(Topology((8, 8, 8)), 4)
    assert policies.get("best").possible(pod, shape)


def test_possible_does_not_see_jobs_and_failures() -> None:
    for name in policies.names():
        pod, policy = Pod(Topology((8, 8, 8)), 4), policies.get(name)
        pod.fail(range(512))
        assert policy.place(pod, (2, 2)) is None
        assert policy.possible(pod, (2, 2))
        assert not policy.possible(pod, (9, 8, 8))


def test_first_fit_takes_the_first_box() -> None:
    pod, first_fit = Pod(Topology((4, 4, 4)), None), policies.get("first_fit")
    pod.take(1, grant(pod, np.arange(16).reshape(1, 4, 4), None, "1x4x4"))
    found = first_fit.place(pod, (2, 4, 4))
    assert found is not None and found.nodes.ravel().tolist() == list(range(16, 48))
    assert found.rotation == (0, 1, 2) and found.wrap == (False, True, True)
    pod.take(2, found)
    turned = first_fit.place(pod, (4, 4, 1))
    assert turned is not None and turned.nodes.ravel().tolist() == list(range(48, 64))
    assert turned.rotation == (1, 2, 0)
    assert not first_fit.possible(pod, (8, 2, 2))


def test_first_fit_reaches_around_the_torus() -> None:
    pod = Pod(Topology((4, 4)), None)
    pod.take(1, grant(pod, np.array([[4, 5, 6, 7]]), None, ""))
    pod.take(2, grant(pod, np.array([[8, 9, 10, 11]]), None, ""))
    found = policies.get("first_fit").place(pod, (2, 4))
    assert found is not None and found.nodes.tolist() == [[12, 13, 14, 15], [0, 1, 2, 3]]
    assert Pod(Topology((8, 8), "v5e"), None).wrap == (False, False)


def test_folding_makes_a_long_line_short() -> None:
    pod = Pod(Topology((8, 8, 8)), None)
    assert not policies.get("first_fit").possible(pod, (64,))
    found = policies.get("folding").place(pod, (64,))
    assert found is not None and found.fold == "64 = 4*4*4 in 4x4x4" and found.dilation == 1
    assert not policies.get("folding").possible(pod, (22,))  # 1 x 2 x 11


def test_reconfig_takes_cubes_wherever_they_are_and_does_not_look_at_wiring() -> None:
    pod, reconfig = Pod(Topology((8, 8, 8)), 4), policies.get("reconfig")
    for job, cube in enumerate((0, 3, 5), 1):
        assert pod.cubes is not None
        pod.take(job, grant(pod, pod.cubes.nodes[cube].reshape(4, 4, 4), None, ""))
    found = reconfig.place(pod, (4, 8, 8))
    assert found is not None and found.cubes == (1, 2, 4, 6) and found.wireable
    # 4 rows end at 0,1 of two cubes, as 0,0 is taken there; the rest begins at 0,0 of another.
    pod = Pod(Topology((8, 8, 8)), 4)
    for job, cube in enumerate(range(8), 1):
        row = pod.cubes.nodes[cube].reshape(4, 4, 4)[:, 0, 0]
        if cube < 7:
            pod.take(job, grant(pod, row, None, ""))
    found = reconfig.place(pod, (10, 1, 1))
    assert found is not None and not found.wireable


def test_rfold_needs_no_more_cubes_than_the_shape_itself() -> None:
    pod, rfold = Pod(Topology((16, 16, 16)), 4), policies.get("rfold")
    found = rfold.place(pod, (16, 16))
    assert found is not None and len(found.cubes) == 4 and found.dilation == 1
    line = rfold.place(pod, (100,))
    assert line is not None and len(line.cubes) == 2


def test_hilbert_curve_steps_to_neighbours() -> None:
    for dims in ((4, 4), (8, 8, 8), (2, 2, 2)):
        order = hilbert_order(dims)
        places = np.stack(np.unravel_index(order, dims), -1)
        assert sorted(order) == list(range(math.prod(dims)))
        assert (abs(np.diff(places, axis=0)).sum(1) == 1).all()


def test_risa_fills_cubes_in_turn() -> None:
    pod, risa = Pod(Topology((8, 8, 8)), 4), policies.get("risa")
    for job, cube in enumerate((0, 1, 2), 1):
        found = risa.place(pod, (10,))
        assert found is not None and found.cubes == (cube,)
        pod.take(job, found)
    large = risa.place(pod, (100,))
    assert large is not None and large.cubes == (3, 4)


class OneChip:
    """A user's own policy."""

    name = "one_chip"

    def place(self, pod, shape, wrap=None):
        return grant(pod, np.flatnonzero(pod.owner == FREE)[:1].reshape(shape), wrap, "1") if shape == (1,) else None

    def possible(self, pod, shape):
        return shape == (1,)


class NoPolicy:
    name = "none"


def test_registry(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "own_policies", sys.modules[__name__])
    assert policies.get("own_policies:OneChip").place(Pod(Topology((4,)), None), (1,)) is not None
    assert all(policies.describe(name).summary and policies.get(name).name == name for name in policies.names())
    for name, message in [
        ("bst", "policy=bst does not exist; did you mean best?"),
        ("zzz", "policy=zzz does not exist; use first_fit, folding"),
        ("no_such:Thing", "policy=no_such:Thing cannot be imported: No module named 'no_such'"),
        ("own_policies:Nothing", "policy=own_policies:Nothing cannot be imported"),
        ("own_policies:NoPolicy", "policy=own_policies:NoPolicy is no policy; it needs"),
        ("own_policies:churn", "policy=own_policies:churn is not a class"),
    ]:
        with pytest.raises(ConfigError) as error:
            policies.get(name)
        assert str(error.value).startswith(message)


def test_policies_for_cubes_say_so() -> None:
    for name in ON_CUBES:
        with pytest.raises(ConfigError, match=f"cube is not set, and policy {name} puts cubes together; set it"):
            policies.get(name).place(Pod(Topology((8, 8, 8)), None), (8, 8))


def test_placement_needs_no_jax() -> None:
    code = "import sys, meshsys.cluster.policies as p; [p.get(name) for name in p.names()]; print('jax' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_embed_is_cached() -> None:
    assert embed((4,), (True,), (2, 2), (False, False)) is embed((4,), (True,), (2, 2), (False, False))


@pytest.mark.parametrize(("shape", "wrap"), [((200,), (False,)), ((100,), (True,)), ((4, 30), (False, False))])
def test_best_gathers_what_is_left_in_many_cubes(shape, wrap) -> None:
    pod, best = Pod(Topology((8, 8, 8)), 4), policies.get("best")
    assert pod.cubes is not None
    for job, cube in enumerate(range(8), 1):
        half = pod.cubes.nodes[cube].reshape(4, 4, 4)[:, :2]
        pod.take(job, grant(pod, half, None, "4x2x4"))
    found = best.place(pod, shape, wrap)
    assert found is not None and found.dilation == 1 and found.wireable
    assert unlinked(pod, found, wrap) == 0
    pod.take(9, found)
    pod.release(1)  # a whole cube, and the rest
    more = best.place(pod, (70,))
    assert more is None or (more.wireable and more.dilation == 1 and unlinked(pod, more, (False,)) == 0)
