from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshsys.errors import ConfigError
from meshsys.mesh import ensure_devices, make_mesh
from meshsys.torus import AXES, Topology, place

ROOT = Path(__file__).parents[2]
NEEDS_8 = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def run(lines: Sequence[str], **environment: str) -> str:
    """Runs Python lines in a process of their own, on the CPU platform without settings from outside."""
    outside = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(["import jax", "from meshsys.mesh import ensure_devices", *lines])],
        env={**outside, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return (done.stdout.strip() or done.stderr).splitlines()[-1]


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, 6),
        ({"JAX_PLATFORMS": ""}, 6),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}, 6),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=7"}, 7),
        ({"JAX_NUM_CPU_DEVICES": "7"}, 7),
    ],
    ids=str,
)
def test_devices_are_made(environment: dict[str, str], devices: int) -> None:
    assert run(["ensure_devices(6)", "print(jax.device_count())"], **environment) == str(devices)


def test_devices_are_made_once() -> None:
    """The first call decides: a later one may ask for as many or fewer, not for more."""
    assert run(["ensure_devices(3)", "ensure_devices(3)", "ensure_devices(2)", "print(jax.device_count())"]) == "3"
    error = run(["ensure_devices(3)", "ensure_devices(8, 'mesh.topology=2x2x2')"])
    assert error == (
        "meshsys.errors.ConfigError: mesh.topology=2x2x2 needs 8 devices, but JAX has 3 (cpu); JAX had started before "
        "meshsys could make them: set JAX_NUM_CPU_DEVICES=8 in the environment, or take a mesh.topology of at most 3"
    )


def test_the_backend_is_up_already() -> None:
    flags = "--xla_force_host_platform_device_count=4"
    assert run(["jax.devices()", "ensure_devices(4)", "print('fine')"], XLA_FLAGS=flags) == "fine"
    assert "needs 5 devices, but JAX has 4" in run(["jax.devices()", "ensure_devices(5)"], XLA_FLAGS=flags)


def test_more_fake_devices_than_jax_can_bear() -> None:
    error = run(["ensure_devices(65536, 'mesh.topology=65536')"])
    assert "mesh.topology=65536 needs 65536 devices, but JAX has 1 (cpu); take a mesh.topology of at most 4096" in error


@NEEDS_8
@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("2x2x2", {"pipe": 2, "data": 2, "tensor": 2}),
        ("2x2x2", {"pipe": 4, "fsdp": 2}),
        ("2x2", {"pipe": 4}),
        ("2x3", {"pipe": 5}),
        ("1", {}),
    ],
)
def test_make_mesh(text: str, axes: dict[str, int]) -> None:
    placement = place(Topology.parse(text), axes)
    mesh = make_mesh(placement)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == placement.shape
    assert mesh.axis_types == (AxisType.Auto,) * 6
    for position in np.ndindex(placement.shape):
        assert mesh.devices[position] is jax.devices()[placement.topology.index(placement.coords[position].tolist())]


@NEEDS_8
def test_arrays_live_on_the_mesh() -> None:
    mesh = make_mesh(place(Topology.parse("2x2x2"), {"pipe": 4, "tensor": 2}))
    x = jax.device_put(np.arange(8.0).reshape(4, 2), NamedSharding(mesh, PartitionSpec("pipe", "tensor")))
    for shard in x.addressable_shards:
        pipe, tensor = (part.start for part in shard.index)
        assert shard.device is mesh.devices[pipe, 0, 0, 0, 0, tensor]


@NEEDS_8
def test_too_few_devices() -> None:
    placement = place(Topology.parse("2x2x2"), {"pipe": 2})
    with pytest.raises(ConfigError, match="mesh.topology=2x2x2 needs 8 devices, but JAX has 7"):
        make_mesh(placement, jax.devices()[:7])
    with pytest.raises(ConfigError, match="needs 100000 devices"):
        ensure_devices(100_000)


@dataclass(frozen=True)
class TpuDevice:
    """What `make_mesh` sees of a TPU."""

    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"


def slice_of(shape: tuple[int, int, int], start: tuple[int, int, int] = (0, 0, 0), cores: int = 1) -> list[TpuDevice]:
    """A slice's devices, in an order that is no order."""
    chips = [tuple(int(a + b) for a, b in zip(start, chip, strict=True)) for chip in np.ndindex(shape)]
    devices = [TpuDevice((x, y, z), core) for x, y, z in chips for core in range(cores)]
    return [devices[i] for i in np.random.default_rng(0).permutation(len(devices))]


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("v5p:2x2x2", slice_of((2, 2, 2))),
        ("v5p:2x2x1", slice_of((2, 2, 4))),  # part of a larger slice
        ("v5e:2x4", slice_of((2, 4, 1), start=(4, 8, 0))),
        ("2x2x2", slice_of((2, 2, 2), cores=2)),  # the first core of each chip
        ("ironwood:2x2x1", slice_of((2, 2, 1), cores=2)),
    ],
)
def test_tpu_devices_are_found_by_their_coordinates(text: str, devices: list[TpuDevice]) -> None:
    placement = place(Topology.parse(text), {"pipe": 2, "tensor": 2})
    mesh = make_mesh(placement, devices)  # type: ignore[arg-type]
    low = np.min([device.coords for device in devices], 0)
    for position in np.ndindex(placement.shape):
        device: Any = mesh.devices[position]
        node = (*(np.array(device.coords) - low), device.core_on_chip)
        expected = placement.coords[position].tolist()
        if placement.topology.cores == 1:
            expected = [*expected, *[0] * (4 - len(expected))]
        assert list(node) == expected


@pytest.mark.parametrize("text", ["8", "2x4", "v5p:2x2x4"])
def test_tpu_devices_of_another_shape(text: str) -> None:
    placement = place(Topology.parse(text), {"pipe": 2})
    with pytest.raises(ConfigError, match=f"mesh.topology={text} .* they form 4x2x2"):
        make_mesh(placement, slice_of((4, 2, 2)))  # type: ignore[arg-type]
