"""What is run for one job on one slice."""

from __future__ import annotations

import glob
import os
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np

import meshsys
from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.slices import Slice, cpu_environment, slice_of, tpu_environment
from meshsys.cluster.store import JobSpec
from meshsys.files import write_whole

__all__ = ["ROOT", "config_file", "grant_from", "grant_to", "launch", "platform", "train_command"]

ROOT = Path(meshsys.__path__[0]).parent
"""Where jobs find this package."""

Devices = Literal["auto", "cpu", "tpu"]


def platform(asked: Devices) -> str:
    """`cpu` or `tpu`: what was asked for, or what this machine has."""
    if asked != "auto":
        return asked
    chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    return "tpu" if chips and os.environ.get("JAX_PLATFORMS", "tpu") != "cpu" else "cpu"


def launch(spec: JobSpec, pod: Pod, grant: Grant, kind: str, state: Path) -> dict[str, Any]:
    """Program, environment and folder of an attempt, as its guard takes them; writes the training job's configuration.

    Args:
        kind: `cpu` or `tpu`.
        state: the folder of the executor's state.
    """
    found = slice_of(pod, grant)
    environment = cpu_environment(found) if kind == "cpu" else tpu_environment(found)
    environment |= {
        "MESHSYS_JOB": spec.name,
        "MESHSYS_TOPOLOGY": found.topology,
        "MESHSYS_RUN_DIR": spec.run_dir,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
    }
    if spec.config:
        file = config_file(state, spec)
        file.parent.mkdir(exist_ok=True)
        write_whole(file, spec.config)
    argv = train_command(file, found, sys.executable) if spec.config else list(spec.command)
    return {"argv": argv, "env": environment, "cwd": spec.folder}


def config_file(state: Path, spec: JobSpec) -> Path:
    """Where a training job's resolved configuration is kept."""
    return state / "jobs" / f"{spec.name}.yaml"


def train_command(file: Path | str, found: Slice, python: str = "python") -> list[str]:
    """Trains a configuration on a slice; the same command resumes it, on this slice or another."""
    return [python, "-m", "meshsys", "train", str(file), f"mesh.topology={found.topology}"]


def grant_to(grant: Grant) -> dict[str, Any]:
    """A grant in JSON types."""
    return {
        "shape": list(grant.shape),
        "nodes": grant.nodes.ravel().tolist(),
        "fold": grant.fold,
        "rotation": [int(dim) for dim in grant.rotation],
        "cubes": [int(cube) for cube in grant.cubes],
        "links": grant.links.tolist(),
        "wrap": [bool(ring) for ring in grant.wrap],
        "wireable": bool(grant.wireable),
        "dilation": int(grant.dilation),
    }


def grant_from(raw: dict[str, Any]) -> Grant:
    """A grant out of JSON types."""
    arrays = {
        "nodes": np.array(raw["nodes"], np.int64).reshape(raw["shape"]),
        "links": np.array(raw["links"], np.int64),
    }
    tuples = {name: tuple(raw[name]) for name in ("shape", "rotation", "cubes", "wrap")}
    return Grant(**{**raw, **arrays, **tuples})
