"""The parts of published schemas that our manifests use; a field that is not here is an error.

Sources: config/components/crd/bases/ of kubernetes-sigs/jobset at 08dfbdf (jobset.x-k8s.io_jobsets.yaml, which has the
templates of Job and Pod in it) and of kubernetes-sigs/kueue at ff69552 (kueue.x-k8s.io_*.yaml, v1beta1); the Kubernetes
API for ConfigMap; for the Slice of accelerator.gke.io/v1beta1, whose definition is not published, what GKE's "Use
dynamic slicing" says of its fields. The manifests of these tests have been validated against the whole definitions too.

A schema is a type, a list of one schema, a regular expression for text, or a mapping of fields; a field whose name ends
in `!` is required, and a field `*` stands for any name.
"""

from __future__ import annotations

import re
from typing import Any

LABEL = r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
LABELS = {"*": r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"}
METADATA = {"name!": NAME, "namespace": NAME, "labels": LABELS, "annotations": {"*": str}}
TOLERATION = {"key": LABEL, "operator": "Exists|Equal", "value": str, "effect": "NoSchedule|PreferNoSchedule|NoExecute"}
QUANTITY = {"*": int}

POD = {
    "restartPolicy": "Never|OnFailure",
    "terminationGracePeriodSeconds": int,
    "nodeSelector": LABELS,
    "tolerations": [TOLERATION],
    "containers!": [
        {
            "name!": NAME,
            "image": str,
            "command": [str],
            "env": [{"name!": r"[A-Za-z_][A-Za-z0-9_]*", "value": str}],
            "ports": [{"containerPort!": int}],
            "resources": {"requests": QUANTITY, "limits": QUANTITY},
            "volumeMounts": [{"name!": NAME, "mountPath!": r"/.*"}],
        }
    ],
    "volumes": [
        {"name!": NAME, "configMap": {"name": NAME}, "persistentVolumeClaim": {"claimName!": NAME}},
    ],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": "Indexed|NonIndexed",
    "backoffLimit": int,
    "template!": {"metadata": {"annotations": {"*": str}}, "spec": POD},
}
SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name!": NAME, "replicas": int, "template!": {"spec": JOB}}],
    },
    ("kueue.x-k8s.io/v1beta1", "Topology"): {"levels!": [{"nodeLabel!": LABEL}]},
    ("kueue.x-k8s.io/v1beta1", "ResourceFlavor"): {
        "nodeLabels": LABELS,
        "tolerations": [TOLERATION],
        "topologyName": NAME,
    },
    ("kueue.x-k8s.io/v1beta1", "AdmissionCheck"): {"controllerName!": r".+"},
    ("kueue.x-k8s.io/v1beta1", "ClusterQueue"): {
        "namespaceSelector": {},
        "admissionChecksStrategy": {"admissionChecks": [{"name!": NAME}]},
        "resourceGroups": [
            {
                "coveredResources!": [LABEL],
                "flavors!": [{"name!": NAME, "resources!": [{"name!": LABEL, "nominalQuota!": int}]}],
            }
        ],
    },
    ("kueue.x-k8s.io/v1beta1", "LocalQueue"): {"clusterQueue!": NAME},
    ("accelerator.gke.io/v1beta1", "Slice"): {
        "type!": "tpu7x",
        "topology!": r"\d+x\d+x\d+",
        "partitionIds!": [r".+"],
    },
}


def check_manifest(document: dict[str, Any]) -> None:
    """Raises AssertionError, with the path, where a document is not what the cluster would take."""
    kind = document["apiVersion"], document["kind"]
    if kind == ("v1", "ConfigMap"):
        body: dict[str, Any] = {"data": {"*": str}}
    else:
        body = {"spec!": SCHEMAS[kind]}
    check({"apiVersion!": str, "kind!": str, "metadata!": METADATA, **body}, document, document["kind"])


def check(schema: Any, value: Any, where: str) -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), f"{where} is no object"
        fields = {name.rstrip("!"): below for name, below in schema.items()}
        for name, below in value.items():
            assert name in fields or "*" in fields, f"{where}.{name} is not a field"
            check(fields.get(name, fields.get("*")), below, f"{where}.{name}")
        for name in schema:
            assert not name.endswith("!") or name[:-1] in value, f"{where}.{name[:-1]} is missing"
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, f"{where} is no list, or empty"
        for place, item in enumerate(value):
            check(schema[0], item, f"{where}.{place}")
    elif isinstance(schema, str):
        assert isinstance(value, str) and re.fullmatch(schema, value, re.DOTALL), f"{where}={value!r}"
    else:
        assert type(value) is schema, f"{where}={value!r}"
