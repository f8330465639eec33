"""The first free box."""

from __future__ import annotations

import numpy as np

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies.base import Cached, Shape, Wrap
from meshsys.cluster.policies.boxes import box_nodes, first_free, padded, rotations
from meshsys.cluster.wiring import grant
from meshsys.torus.shapes import shape_text

__all__ = ["FirstFit"]


class FirstFit(Cached):
    """For each rotation of the shape, the first corner from which its box is free in the torus.

    On a pod of cubes it takes the cubes as they are numbered, joined to the torus that the topology names.
    """

    name = "first_fit"

    def place(self, pod: Pod, shape: Shape, wrap: Wrap = None) -> Grant | None:
        sides = padded(shape, pod.ndim)
        for box, rotation in rotations(sides) if sides else ():
            corner = first_free(pod, box)
            if corner is not None:
                nodes = np.transpose(box_nodes(pod, corner, box), rotation).reshape(shape)
                found = grant(pod, nodes, wrap, shape_text(box), rotation)
                if pod.admits(found):
                    return found
        return None
