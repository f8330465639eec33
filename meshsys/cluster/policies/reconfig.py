"""Boxes of cubes that switches put together."""

from __future__ import annotations

import numpy as np

from meshsys.cluster.folds import embed
from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies.base import Cached, Shape, Wrap
from meshsys.cluster.policies.boxes import padded, rotations
from meshsys.cluster.policies.chunks import find_chunks
from meshsys.cluster.wiring import grant
from meshsys.errors import ConfigError

__all__ = ["Reconfig", "from_chunks"]


class Reconfig(Cached):
    """For each rotation of the shape, chunks of cubes wherever they are free. No folds."""

    name = "reconfig"

    def place(self, pod: Pod, shape: Shape, wrap: Wrap = None) -> Grant | None:
        sides = padded(shape, pod.ndim)
        return None if sides is None else from_chunks(pod, shape, wrap, sides, self.name)


def from_chunks(pod: Pod, shape: Shape, wrap: Wrap, folded: Shape, policy: str) -> Grant | None:
    """A shape, folded to a box, that is put together from chunks in the first rotation that is free."""
    if pod.cubes is None:
        cube = f"{pod.options}cube"
        raise ConfigError(f"{cube} is not set, and policy {policy} puts cubes together; set it, as {cube}=4")
    if np.prod(folded) > pod.free:
        return None
    for box, _ in rotations(folded):
        nodes = find_chunks(pod.cubes, box)
        if nodes is None:
            continue
        closed = tuple(side > 2 and side % pod.cubes.side == 0 for side in box)
        fold = embed(shape, wrap or (False,) * len(shape), box, closed, steps=500)
        if fold is not None:
            return grant(pod, nodes[tuple(np.moveaxis(fold.places, -1, 0))], wrap, fold.how, detours=False)
    return None
