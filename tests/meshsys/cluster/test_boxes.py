from __future__ import annotations

import random

import numpy as np
import pytest

from meshsys.cluster.pod import Pod
from meshsys.cluster.policies.boxes import box_nodes, first_free, free_boxes, rotations, touched
from meshsys.torus import Topology

TORI = [Topology((6, 5, 7)), Topology((8, 8), "v5e"), Topology((4, 4, 4), "v4"), Topology((2, 3, 4)), Topology((5,))]


@pytest.mark.parametrize("topology", TORI, ids=str)
def test_free_boxes_and_what_they_touch(topology: Topology) -> None:
    rng = random.Random(0)
    pod = Pod(topology, None)
    pod.fail(rng.sample(range(pod.size), pod.size // 4))
    for _ in range(12):
        box = tuple(rng.randint(1, min(size, 4) if rng.random() < 0.8 else size) for size in pod.dims)
        room, counts = free_boxes(pod, box), touched(pod, box)
        wanted = None
        for corner in np.ndindex(*pod.dims):
            ends = [start + side for start, side in zip(corner, box, strict=True)]
            beyond = [end > size and not wrap for end, size, wrap in zip(ends, pod.dims, pod.wrap, strict=True)]
            around = [
                side == size and start > 0 for start, side, size in zip(corner, box, pod.dims, strict=True)
            ]  # the same box again
            chips = set() if any(beyond) else set(box_nodes(pod, corner, box).ravel().tolist())
            free = bool(chips) and not any(around) and all(pod.owner[chip] == 0 for chip in chips)
            assert (room is not None and bool(room[corner])) == free, (box, corner)
            if free:
                wanted = wanted or corner
                near = {topology.index(n) for chip in chips for n in topology.neighbours(topology.coord(chip))}
                assert counts[corner] == sum(pod.owner[chip] == 0 for chip in near - chips)
        assert first_free(pod, box) == wanted


def test_rotations() -> None:
    found = dict(rotations((2, 3, 2)))
    assert found == {(2, 3, 2): (0, 1, 2), (2, 2, 3): (0, 2, 1), (3, 2, 2): (1, 0, 2)}
    for box, rotation in found.items():
        assert tuple(box[along] for along in rotation) == (2, 3, 2)
