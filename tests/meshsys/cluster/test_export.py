"""What is exported is taken by a stand-in of each cluster, and says where and on what a job runs."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshsys.cli import main
from meshsys.cluster.jobs import read_orders
from meshsys.cluster.slices import Slice, slice_of, tpu_environment
from meshsys.config import load_config
from meshsys.torus import Topology
from tests.meshsys.cluster.kubernetes_schemas import check_manifest

pytestmark = pytest.mark.usefixtures("folder")


def write(topology: str, *jobs: dict[str, Any], cube: int | None = None, **options: Any) -> None:
    cluster = {"topology": topology, "cube": cube, "devices": "cpu"}
    Path("jobs.yaml").write_text(json.dumps({"cluster": cluster, "jobs": jobs, "export": options}))


def training(name: str, shape: str | None = None, **axes: int) -> dict[str, Any]:
    job: dict[str, Any] = {"name": name, "config": "good.yaml", "overrides": ["data.batch_size=64"], "axes": axes}
    return job if shape is None else {**job, "shape": shape}


def program(name: str, shape: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "command": ["python", "my train.py"], **options}


def exported(target: str, capsys: Any) -> str:
    assert main(["cluster", "export", "jobs.yaml", "--to", target]) == 0
    return str(capsys.readouterr().out)


def manifests(target: str, capsys: Any) -> list[dict[str, Any]]:
    documents = list(yaml.safe_load_all(exported(target, capsys)))
    for document in documents:
        check_manifest(document)
    return documents


def refused(capsys: Any, target: str, message: str) -> None:
    assert main(["cluster", "export", "jobs.yaml", "--to", target]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"meshsys: error: {message}") and not said.out


# Kubernetes


def test_a_job_set_on_node_pools(capsys):
    write("v5p:8x8x8", training("My_Job", pipe=4, data=2), program("other", "4x4x8", retries=7), image="me/it:1")
    documents = manifests("kueue", capsys)
    assert [d["kind"] for d in documents[:3]] == ["ResourceFlavor", "ClusterQueue", "LocalQueue"]
    config, mine, other = documents[3:]
    assert mine["metadata"]["name"] == config["metadata"]["name"] == "my-job"
    job = mine["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 2  # 8 chips, 4 a host
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x2",
    }
    (container,) = pod["containers"]
    assert container["image"] == "me/it:1" and container["resources"]["limits"] == {"google.com/tpu": 4}
    assert {"name": "JAX_COORDINATOR_ADDRESS", "value": "my-job-slice-0-0.my-job:8476"} in container["env"]
    Path("there.yaml").write_text(config["data"]["config.yaml"])
    there = load_config("there.yaml")
    assert there.mesh.topology == "v5p:2x2x2" and there.run_dir == Path("/runs/My_Job")
    assert other["spec"]["failurePolicy"]["maxRestarts"] == 7
    assert other["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 32


def test_ironwood_cubes_have_the_labels_of_dynamic_slicing(capsys):
    write("ironwood:8x8x8", program("two", "4x4x8"), program("one", "4x4x4"), program("part", "2x2x2"))
    documents = manifests("kueue", capsys)
    assert documents[0]["spec"]["levels"] == [
        {"nodeLabel": "cloud.google.com/gce-topology-block"},
        {"nodeLabel": "cloud.google.com/gke-tpu-partition-4x4x4-id"},
        {"nodeLabel": "kubernetes.io/hostname"},
    ]
    (check,) = (d for d in documents if d["kind"] == "AdmissionCheck")
    (queue,) = (d for d in documents if d["kind"] == "ClusterQueue")
    assert check["spec"]["controllerName"] == "accelerator.gke.io/slice"
    assert queue["spec"]["admissionChecksStrategy"]["admissionChecks"] == [{"name": check["metadata"]["name"]}]
    two, one, part = (d["spec"]["replicatedJobs"][0]["template"]["spec"]["template"] for d in documents[-3:])
    assert two["metadata"]["annotations"] == {
        "cloud.google.com/gke-tpu-slice-topology": "4x4x8",
        "kueue.x-k8s.io/podset-required-topology": "cloud.google.com/gce-topology-block",
        "kueue.x-k8s.io/podset-slice-required-topology": "cloud.google.com/gke-tpu-partition-4x4x4-id",
        "kueue.x-k8s.io/podset-slice-size": "16",
    }
    required = "kueue.x-k8s.io/podset-required-topology"
    assert one["metadata"]["annotations"][required] == "cloud.google.com/gke-tpu-partition-4x4x4-id"
    assert part["metadata"]["annotations"][required] == "cloud.google.com/gke-tpu-partition-2x2x2-id"
    assert two["spec"]["nodeSelector"] == {"cloud.google.com/gke-tpu-accelerator": "tpu7x"}


def test_v6e_parts_have_labels_of_their_shape(capsys):
    write("v6e:16x16", program("a", "4x4"))
    *_, job_set = manifests("kueue", capsys)
    template = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        "cloud.google.com/gke-tpu-slice-topology": "4x4",
        "kueue.x-k8s.io/podset-required-topology": "cloud.google.com/gke-tpu-slice-4x4-id",
    }


def test_slices_are_of_the_cubes_that_the_policy_chose(capsys):
    names = [f"id{cube}" for cube in range(8)]
    write("ironwood:8x8x8", program("a", "4x4x8"), program("b", "8x4x8"), cube=4, partitions=names)
    a, b = manifests("slice", capsys)
    assert a["spec"]["topology"] == "4x4x8" and b["spec"]["topology"] == "4x8x8"
    assert len(a["spec"]["partitionIds"]) == 2 and len(b["spec"]["partitionIds"]) == 4
    taken = a["spec"]["partitionIds"] + b["spec"]["partitionIds"]
    assert len(set(taken)) == 6 and set(taken) <= set(names)


def test_the_schemas_see_mistakes():
    good = {
        "apiVersion": "accelerator.gke.io/v1beta1",
        "kind": "Slice",
        "metadata": {"name": "a"},
        "spec": {"type": "tpu7x", "topology": "4x4x4", "partitionIds": ["p"]},
    }
    check_manifest(good)
    for change in ({"topology": "4x4"}, {"partitionIds": []}, {"partitions": ["p"]}, {"type": "v5p"}):
        with pytest.raises(AssertionError):
            check_manifest({**good, "spec": {**good["spec"], **change}})
    with pytest.raises(AssertionError, match="topology is missing"):
        check_manifest({**good, "spec": {"type": "tpu7x", "partitionIds": ["p"]}})


# XPK, Slurm, Ray: the scripts run, with stand-ins for the programs that they call


def run_with(stand_ins: dict[str, str], *command: str, **environment: str) -> str:
    """Runs a command, with these shell programs first in the path; returns what it printed."""
    Path("bin").mkdir(exist_ok=True)
    for name, text in stand_ins.items():
        Path("bin", name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        Path("bin", name).chmod(0o755)
    path = f"{Path('bin').absolute()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, env=os.environ | {"PATH": path} | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_xpk_commands(capsys):
    write("v5p:8x8x8", training("a", pipe=4, data=2), program("b", "4x4x8", priority=1), runs="/tmp/runs")
    Path("jobs.sh").write_text(exported("xpk", capsys))
    said = run_with({"xpk": 'printf "%s\\n" "$#" "$@"'}, "bash", "jobs.sh", XPK_CLUSTER="mine")
    words = said.splitlines()
    parser = argparse.ArgumentParser()  # the options that src/xpk/parser/workload.py has
    for option in ("cluster", "workload", "tpu-type", "num-slices", "docker-image", "priority", "max-restarts"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--env", action="append", default=[])
    calls = []
    while words:
        count = int(words.pop(0))
        call, words = words[:count], words[count:]
        assert call[:2] == ["workload", "create"]
        calls.append(parser.parse_args(call[2:]))
    a, b = calls
    assert (a.cluster, a.workload, a.tpu_type, a.priority) == ("mine", "a", "v5p-2x2x2", "medium")
    assert (b.tpu_type, b.priority, b.command) == ("v5p-4x4x8", "high", "python 'my train.py'")
    assert "MESHSYS_TOPOLOGY=v5p:4x4x8" in b.env
    run_with({"python": 'echo "$@"'}, "bash", "-c", a.command)
    assert load_config("/tmp/a.yaml").mesh.topology == "v5p:2x2x2"
    Path("/tmp/a.yaml").unlink()


SRUN = 'for host in $HOSTS; do SLURM_PROCID=$((n++)) "$@"; done'
SHOW = (
    'if [[ $1 == my* || $1 == -m ]]; then echo "$TPU_WORKER_ID $TPU_WORKER_HOSTNAMES $JAX_COORDINATOR_ADDRESS $*"; '
    'else exec {python} "$@"; fi'
)


def test_slurm_asks_for_the_hosts_of_the_placement(capsys, tmp_path):
    hosts = [f"h{number}" for number in range(16)]
    job = training("a", pipe=4, data=2)
    write("v5p:4x4x4", program("first", "2x2x1"), job, hosts=hosts, runs=str(tmp_path))
    assert main(["cluster", "export", "jobs.yaml", "--to", "slurm", "--out", "scripts"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"scripts/{name}.sbatch") for name in ("first", "a")]
    script = Path("scripts/a.sbatch").read_text()
    lines = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if "SBATCH" in line
    )
    nodes = lines["nodelist"].split(",")
    assert lines["nodes"] == str(len(nodes)) and set(nodes) <= set(hosts)
    first = Path("scripts/first.sbatch").read_text()
    assert not set(nodes) & set(first.partition("--nodelist=")[2].splitlines()[0].split(","))
    stand_ins = {
        "srun": SRUN,
        "scontrol": 'echo "$3" | tr , "\\n"',
        "python": SHOW.format(python=sys.executable),
    }
    environment = {"SLURM_JOB_NODELIST": lines["nodelist"], "HOSTS": " ".join(nodes)}
    said = run_with(stand_ins, "bash", "scripts/a.sbatch", **environment).splitlines()
    assert said == [
        f"{number} {','.join(nodes)} {nodes[0]}:8476 -m meshsys train {tmp_path}/a.yaml" for number in range(len(nodes))
    ]
    assert load_config(tmp_path / "a.yaml").mesh.topology == "v5p:2x2x2"


def test_slurm_gives_part_of_a_host_its_chips_and_fake_devices_to_a_torus_of_no_kind(capsys):
    write("v5p:2x2x1", program("a", "2"), program("b", "1"), hosts=["only"])
    text = exported("slurm", capsys)
    a, b = text.split("# --- b.sbatch")
    assert "export TPU_CHIPS_PER_PROCESS_BOUNDS=1,2,1" in a and "export TPU_PROCESS_BOUNDS=1,1,1" in b
    chips = [line.partition("=")[2].split(",") for line in text.splitlines() if "TPU_VISIBLE_CHIPS" in line]
    assert len(chips[0]) == 2 and len(chips[1]) == 1 and not set(chips[0]) & set(chips[1])
    write("2x2x2", program("a", "2x2"))
    text = exported("slurm", capsys)
    assert "export JAX_NUM_CPU_DEVICES=4" in text and "export MESHSYS_TOPOLOGY=2x2" in text


RAY = {
    "ray/__init__.py": """
