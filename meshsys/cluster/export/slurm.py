"""Batch scripts of Slurm: one a job, on the hosts of its placement where their names are given."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from meshsys.cluster.export.base import Order, cloud_orders, placed
from meshsys.cluster.jobs import Orders
from meshsys.cluster.slices import COORDINATOR_PORT, Slice, cpu_environment, slice_of, tpu_environment
from meshsys.cluster.store import JobSpec
from meshsys.errors import ConfigError
from meshsys.torus import Topology

__all__ = ["export"]


def export(orders: Orders) -> dict[str, str]:
    """`NAME.sbatch` for each job."""
    pod = orders.pod.topology
    if not pod.generation:
        return {f"{spec.name}.sbatch": _fake(spec, orders) for spec in orders.specs}
    jobs = cloud_orders(orders, "slurm", parts_of_hosts=True)
    places = placed(orders) if orders.export.hosts else {job.spec.name: _alone(job.spec, orders) for job in jobs}
    return {f"{job.spec.name}.sbatch": _tpu(job, orders, places[job.spec.name]) for job in jobs}


def _alone(spec: JobSpec, orders: Orders) -> Slice:
    grant = orders.policy.place(orders.pod.empty(), spec.shape)
    assert grant is not None, "possible when the jobs were read"
    return slice_of(orders.pod, grant)


def _fake(spec: JobSpec, orders: Orders) -> str:
    """A torus of no generation is one of fake devices, all in one process."""
    part = _alone(spec, orders)
    job = Order(spec, Topology(part.shape), orders.export.runs)
    return _script(job, orders, 1, None, {**cpu_environment(part), **job.environment()})


def _tpu(job: Order, orders: Orders, part: Slice) -> str:
    block = (2, 2, *(1,) * (len(part.pod.shape) - 2))  # chips of a host
    environment = job.environment()
    if job.chips < math.prod(block):
        environment |= tpu_environment(part, block)
    names = _hosts(part, block, orders.export.hosts) if orders.export.hosts else None
    return _script(job, orders, len(names) if names else job.hosts, names, environment)


def _hosts(part: Slice, block: tuple[int, ...], names: Sequence[str]) -> list[str]:
    """The names of the hosts on which a slice lies."""
    pod = part.pod
    grid = tuple(math.ceil(side / long) for side, long in zip(pod.shape, block, strict=True))
    if len(names) != math.prod(grid):
        raise ConfigError(
            f"export.hosts has {len(names)} names, but cluster.topology={pod} has {math.prod(grid)} hosts of "
            f"{'x'.join(map(str, block))} chips; write one name a host, row-major"
        )
    found = {tuple(place // long for place, long in zip(chip, block, strict=True)) for chip in part.chips}
    return [names[number] for number in sorted(int(np.ravel_multi_index(host, grid)) for host in found)]


def _script(
    job: Order,
    orders: Orders,
    nodes: int,
    hosts: list[str] | None,
    environment: Mapping[str, str],
) -> str:
    grace = max(1, round(orders.cluster.grace_seconds))
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={job.spec.name}",
        f"#SBATCH --partition={orders.export.queue}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        f"#SBATCH --signal=TERM@{grace}",
        f"#SBATCH --output={job.run_dir}.%j.log",
    ]
    if hosts is not None:
        lines.append(f"#SBATCH --nodelist={','.join(hosts)}")
    lines += ["set -euo pipefail", ""]
    if job.spec.config:
        lines += [
            f"export CONFIG={shlex.quote(job.run_dir + '.yaml')}",
            "cat > \"$CONFIG\" <<'END_OF_CONFIG'",
            job.config.rstrip("\n"),
            "END_OF_CONFIG",
        ]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    said = " ".join('"$CONFIG"' if word == "$CONFIG" else shlex.quote(word) for word in job.command("$CONFIG"))
    if nodes == 1:
        lines.append(f"exec srun {said}")
    else:
        lines += [
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            f'export JAX_COORDINATOR_ADDRESS="$(head -n 1 <<< "$hosts"):{COORDINATOR_PORT}"',
            'export TPU_WORKER_HOSTNAMES="$(paste -sd, <<< "$hosts")"',
            # The number of a process is known to srun's tasks only.
            f"exec srun bash -c 'export TPU_WORKER_ID=$SLURM_PROCID; exec \"$@\"' _ {said}",
        ]
    return "\n".join(lines) + "\n"
