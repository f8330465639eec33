"""The step of a configuration as its compiler sees it, on a machine that has none of its devices.

TPU programs are compiled by libtpu (extra `tpu-aot`) for a topology that it describes; a torus of no generation is
compiled for as many fake CPU devices.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshsys.assemble import Assembly
from meshsys.errors import ConfigError
from meshsys.mesh import ensure_devices, make_mesh
from meshsys.planner import counts, hlo
from meshsys.planner.flops import model_flops
from meshsys.planner.plan import CollectivePlan, CompiledPlan
from meshsys.planner.times import axes_of, collective_seconds, part_seconds
from meshsys.step import Step
from meshsys.torus import Topology
from meshsys.torus.shapes import shape_text

__all__ = ["OutOfMemory", "compiled_plan", "devices_of", "missing_compiler"]

_NAMES = {"ironwood": "tpu7x", "v7": "tpu7x"}  # as libtpu calls the generations


class OutOfMemory(ConfigError):
    """The compiler finds that the program does not fit in a device's memory."""


def missing_compiler(topology: Topology) -> str | None:
    """What to install to compile for a topology, None if it is there."""
    if topology.generation and importlib.util.find_spec("libtpu") is None:
        return (
            f"mesh.topology={topology}: the TPU compiler's figures need libtpu; pip install 'meshsys[tpu-aot]', "
            f"or leave out --compile"
        )
    return None


def devices_of(topology: Topology) -> Sequence[jax.Device]:
    """Devices of a topology, which need not exist, in no particular order.

    Raises:
        ConfigError: libtpu is not installed, or has no such topology.
    """
    if not topology.generation:
        ensure_devices(topology.size, f"mesh.topology={topology}")
        return jax.devices()[: topology.size]
    if missing := missing_compiler(topology):
        raise ConfigError(missing)
    import libtpu
    from jax.experimental import topologies

    # Nothing here touches a TPU: let several processes compile, and do not ask the cloud what machine this is.
    settings = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    for name, value in (settings | {"TPU_LIBRARY_PATH": libtpu.get_library_path()}).items():
        os.environ.setdefault(name, value)
    generation = _NAMES.get(topology.generation, topology.generation)
    name = f"{generation}:{shape_text(topology.shape, topology.twisted)}"
    options: dict[str, Any] = {"chip_config_name": "megacore"} if topology.generation == "v4" else {}
    if topology.twisted:  # libtpu counts the twisted dimensions among those that wrap around
        options["wrap"] = [True] * len(topology.shape)
    if not jax.config.jax_platforms:  # libtpu is there, and a TPU is not: JAX would look for one
        jax.config.update("jax_platforms", "cpu")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"mesh.topology={topology}: libtpu cannot describe it ({_first_line(error)}); use another topology"
        ) from None


def compiled_plan(assembly: Assembly) -> CompiledPlan:
    """Compiles the step, and counts what it does.

    Raises:
        OutOfMemory: the compiler rejects it.
        ConfigError: there is no compiler for the topology.
    """
    topology = assembly.placement.topology
    mesh = make_mesh(assembly.placement, devices_of(topology))
    lowered = Step(assembly, mesh).lower()
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(
            f"mesh.topology={topology}: the compiler rejects the step for memory ({_first_line(error)}); use more "
            "devices, fewer sequences a microbatch, pipeline.remat=full or pipeline.fsdp_gather=tick"
        ) from None
    seconds = time.perf_counter() - started
    memory: Any = compiled.memory_analysis()
    module = hlo.parse(compiled.as_text() or "")
    table = assembly.program.rows()["branch"]
    parts = counts.count(module, assembly.program.branch_count, len(table))
    return _plan(assembly, memory, parts, np.asarray(table), seconds)


def _plan(assembly: Assembly, memory: Any, parts: counts.Parts, table: np.ndarray, seconds: float) -> CompiledPlan:
    """`table[tick, rank]`: the branch."""
    chip = assembly.placement.topology.chip
    every = (parts.once, parts.tick, *parts.branches)
    ticks, ranks = table.shape
    # runs[part, rank]: how often a rank runs each part.
    runs = np.array(
        [np.ones(ranks), np.full(ranks, ticks), *((table == branch).sum(0) for branch in range(len(parts.branches)))]
    )
    flops = runs.T @ np.array([part.flops for part in every])
    traffic = runs.T @ np.array([part.traffic for part in every])
    step_seconds = mfu = None
    if chip is not None:
        once, tick, *branches = (part_seconds(part, assembly.placement, chip) for part in every)
        step_seconds = once + ticks * tick + float(np.array(branches)[table].max(1).sum())
        mfu = model_flops(assembly) / (step_seconds * chip.flops * assembly.placement.size)
    return CompiledPlan(
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        reused=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        host_temporaries=memory.host_temp_size_in_bytes,
        program=memory.generated_code_size_in_bytes,
        total=(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.generated_code_size_in_bytes
        ),
        limit=None if chip is None else int(chip.hbm),
        flops=float(flops.max()),
        traffic=float(traffic.max()),
        collectives=_collectives(assembly, every, runs),
        step_seconds=step_seconds,
        mfu=mfu,
    )


def _collectives(
    assembly: Assembly, every: Sequence[counts.Part], runs: np.ndarray
) -> tuple[CollectivePlan, ...]:
    """By kind and mesh axes: how often the busiest rank runs them, the bytes, and the time by the closed forms."""
    placement, chip = assembly.placement, assembly.placement.topology.chip
    found: dict[tuple[str, str], np.ndarray] = {}
    for part, times in zip(every, runs, strict=True):
        for collective in part.collectives:
            key = collective.kind, "+".join(axes_of(assembly.placement.shape, collective.group))
            seconds = 0.0 if chip is None else collective_seconds(collective, placement, chip)
            each = np.array([1.0, collective.bytes, seconds])[:, None]
            found[key] = found.get(key, np.zeros((3, runs.shape[1]))) + collective.times * times * each
    return tuple(
        CollectivePlan(kind, axes, round(count), size, None if chip is None else seconds)
        for (kind, axes), total in sorted(found.items())
        for count, size, seconds in [map(float, total.max(1))]
    )


def _first_line(error: Exception) -> str:
    text = re.sub(r"^[A-Z_]+: (E\d+: )?(\w+: )?", "", str(error).strip().splitlines()[0])
    return text.rstrip(".;")
