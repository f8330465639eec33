from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from meshsys.cli import main
from meshsys.cluster.pod import Pod, Wiring
from meshsys.cluster.twisted import place_twisted
from meshsys.torus import Topology
from tests.oracles import twisted_links


@pytest.mark.parametrize("wiring", ["same_position", "any"])
@pytest.mark.parametrize(("shape", "cube"), [((4, 4, 8), 4), ((4, 8, 8), 4), ((8, 4, 8), 2)], ids=str)
def test_every_link_of_the_twist_is_a_link_of_the_pod(shape: tuple[int, ...], cube: int, wiring: Wiring) -> None:
    """Within a cube, or between ports at the same place of opposite faces, each used once."""
    pod = Pod(Topology((8, 8, 16)), cube, wiring)
    pod.fail([0, 700])  # cubes that are not whole are left out
    grant = place_twisted(pod, shape)
    assert grant is not None and grant.wireable and grant.dilation == 1 and all(grant.wrap)
    pod.take(1, grant)
    ports = set()
    for at, dim in itertools.product(twisted_links.nodes(shape), range(3)):
        one, other = (int(grant.nodes[place]) for place in (at, twisted_links.step(shape, at, dim, 1)))
        apart = pod.coords[other] - pod.coords[one]
        unit = np.eye(3, dtype=int)[dim]
        if pod.cube_of[one] == pod.cube_of[other] and (apart == unit).all():
            assert one * 3 + dim in grant.links
            continue
        assert (pod.coords[other] % cube - pod.coords[one] % cube == (1 - cube) * unit).all()
        pair = {one * 3 + dim, (pod.size + other) * 3 + dim}
        assert all(pod.is_port(port) and port in grant.links for port in pair) and not pair & ports
        ports |= pair
    pod.release(1)
    assert pod.free == pod.size - 2


def test_takes_whole_cubes_until_there_are_none() -> None:
    pod = Pod(Topology((8, 8, 16)), 4)
    for job in range(1, 9):
        grant = place_twisted(pod, (4, 4, 8))
        assert grant is not None
        pod.take(job, grant)
    assert pod.free == 0 and place_twisted(pod, (4, 4, 8)) is None


def test_the_command_places_a_twisted_shape(capsys: Any) -> None:
    command = ["cluster", "place", "--topology", "v4:16x16x16", "--cube", "4", "--shape", "4x8x8_twisted", "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fold"] == "4x8x8_twisted" and found["cubes"] == [0, 1, 2, 3]
    assert found["wrap"] == ["x", "y", "z"] and len(found["device_order"]) == 256


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--topology", "16x16x16", "--shape", "4x4x8_twisted"], "only switches can twist, and this pod has none"),
        (["--topology", "8x8x8", "--cube", "4", "--shape", "4x4x4_twisted"], "cannot be twisted; use k x k x 2k"),
        (["--topology", "8x8x8", "--cube", "2", "--shape", "2x2x4_twisted"], "with k of 3 or more"),
        (["--topology", "8x8x16", "--cube", "8", "--shape", "4x4x8_twisted"], "is not made of whole cubes of 8"),
        (["--topology", "4x4x8_twisted", "--shape", "4"], "is twisted, which a slice can be and no pod"),
        (["--topology", "8x8x8", "--cube", "4", "--shape", "8x16x16_twisted"], "has 2048 chips, but 8x8x8"),
    ],
)
def test_what_cannot_be_twisted(arguments: list[str], says: str, capsys: Any) -> None:
    assert main(["cluster", "place", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("meshsys: error: --") and says in said and said.count("\n") == 1
