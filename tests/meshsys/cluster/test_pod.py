from __future__ import annotations

import numpy as np
import pytest

from meshsys.cluster.pod import FAILED, Pod
from meshsys.cluster.wiring import grant
from meshsys.errors import ConfigError
from meshsys.torus import Topology
from tests.oracles.pod_links import unlinked

CUBES = Pod(Topology((8, 8, 8)), 4)


def chips(pod: Pod, *places: tuple[int, ...]) -> np.ndarray:
    return np.array([pod.topology.index(place) for place in places])


def test_take_release_fail_repair() -> None:
    pod = Pod(Topology((4, 4, 4)), None)
    line = grant(pod, chips(pod, (0, 0, 0), (0, 0, 1), (0, 0, 2)), None, "3")
    pod.take(7, line)
    assert pod.free == 61 and (pod.owner[line.nodes] == 7).all() and not pod.free_nodes[0, 0, :3].any()
    assert pod.fail(chips(pod, (0, 0, 1), (1, 1, 1), (1, 1, 1)).tolist()) == (7,)
    assert pod.free == 60 and pod.owner[pod.topology.index((0, 0, 1))] == 7
    pod.release(7)
    assert pod.free == 62 and pod.owner[pod.topology.index((0, 0, 1))] == FAILED
    pod.repair(chips(pod, (0, 0, 1), (1, 1, 1), (2, 2, 2)).tolist())
    assert pod.free == 64 and not pod.owner.any() and not pod.jobs


def test_nothing_is_given_twice() -> None:
    pod = Pod(Topology((4, 4, 4)), None)
    pair = grant(pod, chips(pod, (0, 0, 0), (0, 0, 1)), None, "2")
    pod.take(1, pair)
    with pytest.raises(ValueError, match="job 1 has chips already"):
        pod.take(1, grant(pod, chips(pod, (1, 0, 0)), None, "1"))
    with pytest.raises(ValueError, match="chip 1 is not free"):
        pod.take(2, grant(pod, chips(pod, (0, 0, 1), (0, 0, 2)), None, "2"))
    with pytest.raises(ValueError, match="a chip is there twice"):
        pod.take(2, grant(pod, chips(pod, (1, 0, 0), (1, 0, 0)), None, "2"))
    across = grant(pod, chips(pod, (0, 0, 3), (0, 0, 2)), None, "2")
    far = grant(pod, chips(pod, (3, 0, 0), (1, 0, 0)), None, "2")  # over 0,0,0
    assert pod.admits(across) and pod.admits(far)
    pod.take(2, across)
    pod.take(3, far)
    through = grant(pod, chips(pod, (2, 0, 0), (0, 1, 0)), None, "2")
    assert through.dilation == 3 and not pod.admits(through)
    with pytest.raises(ValueError, match="another job uses link"):
        pod.take(4, through)
    assert pod.free == 58


def test_shared_links_are_counted() -> None:
    pod = Pod(Topology((4, 4, 4)), None, shared_links=True)
    pod.take(1, grant(pod, chips(pod, (3, 0, 0), (1, 0, 0)), None, "2"))
    other = grant(pod, chips(pod, (2, 0, 0), (0, 0, 0)), None, "2")
    assert pod.admits(other) and pod.sharing(other) == 1
    pod.take(2, other)
    assert pod.shared == 1
    pod.release(1)
    assert pod.shared == 0


@pytest.mark.parametrize(
    ("places", "wireable", "dilation"),
    [
        ([(0, 0, 0), (0, 0, 1), (0, 1, 1)], True, 1),
        ([(3, 1, 2), (4, 1, 2)], True, 1),  # two cubes, +x to -x
        ([(3, 1, 2), (0, 1, 2)], True, 1),  # a cube to itself
        ([(3, 1, 2), (4, 5, 2)], True, 1),  # whichever cube it is
        ([(3, 1, 2), (4, 2, 2)], False, 2),  # another position
        ([(2, 1, 2), (4, 1, 2)], False, 2),  # no port
        ([(3, 1, 2), (7, 1, 2)], False, 4),  # two +x faces
        ([(0, 0, 4), (0, 0, 3), (0, 4, 4)], False, 1),  # one port twice
        ([(0, 0, 0), (1, 1, 1)], True, 3),  # not next to each other, but in one cube
        ([(0, 1, 1), (3, 1, 1), (4, 1, 1)], False, 1),  # a cube closed on itself has no port left
    ],
)
def test_same_position_wiring(places: list[tuple[int, ...]], wireable: bool, dilation: int) -> None:
    found = grant(CUBES, chips(CUBES, *places), None, "")
    assert (found.wireable, found.dilation) == (wireable, dilation)
    assert (unlinked(CUBES, found, (False,)) == 0) == (wireable and dilation == 1)


def test_any_wiring() -> None:
    pod = Pod(Topology((8, 8, 8)), 4, "any")
    assert grant(pod, chips(pod, (3, 1, 2), (4, 6, 0)), None, "").wireable
    assert not grant(pod, chips(pod, (1, 1, 2), (4, 6, 0)), None, "").wireable  # an inner chip has no port
    star = chips(pod, (0, 1, 1), (4, 4, 4), (0, 1, 5))  # the corner has ports enough
    assert grant(pod, star, None, "").wireable


def test_rings_are_noticed_and_demanded() -> None:
    row = chips(CUBES, *[(x, 0, 0) for x in range(4)])
    assert grant(CUBES, row, None, "").wrap == (True,)  # its own ports
    short = chips(CUBES, *[(x, 0, 0) for x in range(3)])
    assert (grant(CUBES, short, None, "").wrap, grant(CUBES, short, None, "").dilation) == ((False,), 1)
    assert grant(CUBES, short, (True,), "").dilation == 2
    torus = Pod(Topology((4, 8)), None)
    sheet = np.arange(32).reshape(4, 8)
    assert grant(torus, sheet, None, "").wrap == (True, True)
    assert grant(torus, sheet[:, :7], None, "").wrap == (True, False)


def test_names_of_links() -> None:
    assert CUBES.link_name(CUBES.topology.index((1, 0, 3)) * 3 + 2) == "port 1,0,3 +z"
    assert CUBES.link_name(CUBES.topology.index((1, 0, 2)) * 3 + 2) == "link 1,0,2 +z"
    assert CUBES.link_name((512 + CUBES.topology.index((4, 1, 2))) * 3) == "port 4,1,2 -x"


@pytest.mark.parametrize(
    ("cube", "wiring", "message"),
    [
        (3, "same_position", "cube=3: 8x12x4 is not made of cubes of 3 a side; use a cube of 2 or 4, or none"),
        (4, "some", "wiring=some is not a wiring; use same_position or any"),
    ],
)
def test_bad_pods(cube, wiring, message) -> None:
    with pytest.raises(ConfigError) as error:
        Pod(Topology((8, 12, 4)), cube, wiring)
    assert str(error.value) == message
