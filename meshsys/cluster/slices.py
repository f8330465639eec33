"""A granted slice as the environment of the processes that use it: fake devices on a CPU, chips of a TPU."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.torus import Topology, TopologyError
from meshsys.torus.shapes import shape_text

__all__ = ["COORDINATOR_PORT", "Slice", "cpu_environment", "slice_of", "tpu_environment"]

COORDINATOR_PORT = 8476
"""On which the first process of a slice of several hosts listens."""

_DEVICES = re.compile(r"\s*--xla_force_host_platform_device_count=\d+")
# What libtpu is given for processes that share a host, by their chips; as Ray gives it.
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


@dataclass(frozen=True)
class Slice:
    """The chips of one job.

    Attributes:
        pod: of which it is a part.
        shape: logical; every logical neighbour is a link away where the grant's dilation is 1.
        chips: coordinates in the pod, in device order: row-major in `shape`.
    """

    pod: Topology
    shape: tuple[int, ...]
    chips: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Chips."""
        return len(self.chips)

    @property
    def devices(self) -> int:
        """What JAX shows of them."""
        return self.size * self.pod.cores

    @property
    def topology(self) -> str:
        """As `mesh.topology` takes it: with the pod's generation where that sells such slices."""
        text = shape_text(self.shape)
        if self.pod.generation:
            try:
                return str(Topology(self.shape, self.pod.generation))
            except TopologyError:
                return text if self.pod.cores == 1 else f"{text}x{self.pod.cores}"
        return text

    @property
    def corner(self) -> tuple[int, ...]:
        """The lowest coordinate along each dimension of the pod."""
        return tuple(map(min, zip(*self.chips, strict=True)))

    @property
    def box(self) -> tuple[int, ...] | None:
        """Sides of the box of the pod that the chips fill; None where they fill none."""
        sides = tuple(max(line) - min(line) + 1 for line in zip(*self.chips, strict=True))
        return sides if math.prod(sides) == self.size else None


def slice_of(pod: Pod, grant: Grant) -> Slice:
    """What a grant of a pod is to the job that gets it."""
    chips = tuple(tuple(map(int, chip)) for chip in pod.coords[grant.nodes.ravel()])
    return Slice(pod.topology, grant.shape, chips)


def cpu_environment(found: Slice) -> dict[str, str]:
    """As many fake devices as the slice has, whatever the environment says now."""
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(found.devices),
        "XLA_FLAGS": _DEVICES.sub("", os.environ.get("XLA_FLAGS", "")).strip(),
    }


def tpu_environment(found: Slice, host: Sequence[int] | None = None) -> dict[str, str]:
    """The slice's chips of one host; other processes may use the others.

    Args:
        host: chips of a host along each dimension, numbered row-major; None where the whole pod is one host.
    """
    sides = found.pod.shape if host is None else host
    local = [tuple(place % side for place, side in zip(chip, sides, strict=True)) for chip in found.chips]
    return {
        "TPU_VISIBLE_CHIPS": ",".join(map(str, sorted(_number(chip, sides) for chip in local))),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _BOUNDS.get(found.size, _three(found.box or (found.size,))),
        "TPU_PROCESS_BOUNDS": "1,1,1",
        # libtpu would take a process with 2,2,1 for the only one of its host, and lock the others out.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def _number(chip: Sequence[int], shape: Sequence[int]) -> int:
    """Row-major."""
    number = 0
    for place, side in zip(chip, shape, strict=True):
        number = number * side + place
    return number


def _three(sides: Sequence[int]) -> str:
    return ",".join(map(str, (*sides, 1, 1, 1)[: max(3, len(sides))]))
