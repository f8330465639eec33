"""Command lines of XPK.

Source: XPK's parser of `workload create`. Types are named by their shape, as v5p-4x4x8: those that count cores, as
tpu7x-2048, stand for several shapes.
"""

from __future__ import annotations

import base64
import shlex

from meshsys.cluster.export.base import Order, check_names, cloud_orders, hardware, kubernetes_name
from meshsys.cluster.jobs import Orders

__all__ = ["export"]


def export(orders: Orders) -> dict[str, str]:
    """A shell script, one command a job."""
    jobs = cloud_orders(orders, "xpk")
    check_names(jobs)
    lines = ["#!/usr/bin/env bash", "set -euo pipefail", "", *(_create(job, orders) for job in jobs)]
    return {"jobs.sh": "\n".join(lines) + "\n"}


def _create(job: Order, orders: Orders) -> str:
    options = orders.export
    cluster = shlex.quote(options.cluster) if options.cluster else '"${XPK_CLUSTER:?the name of the GKE cluster}"'
    arguments = [
        "xpk workload create",
        f"--cluster={cluster}",
        f"--workload={kubernetes_name(job.spec.name)}",
        f"--tpu-type={hardware(job.topology).prefix}-{job.shape}",
        "--num-slices=1",
        f"--docker-image={shlex.quote(options.image)}",
        f"--priority={_priority(job.spec.priority)}",
        f"--max-restarts={job.spec.retries}",
        *(f"--env={shlex.quote(f'{name}={value}')}" for name, value in job.environment().items()),
        f"--command={shlex.quote(_command(job))}",
    ]
    return " \\\n  ".join(arguments)


def _command(job: Order) -> str:
    """The configuration travels with the command: there is no other way to a container."""
    if not job.spec.config:
        return shlex.join(job.command(""))
    file = f"/tmp/{job.spec.name}.yaml"
    encoded = base64.b64encode(job.config.encode()).decode()
    return f"echo {encoded} | base64 -d > {shlex.quote(file)} && exec {shlex.join(job.command(file))}"


def _priority(priority: int) -> str:
    return "low" if priority < 0 else "high" if priority else "medium"
