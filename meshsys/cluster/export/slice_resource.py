"""GKE's `Slice` resources: cubes of Ironwood that the switches join, as our policy chose them.

Source: GKE's documentation of dynamic slicing (accelerator.gke.io/v1beta1): type, topology in ascending order, and as
many partition ids as the slice has cubes of 4x4x4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshsys import yaml_core
from meshsys.cluster.export.base import Order, check_names, cloud_orders, hardware, kubernetes_name, place_all
from meshsys.cluster.grant import Grant
from meshsys.cluster.jobs import Orders
from meshsys.cluster.pod import Pod
from meshsys.errors import ConfigError
from meshsys.torus.shapes import shape_text

__all__ = ["export"]

_CUBE = 4


def export(orders: Orders) -> dict[str, str]:
    """One Slice a job, all at once on the pod."""
    jobs = cloud_orders(orders, "slice")
    check_names(jobs)
    _check(orders)
    pod, grants = place_all(orders)
    documents = [_slice(job, pod, grants[job.spec.name], orders.export.partitions) for job in jobs]
    return {"slices.yaml": "---\n".join(yaml_core.dump(document) for document in documents)}


def _check(orders: Orders) -> None:
    pod, partitions = orders.pod, orders.export.partitions
    if hardware(pod.topology).accelerator != "tpu7x":
        raise ConfigError(
            f"cluster.topology={pod.topology}: Slice resources are for Ironwood; write it as ironwood:..., or use "
            "--to=kueue"
        )
    if pod.cube != _CUBE or pod.cubes is None:
        raise ConfigError(f"cluster.cube={pod.cube}: Slice resources are made of cubes of 4; set cluster.cube=4")
    if len(partitions) != pod.cubes.count:
        raise ConfigError(
            f"export.partitions has {len(partitions)} ids, but cluster.topology={pod.topology} has {pod.cubes.count} "
            "cubes; write one id a cube, as the label cloud.google.com/gke-tpu-partition-4x4x4-id of its nodes has it"
        )
    if len(set(partitions)) != len(partitions):
        twice = next(name for name in partitions if partitions.count(name) > 1)
        raise ConfigError(f"export.partitions has {twice} twice; each cube has an id of its own")


def _slice(job: Order, pod: Pod, grant: Grant, partitions: tuple[str, ...]) -> dict[str, Any]:
    cubes, chips = np.unique(pod.cube_of[grant.nodes], return_counts=True)
    if not (chips == _CUBE**3).all():
        raise ConfigError(
            f"job {job.spec.name}: shape={job.shape} takes part of a cube, and a Slice is made of whole ones; use a "
            "shape of multiples of 4, or --to=kueue"
        )
    return {
        "apiVersion": "accelerator.gke.io/v1beta1",
        "kind": "Slice",
        "metadata": {"name": kubernetes_name(job.spec.name)},
        "spec": {
            "type": "tpu7x",
            "topology": shape_text(sorted(job.topology.shape)),
            "partitionIds": [partitions[cube] for cube in cubes.tolist()],
        },
    }
