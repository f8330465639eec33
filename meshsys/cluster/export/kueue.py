"""JobSets for Kueue, with the labels by which it finds a place for a TPU slice.

Sources: JobSet's and Kueue's custom resource definitions; the annotations of topology-aware scheduling in Kueue's
KEP-2724; GKE's documentation of dynamic slicing and XPK's templates for what Ironwood and v6e take.
"""

from __future__ import annotations

from typing import Any

from meshsys import yaml_core
from meshsys.cluster.export.base import Order, check_names, cloud_orders, hardware, kubernetes_name
from meshsys.cluster.jobs import Orders
from meshsys.cluster.slices import COORDINATOR_PORT
from meshsys.torus import Topology

__all__ = ["export"]

_QUEUE = "kueue.x-k8s.io/v1beta1"
_CUBE = 4
_CONFIG = "/etc/meshsys"


def export(orders: Orders) -> dict[str, str]:
    """Kueue's own objects, and for each job a ConfigMap and a JobSet."""
    jobs = cloud_orders(orders, "kueue")
    check_names(jobs)
    documents = _queues(orders)
    for job in jobs:
        if job.spec.config:
            documents.append(_config_map(job, orders))
        documents.append(_job_set(job, orders))
    return {"jobs.yaml": "---\n".join(yaml_core.dump(document) for document in documents)}


def _queues(orders: Orders) -> list[dict[str, Any]]:
    """The nodes' topology, their flavour, and a queue whose quota is the whole pod."""
    pod, options = orders.pod.topology, orders.export
    levels = _levels(pod)
    flavor: dict[str, Any] = {"nodeLabels": {"cloud.google.com/gke-tpu-accelerator": hardware(pod).accelerator}}
    documents: list[dict[str, Any]] = []
    if levels:
        topology = {"apiVersion": _QUEUE, "kind": "Topology", "metadata": {"name": f"{options.queue}-topology"}}
        documents.append({**topology, "spec": {"levels": [{"nodeLabel": level} for level in levels]}})
        flavor["topologyName"] = f"{options.queue}-topology"
        flavor["tolerations"] = [_TOLERATION]
    name = f"{options.queue}-flavor"
    documents.append({"apiVersion": _QUEUE, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": flavor})
    quota = {"name": name, "resources": [{"name": "google.com/tpu", "nominalQuota": orders.pod.size}]}
    spec: dict[str, Any] = {
        "namespaceSelector": {},
        "resourceGroups": [{"coveredResources": ["google.com/tpu"], "flavors": [quota]}],
    }
    if hardware(pod).accelerator == "tpu7x":
        # GKE's controller joins the cubes of a job that Kueue has found a place for.
        check = f"{options.queue}-slices"
        former = {"controllerName": "accelerator.gke.io/slice"}
        documents.append({"apiVersion": _QUEUE, "kind": "AdmissionCheck", "metadata": {"name": check}, "spec": former})
        spec["admissionChecksStrategy"] = {"admissionChecks": [{"name": check}]}
    queue = f"{options.queue}-cluster"
    documents.append({"apiVersion": _QUEUE, "kind": "ClusterQueue", "metadata": {"name": queue}, "spec": spec})
    local = {"name": options.queue, "namespace": options.namespace}
    documents.append({"apiVersion": _QUEUE, "kind": "LocalQueue", "metadata": local, "spec": {"clusterQueue": queue}})
    return documents


def _levels(pod: Topology) -> list[str]:
    """Labels from the largest part of a pod to a node; [] for generations whose node pools are slices already."""
    prefix = hardware(pod).partition
    if not prefix:
        return []
    if pod.generation == "v6e":
        parts = ("16x16", "8x16", "8x8", "4x8", "4x4", "2x4")
        return [*(f"{prefix}{part}-id" for part in parts), "kubernetes.io/hostname"]
    return ["cloud.google.com/gce-topology-block", f"{prefix}4x4x4-id", "kubernetes.io/hostname"]


_TOLERATION = {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}


def _annotations(job: Order) -> dict[str, str]:
    """Of the pods: the part of the topology in which they all go."""
    found = hardware(job.topology)
    if not found.partition or job.chips <= job.per_host:
        return {}
    shape = {"cloud.google.com/gke-tpu-slice-topology": job.shape}
    cubes = job.chips // _CUBE**3
    if found.accelerator != "tpu7x" or cubes <= 1:
        return {**shape, "kueue.x-k8s.io/podset-required-topology": f"{found.partition}{job.shape}-id"}
    return {
        **shape,
        "kueue.x-k8s.io/podset-required-topology": "cloud.google.com/gce-topology-block",
        "kueue.x-k8s.io/podset-slice-required-topology": f"{found.partition}4x4x4-id",
        "kueue.x-k8s.io/podset-slice-size": str(_CUBE**3 // job.per_host),
    }


def _config_map(job: Order, orders: Orders) -> dict[str, Any]:
    metadata = {"name": kubernetes_name(job.spec.name), "namespace": orders.export.namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"config.yaml": job.config}}


def _job_set(job: Order, orders: Orders) -> dict[str, Any]:
    options, name = orders.export, kubernetes_name(job.spec.name)
    annotations = _annotations(job)
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": options.namespace,
        "labels": {"kueue.x-k8s.io/queue-name": options.queue},
    }
    if not hardware(job.topology).partition:
        # Without labels for parts of a pod, a slice is a node pool, and belongs to one job at a time.
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    template: dict[str, Any] = {"spec": _pod(job, orders, name, static=not annotations)}
    if annotations:
        template["metadata"] = {"annotations": annotations}
    spec = {
        "parallelism": job.hosts,
        "completions": job.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": template,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": job.spec.retries},
            "replicatedJobs": [{"name": "slice", "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _pod(job: Order, orders: Orders, name: str, *, static: bool) -> dict[str, Any]:
    options = orders.export
    selector = {"cloud.google.com/gke-tpu-accelerator": hardware(job.topology).accelerator}
    if static:
        selector["cloud.google.com/gke-tpu-topology"] = job.shape
    mounts, volumes = [], []
    if job.spec.config:
        mounts.append({"name": "config", "mountPath": _CONFIG})
        volumes.append({"name": "config", "configMap": {"name": name}})
    if options.claim is not None:
        mounts.append({"name": "runs", "mountPath": options.runs})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}})
    # GKE sets TPU_WORKER_ID and TPU_WORKER_HOSTNAMES; JobSet gives its pods these names.
    environment = {**job.environment(), "JAX_COORDINATOR_ADDRESS": f"{name}-slice-0-0.{name}:{COORDINATOR_PORT}"}
    container = {
        "name": "meshsys",
        "image": options.image,
        "command": job.command(f"{_CONFIG}/config.yaml"),
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "ports": [{"containerPort": COORDINATOR_PORT}],
        "resources": {
            "requests": {"google.com/tpu": job.per_host},
            "limits": {"google.com/tpu": job.per_host},
        },
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(1, round(orders.cluster.grace_seconds)),
        "nodeSelector": selector,
        "tolerations": [_TOLERATION],
        "containers": [container],
        "volumes": volumes,
    }
