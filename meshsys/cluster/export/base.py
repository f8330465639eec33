"""Jobs as slices that a cloud has, which all targets share.

Sources: XPK's table of TPU systems (src/xpk/core/system_characteristics.py), and GKE's documentation of TPU node pools
for the values of the label cloud.google.com/gke-tpu-accelerator.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from meshsys import yaml_core
from meshsys.cluster.factors import factorisations
from meshsys.cluster.grant import Grant
from meshsys.cluster.jobs import Orders
from meshsys.cluster.pod import Pod
from meshsys.cluster.slices import Slice, slice_of
from meshsys.cluster.store import JobSpec
from meshsys.errors import ConfigError
from meshsys.torus import Topology, TopologyError
from meshsys.torus.shapes import shape_text

__all__ = [
    "Hardware",
    "Order",
    "Target",
    "check_names",
    "cloud_orders",
    "hardware",
    "kubernetes_name",
    "place_all",
    "placed",
]

Target = Callable[[Orders], dict[str, str]]
"""What a target makes of jobs: texts by the names of files."""


@dataclass(frozen=True)
class Hardware:
    """A TPU generation, as clouds name it.

    Attributes:
        accelerator: the value of GKE's label cloud.google.com/gke-tpu-accelerator.
        prefix: of accelerator types, as in v5p-128.
        per_chip: what such a type counts of a chip.
        ray: the accelerator version of `ray.util.tpu`.
        partition: what comes before the shape in the label of a part of a pod; "" where parts have none.
    """

    accelerator: str
    prefix: str
    per_chip: int
    ray: str
    partition: str = ""


_IRONWOOD = Hardware("tpu7x", "tpu7x", 2, "v7x", "cloud.google.com/gke-tpu-partition-")
_HARDWARE = {
    "v4": Hardware("tpu-v4-podslice", "v4", 2, "v4"),
    "v5p": Hardware("tpu-v5p-slice", "v5p", 2, "v5p"),
    "v5e": Hardware("tpu-v5-lite-podslice", "v5litepod", 1, "v5litepod"),
    "v6e": Hardware("tpu-v6e-slice", "v6e", 1, "v6e", "cloud.google.com/gke-tpu-slice-"),
    "ironwood": _IRONWOOD,
    "v7": _IRONWOOD,
    "tpu7x": _IRONWOOD,
}
_HOST = 4  # chips, of every slice of as many or more


def hardware(topology: Topology) -> Hardware:
    """The names of a pod's generation."""
    return _HARDWARE[topology.generation]


@dataclass(frozen=True)
class Order:
    """A job and the slice that a cloud gives it.

    Attributes:
        spec: the job.
        topology: of the slice, with its generation.
        runs: the folder of runs on the cluster.
    """

    spec: JobSpec
    topology: Topology
    runs: str

    @property
    def shape(self) -> str:
        """As in 2x2x4."""
        return shape_text(self.topology.shape)

    @property
    def chips(self) -> int:
        return math.prod(self.topology.shape)

    @property
    def hosts(self) -> int:
        return max(1, self.chips // _HOST)

    @property
    def per_host(self) -> int:
        """Chips a host."""
        return min(self.chips, _HOST)

    @cached_property
    def run_dir(self) -> str:
        return f"{self.runs.rstrip('/')}/{self.spec.name}"

    @cached_property
    def config(self) -> str:
        """The training configuration with the slice and the folder that it has there; "" for a command."""
        if not self.spec.config:
            return ""
        raw = yaml_core.load(self.spec.config)
        raw["mesh"]["topology"], raw["run"]["dir"] = str(self.topology), self.run_dir
        return yaml_core.dump(raw)

    def command(self, config: str) -> list[str]:
        """What each host runs.

        Args:
            config: where `config` is there.
        """
        return ["python", "-m", "meshsys", "train", config] if self.spec.config else list(self.spec.command)

    def environment(self) -> dict[str, str]:
        """What a command finds its slice by."""
        names = {"MESHSYS_JOB": self.spec.name, "MESHSYS_TOPOLOGY": str(self.topology), "MESHSYS_RUN_DIR": self.run_dir}
        return {} if self.spec.config else names


def cloud_orders(orders: Orders, target: str, *, parts_of_hosts: bool = False) -> list[Order]:
    """Each job with a slice that its generation has.

    Args:
        parts_of_hosts: fewer chips than a host has are fine.

    Raises:
        ConfigError: the torus is of no generation, or a job's shape is not one that can be had.
    """
    pod = orders.pod.topology
    if not pod.generation:
        raise ConfigError(
            f"cluster.topology={pod} names no TPU generation, and --to={target} needs one; write it as v5p:4x4x4"
        )
    return [Order(spec, _sold(spec, pod, parts_of_hosts), orders.export.runs) for spec in orders.specs]


def _sold(spec: JobSpec, pod: Topology, parts_of_hosts: bool) -> Topology:
    """A shape of as many chips that can be had: the job's own in some order of dimensions, or the most compact."""
    ndim = len(pod.shape)
    own = tuple(sorted((*spec.shape, *(1,) * (ndim - len(spec.shape)))))
    compact = sorted(factorisations(math.prod(spec.shape), ndim), key=lambda sides: (max(sides), sides))
    for sides in [own] * (len(own) == ndim) + compact:
        for shape in sorted(set(itertools.permutations(sides))):
            with suppress(TopologyError):
                return Topology(shape, pod.generation)
    if parts_of_hosts and math.prod(spec.shape) < _HOST:
        return Topology(spec.shape)
    try:
        return Topology.parse(f"{pod.generation}:{shape_text(spec.shape)}", "shape")
    except TopologyError as error:
        raise ConfigError(f"job {spec.name}: {error}") from None


def place_all(orders: Orders) -> tuple[Pod, dict[str, Grant]]:
    """The pod with all jobs on it at once, in the order of the file, and their grants.

    Raises:
        ConfigError: they do not fit side by side.
    """
    pod, grants = orders.pod.empty(), {}
    for number, spec in enumerate(orders.specs, 1):
        grant = orders.policy.place(pod, spec.shape)
        if grant is None:
            raise ConfigError(
                f"job {spec.name}: no room for shape={'x'.join(map(str, spec.shape))} beside the jobs before it "
                f"({pod.free} of {pod.size} chips are free); export it from a file of its own, for later"
            )
        pod.take(number, grant)
        grants[spec.name] = grant
    return pod, grants


def placed(orders: Orders) -> dict[str, Slice]:
    """The slice of each job, all at once."""
    pod, grants = place_all(orders)
    return {name: slice_of(pod, grant) for name, grant in grants.items()}


def kubernetes_name(name: str) -> str:
    """A job's name as Kubernetes and XPK take it; short enough for what they append to it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "job"


def check_names(orders: list[Order]) -> None:
    """Refuses jobs whose names are the same to Kubernetes."""
    seen: dict[str, str] = {}
    for order in orders:
        name = kubernetes_name(order.spec.name)
        if name in seen:
            raise ConfigError(
                f"jobs {seen[name]} and {order.spec.name} would both be called {name} there; rename one of them"
            )
        seen[name] = order.spec.name
