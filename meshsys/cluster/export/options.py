"""What real clusters need to know beyond the jobs."""

from __future__ import annotations

from typing import Annotated

from meshsys.config_file import FromList, Section, Text

__all__ = ["ExportConfig"]


class ExportConfig(Section):
    """The cluster that jobs are exported to.

    Attributes:
        image: the container image, which holds Python and meshsys.
        runs: the folder of runs there, on storage that outlives a job.
        claim: Kubernetes' PersistentVolumeClaim that is mounted at `runs`; null mounts none.
        namespace: of the Kubernetes objects.
        queue: Kueue's LocalQueue, or Slurm's partition.
        cluster: the GKE cluster, for XPK; null leaves it to $XPK_CLUSTER.
        partitions: ids of the pod's cubes, as the nodes' label cloud.google.com/gke-tpu-partition-4x4x4-id has them,
            row-major; for `--to slice`.
        hosts: names of the pod's hosts, row-major in the grid that they form; for `--to slurm`, which then asks for the
            very hosts of the placement.
    """

    image: Text = "meshsys:latest"
    runs: Text = "/runs"
    claim: Text | None = "meshsys-runs"
    namespace: Text = "default"
    queue: Text = "tpu"
    cluster: Text | None = None
    partitions: Annotated[tuple[Text, ...], FromList] = ()
    hosts: Annotated[tuple[Text, ...], FromList] = ()
