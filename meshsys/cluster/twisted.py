"""Twisted slices on a pod of cubes: the switches of the slice's own faces join other cubes than without the twist.

The twist moves by k, a multiple of the cube's side, so that a port still meets the one at its own place of the opposite
face, and any wiring can do it. Whole cubes are alike to the switches, so all policies would choose among the same ones.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.wiring import grant
from meshsys.errors import ConfigError
from meshsys.torus.shapes import Shape, shape_text
from meshsys.torus.twist import twist_of

__all__ = ["check_twisted", "place_twisted"]


def check_twisted(pod: Pod, shape: Shape, option: str) -> None:
    """Refuses what can have no twist on a pod, even if all is free.

    Args:
        option: whose value the shape is, for errors.

    Raises:
        ConfigError: another shape, no cubes, or cubes that the shape is not made of.
    """
    said = f"{option}={shape_text(shape, twisted=True)}"
    if twist_of(shape) is None or min(shape) < 3:
        raise ConfigError(f"{said} cannot be twisted; use k x k x 2k or k x 2k x 2k, as in 4x4x8, with k of 3 or more")
    if pod.cube is None:
        cube = f"{pod.options}cube"
        raise ConfigError(f"{said}: only switches can twist, and this pod has none; set {cube}, as {cube}=4")
    if min(shape) % pod.cube:
        raise ConfigError(f"{said} is not made of whole cubes of {pod.cube}; use sides that are multiples of it")


def place_twisted(pod: Pod, shape: Shape) -> Grant | None:
    """The first cubes that are all free, as a twisted slice; None if they are too few."""
    assert pod.cubes is not None and pod.cube is not None
    grid = tuple(side // pod.cube for side in shape)
    empty = np.flatnonzero(pod.cubes.free == pod.cubes.volume)
    if len(empty) < math.prod(grid):
        return None
    nodes = np.empty(shape, np.int64)
    for cube, place in zip(empty, itertools.product(*map(range, grid)), strict=False):
        part = tuple(slice(at * pod.cube, (at + 1) * pod.cube) for at in place)
        nodes[part] = pod.cubes.nodes[cube].reshape((pod.cube,) * len(shape))
    # The twist permutes which of the slice's ports are joined: they are those of a plain torus of this shape.
    plain = grant(pod, nodes, (True,) * len(shape), shape_text(shape, twisted=True), tuple(range(len(shape))))
    return replace(plain, wrap=(True,) * len(shape))