from . import util
log = []
class Task:
    def __init__(self, function, options): self.function, self.given = function, options
    def options(self, **options): return Task(self.function, options)
    def remote(self, *arguments):
        log.append((self.function.__name__, self.given))
        return self.function(*arguments)
def remote(**options): return lambda function: Task(function, options)
def get(value, timeout=None): return value
def init(): pass
""",
    "ray/util/__init__.py": "from . import tpu\ndef get_node_ip_address(): return '10.0.0.1'\n",
    "ray/util/scheduling_strategies.py": """
class PlacementGroupSchedulingStrategy:
    def __init__(self, placement_group, placement_group_bundle_index=-1): pass
""",
    "ray/util/tpu.py": """
import math
class Group:
    def __init__(self, topology):
        self.placement_group = self
        chips = math.prod(map(int, topology.split("x")))
        self.num_hosts = max(1, chips // 4)
    def ready(self): pass
    def shutdown(self): print("shut down")
def slice_placement_group(topology, accelerator_version, resources_per_bundle=None, num_slices=1, **kwargs):
    print("slice", topology, accelerator_version)
    return Group(topology)
def subslice_placement_group(subslice_topology, accelerator_version, chips_per_vm=None, **kwargs):
    print("subslice", subslice_topology, accelerator_version)
    return Group(subslice_topology)
""",
}
"""Signatures of python/ray/util/tpu.py."""


@pytest.mark.parametrize("pod, kind, version", [("v5p:4x4x4", "slice", "v5p"), ("v6e:4x4", "subslice", "v6e")])
def test_ray_reserves_a_slice_and_runs_a_task_a_host(capsys, pod, kind, version):
    shape = "2x2x2" if version == "v5p" else "2x4"
    show = "import os, sys; print(os.environ['MESHSYS_TOPOLOGY'], os.environ['TPU_WORKER_ID'], flush=True)"
    write(pod, {**program("a", shape), "command": [sys.executable, "-c", show]})
    Path("jobs.py").write_text(exported("ray", capsys))
    for name, text in RAY.items():
        Path("fake", name).parent.mkdir(parents=True, exist_ok=True)
        Path("fake", name).write_text(text)
    said = run_with({}, sys.executable, "-u", "jobs.py", PYTHONPATH="fake").splitlines()
    assert said == [
        f"{kind} {shape} {version}",
        f"{version}:{shape} 0",
        f"{version}:{shape} 1",
        "shut down",
        "a done",
    ]


# The environment


def test_chips_of_a_host_for_one_process():
    pod = Topology.parse("v5e:2x4")
    part = Slice(pod, (2, 2), ((0, 2), (0, 3), (1, 2), (1, 3)))
    assert tpu_environment(part)["TPU_VISIBLE_CHIPS"] == "2,3,6,7"
    assert tpu_environment(part)["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    assert part.box == (2, 2) and part.corner == (0, 2) and part.topology == "v5e:2x2"


def test_a_slice_knows_its_chips_in_device_order():
    write("4x2", program("a", "4"))
    orders = read_orders("jobs.yaml")
    grant = orders.policy.place(orders.pod, (4,))
    part = slice_of(orders.pod, grant)
    steps = [sum(abs(x - y) for x, y in zip(*pair, strict=True)) for pair in itertools.pairwise(part.chips)]
    assert steps == [1, 1, 1] and part.devices == 4 and part.topology == "4"


# What is refused


def test_what_cannot_be_exported_is_one_line(capsys):
    write("2x2x2", program("a", "2"))
    refused(
        capsys, "kueue", "cluster.topology=2x2x2 names no TPU generation, and --to=kueue needs one; write it as v5p"
    )
    refused(capsys, "keue", "--to=keue is not a target; did you mean kueue?")
    write("v5p:4x4x4", program("a", "2"))
    refused(capsys, "xpk", "job a: shape=v5p:2 is not a shape of v5p slices; the nearest are")
    write("v5p:4x4x4", program("a", "4x4x4"))
    refused(capsys, "slice", "cluster.topology=v5p:4x4x4: Slice resources are for Ironwood; write it as ironwood:...")
    write("ironwood:4x4x8", program("a", "4x4x4"), cube=4, partitions=["p"])
    refused(capsys, "slice", "export.partitions has 1 ids, but cluster.topology=ironwood:4x4x8 has 2 cubes; write one")
    write("ironwood:4x4x8", program("a", "2x4x4"), cube=4, partitions=["p", "q"])
    refused(capsys, "slice", "job a: shape=2x4x4 takes part of a cube, and a Slice is made of whole ones; use")
    write("ironwood:4x4x8", program("a", "4x4x8"), program("b", "4x4x4"), cube=4, partitions=["p", "q"])
    refused(capsys, "slice", "job b: no room for shape=4x4x4 beside the jobs before it (0 of 128 chips are free);")
    write("v5p:4x4x4", program("a.b", "2x2x1"), program("a_b", "2x2x1"))
    refused(capsys, "kueue", "jobs a.b and a_b would both be called a-b there; rename one of them")
    write("v5p:4x4x4", program("a", "2x2x1"), hosts=["h"])
    refused(capsys, "slurm", "export.hosts has 1 names, but cluster.topology=v5p:4x4x4 has 16 hosts of 2x2x1 chips;")
