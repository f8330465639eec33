"""A placement becomes a `jax.sharding.Mesh`; on CPU the devices for it are made here."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from meshsys import distributed
from meshsys.errors import ConfigError
from meshsys.torus import AXES, Placement, Topology

__all__ = ["ensure_devices", "make_mesh"]

_MOST_FAKE_DEVICES = 4096  # JAX takes half a minute to start with so many, and grows worse than linearly
_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def ensure_devices(count: int, option: str = "mesh.topology") -> None:
    """Sees to it that JAX has `count` devices, and starts its backend.

    Where the backend is not up yet, the CPU platform gets `count` fake devices (or as many as the user
    asked for with JAX_NUM_CPU_DEVICES or XLA_FLAGS, if that is more); each process of several gets its part.
    A TPU or GPU, where there is one, stays JAX's default platform and is left alone.

    Args:
        count: devices that are needed; more are fine.
        option: what asks for them, for the error: "mesh.topology=2x2x2".

    Raises:
        ConfigError: JAX has fewer devices.
    """
    started = False
    if count <= _MOST_FAKE_DEVICES:
        processes = distributed.count()
        wanted = max(count, _devices_asked_for()) if processes == 1 else -(-count // processes)
        try:
            jax.config.update("jax_num_cpu_devices", wanted)
        except RuntimeError:  # how JAX says that its backend is up
            started = True
    have = jax.device_count()
    if have < count:
        raise _too_few(option, count, have, jax.default_backend(), started)


def _devices_asked_for() -> int:
    configured = jax.config.jax_num_cpu_devices  # -1 unless set; goes before the flag
    flags = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
    return configured if configured >= 0 or not flags else int(flags[-1])


def _too_few(option: str, count: int, have: int, platform: str, started: bool) -> ConfigError:
    if platform != "cpu":
        way = f"take a mesh.topology of at most {have}, or set JAX_PLATFORMS=cpu to try it on fake devices"
    elif started:
        way = (
            f"JAX had started before meshsys could make them: set JAX_NUM_CPU_DEVICES={count} in the environment, "
            f"or take a mesh.topology of at most {have}"
        )
    else:
        way = f"take a mesh.topology of at most {_MOST_FAKE_DEVICES if count > _MOST_FAKE_DEVICES else have}"
    return ConfigError(f"{option} needs {count} devices, but JAX has {have} ({platform}); {way}")


def make_mesh(placement: Placement, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a placement, with axes pipe, data, fsdp, expert, context, tensor, all of type Auto.

    TPU devices are found by their coordinates (from the lowest, for a slice that is part of a larger one);
    any other devices are taken as the torus in row-major order. Devices that are left over are not used.

    Args:
        placement: the torus and the node of each mesh position.
        devices: by default all of JAX's.

    Raises:
        ConfigError: fewer devices than the torus has, or TPU devices of another shape.
    """
    found = list(jax.devices() if devices is None else devices)
    topology = placement.topology
    if len(found) < topology.size:
        platform = found[0].platform if found else jax.default_backend()
        raise _too_few(f"mesh.topology={topology}", topology.size, len(found), platform, started=True)
    nodes = np.empty(topology.size, object)
    nodes[:] = _in_tpu_order(topology, found) if found[0].platform == "tpu" else found[: topology.size]
    return Mesh(nodes[placement.indices], AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _in_tpu_order(topology: Topology, devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices of a TPU slice in the torus's row-major order; the first core of a chip where one is shown."""
    chips = np.array([device.coords for device in devices])
    chips -= chips.min(0)
    at = {(*map(int, chip), device.core_on_chip): device for chip, device in zip(chips, devices, strict=True)}
    pad = (0,) * (chips.shape[1] - len(topology.shape))
    rank = len(topology.shape)
    wanted = [(*coord[:rank], *pad, coord[rank] if topology.cores > 1 else 0) for coord in topology.coords()]
    missing = [coord for coord in wanted if coord not in at]
    if missing:
        shape = "x".join(str(int(side)) for side in chips.max(0) + 1)
        raise ConfigError(
            f"mesh.topology={topology} has a chip {missing[0][:-1]} (core {missing[0][-1]}), and these TPU devices "
            f"do not: they form {shape}; set mesh.topology to that shape or to a part of it"
        )
    return [at[coord] for coord in wanted]
