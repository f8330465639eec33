"""A program that reserves slices with `ray.util.tpu` and runs a job on each.

Source: Ray's python/ray/util/tpu.py: `slice_placement_group` for whole slices, `subslice_placement_group` for parts of
one, and one bundle a host in both.
"""

from __future__ import annotations

import json

from meshsys.cluster.export.base import Order, cloud_orders, hardware
from meshsys.cluster.jobs import Orders
from meshsys.cluster.slices import COORDINATOR_PORT
from meshsys.torus import Topology

__all__ = ["export"]

_PROGRAM = '''\
"""Runs jobs on TPU slices that Ray reserves; written by `meshsys cluster export`."""

import json
import os
import subprocess

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import slice_placement_group{subslice_import}

JOBS = json.loads(r"""
{jobs}
""")
PORT = {port}


@ray.remote(num_cpus=0, max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(num_cpus=0, max_retries=0)
def work(job, worker, hosts):
    """One host's part of a job; returns its exit code."""
    environment = os.environ | job["environment"]
    if len(hosts) > 1:
        environment |= {{
            "JAX_COORDINATOR_ADDRESS": f"{{hosts[0]}}:{{PORT}}",
            "TPU_WORKER_ID": str(worker),
            "TPU_WORKER_HOSTNAMES": ",".join(hosts),
        }}
    if job["config"]:
        os.makedirs(os.path.dirname(job["config_file"]), exist_ok=True)
        with open(job["config_file"], "w") as file:
            file.write(job["config"])
    return subprocess.run(job["command"], env=environment).returncode


@ray.remote(num_cpus=0, max_retries=0)
def run(job):
    """Reserves the slice of a job, and starts it again after a crash; returns its exit code."""
    reserve = {reserve}
    part = reserve(job["topology"], job["accelerator_version"])
    ray.get(part.placement_group.ready())

    def on(bundle, tpus):
        strategy = PlacementGroupSchedulingStrategy(part.placement_group, placement_group_bundle_index=bundle)
        return {{"scheduling_strategy": strategy, "resources": {{"TPU": tpus}}}}

    bundles = range(part.num_hosts)
    hosts = ray.get([address.options(**on(bundle, 0.001)).remote() for bundle in bundles])
    try:
        for _ in range(job["retries"] + 1):
            chips = job["chips_per_host"]
            started = [work.options(**on(bundle, chips)).remote(job, bundle, hosts) for bundle in bundles]
            code = max(ray.get(started), key=abs)
            if code in (0, 2):
                return code
        return code
    finally:
        part.shutdown()


if __name__ == "__main__":
    ray.init()
    codes = ray.get([run.remote(job) for job in JOBS])
    for job, code in zip(JOBS, codes):
        print(job["name"], "done" if code == 0 else f"failed: exit code {{code}}")
    raise SystemExit(any(codes))
'''


def export(orders: Orders) -> dict[str, str]:
    """One program for all jobs, the highest priority first."""
    jobs = sorted(cloud_orders(orders, "ray"), key=lambda job: -job.spec.priority)
    pod = orders.pod.topology
    some = any(_is_part(job, pod) for job in jobs)
    text = _PROGRAM.format(
        jobs=json.dumps([_job(job, pod) for job in jobs], indent=2).replace('"""', r"\u0022\u0022\u0022"),
        port=COORDINATOR_PORT,
        subslice_import=", subslice_placement_group" if some else "",
        reserve='subslice_placement_group if job["part"] else slice_placement_group'
        if some
        else "slice_placement_group",
    )
    return {"jobs.py": text}


def _is_part(job: Order, pod: Topology) -> bool:
    """Ray carves parts out of v6e slices; others are reserved whole."""
    return pod.generation == "v6e" and job.topology != pod and job.hosts >= 1 and job.chips > 1


def _job(job: Order, pod: Topology) -> dict[str, object]:
    file = f"/tmp/meshsys/{job.spec.name}.yaml"
    return {
        "name": job.spec.name,
        "topology": job.shape,
        "accelerator_version": hardware(pod).ray,
        "part": _is_part(job, pod),
        "chips_per_host": job.per_host,
        "retries": job.spec.retries,
        "environment": job.environment(),
        "command": job.command(file),
        "config_file": file,
        "config": job.config,
    }
