"""The order that JAX would give to the devices of a slice, to compare with: `create_device_mesh` on stand-ins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental.mesh_utils import create_device_mesh

from meshsys.torus import AXES, Placement, Topology, placed

__all__ = ["jax_order"]

_KINDS = {
    "v4": "TPU v4",
    "v5p": "TPU v5",
    "v5e": "TPU v5 lite",
    "v6e": "TPU v6 lite",
    "ironwood": "TPU7x",
    "v7": "TPU7x",
    "tpu7x": "TPU7x",
}


@dataclass(frozen=True)
class _Device:
    """What `create_device_mesh` looks at."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0


def jax_order(topology: Topology, axes: Mapping[str, int]) -> Placement | str:
    """Where `create_device_mesh` puts the axes, in their order in the mesh, on a slice of a generation.

    Returns:
        A placement, or the name of the error with which it fails.
    """
    devices = [_device(topology, node) for node in topology.coords()]
    devices.sort(key=lambda device: (*device.coords[::-1], device.core_on_chip))
    sizes = [axes.get(name, 1) for name in AXES]
    try:
        mesh: Any = create_device_mesh(sizes, devices)
    except (AssertionError, NotImplementedError, ValueError) as error:
        return type(error).__name__
    nodes = np.array([_node(topology, device) for device in mesh.flat])
    return placed(topology, dict(zip(AXES, sizes, strict=True)), nodes.reshape(*sizes, topology.ndim))


def _device(topology: Topology, node: tuple[int, ...]) -> _Device:
    chip = (*node[: len(topology.shape)], 0, 0)[:3]
    core = node[-1] if topology.cores > 1 else 0
    number = topology.index(node)
    return _Device(number, (chip[0], chip[1], chip[2]), core, _KINDS[topology.generation])


def _node(topology: Topology, device: _Device) -> tuple[int, ...]:
    chip = device.coords[: len(topology.shape)]
    return (*chip, device.core_on_chip) if topology.cores > 1 else chip
