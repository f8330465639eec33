"""Several processes train as one does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from meshsys.assemble import assemble
from meshsys.checkpoint import Checkpoints
from meshsys.config import load_config
from meshsys.distributed import Processes, processes_of
from meshsys.errors import ConfigError
from meshsys.mesh import make_mesh
from meshsys.step import Step

STEPS = 12
GKE = {"TPU_WORKER_HOSTNAMES": "a-0.a,a-1.a,a-2.a", "TPU_WORKER_ID": "2"}
SRUN = {"SLURM_STEP_NODELIST": "tpu[07-09,12]", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_JOB_ID": "9"}
JAX = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (JAX, Processes("h:1", 2, 1)),
        (JAX | GKE, Processes("h:1", 2, 1)),
        (JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        ({**JAX, "JOB_COMPLETION_INDEX": "0"}, Processes("h:1", 2, 1)),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"},
         Processes("h:1", 2, 1)),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, None),  # of a job of one host
        (GKE, Processes("a-0.a:8476", 3, 2)),
        (GKE | {"JAX_COORDINATOR_ADDRESS": "h:1"}, Processes("h:1", 3, 2)),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        (SRUN, Processes("tpu07:8476", 4, 1)),
        (SRUN | {"SLURM_STEP_NODELIST": "n1,n2", "SLURM_STEP_NUM_TASKS": "2"}, Processes("n1:8476", 2, 1)),
        (SRUN | {"SLURM_STEP_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script, before srun
    ],
)  # fmt: skip
def test_who_takes_part(environment: dict[str, str], found: Processes | None) -> None:
    assert processes_of(environment) == found


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "JAX_COORDINATOR_ADDRESS is missing"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "h"}, "JAX_COORDINATOR_ADDRESS=h is the address"),
        (JAX | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2, but JAX_NUM_PROCESSES says that there are 2 processes"),
        (JAX | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two is not a number"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID is missing"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is missing"),
    ],
)
def test_environments_that_are_not_whole(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        processes_of(environment)
    assert "\n" not in str(error.value)


# Real processes


def start(config: Path, run: Path, *overrides: str, index: int | None = None, port: int = 0) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "SLURM_"))}
    here = {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    if index is not None:
        hosts = {"TPU_WORKER_HOSTNAMES": "localhost,localhost", "TPU_WORKER_ID": str(index)}
        here |= {**hosts, "JAX_COORDINATOR_ADDRESS": f"localhost:{port}"}
    command = [sys.executable, "-m", "meshsys", "train", str(config), f"run.dir={run}", *overrides]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=here, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=config.parent)


def pair(config: Path, run: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [start(config, run, *overrides, index=index, port=port) for index in (0, 1)]


def end(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    try:
        return [(process.wait(timeout=400), process.stdout.read() if process.stdout else "") for process in processes]
    finally:
        for process in processes:
            process.kill()


def records(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def state(config: Path, run: Path) -> dict[str, np.ndarray]:
    """All arrays of the last checkpoint, as one process reads them, whoever wrote them."""
    assembly = assemble(load_config(config, [f"run.dir={run}"]))
    step = Step(assembly, make_mesh(assembly.placement))
    checkpoints = Checkpoints(run / "checkpoints", keep=3)
    restored = checkpoints.restore(lambda meta: step.canonical(previous=False), lambda meta: None, pytest.fail)
    checkpoints.close()
    assert restored is not None and restored[1]["step"] == STEPS
    leaves = jax.tree_util.tree_leaves_with_path(restored[0])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(" ".join(str(number * number) for number in range(2000)))
    path = tmp_path / "config.yaml"
    raw = {
        "run": {"name": "tiny"},
        "model": {"layers": 2, "d_model": 8, "heads": 2, "d_ff": 16},
        "data": {"source": str(tmp_path / "text.txt"), "sequence_length": 8, "batch_size": 8},
        "mesh": {"topology": "2x2", "axes": {"pipe": 2, "fsdp": 2}},
        "pipeline": {"schedule": "1f1b", "microbatches": 2},
        "train": {"steps": STEPS, "learning_rate": 1e-3, "warmup_steps": 2},
        "checkpoint": {"every": 4},
    }
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.mark.slow
def test_two_processes_train_as_one_and_stop_and_go_on(config: Path, tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    [(code, said)] = end(start(config, alone))
    assert code == 0, said
    processes = pair(config, both)
    while len(records(both)) < 3 and all(process.poll() is None for process in processes):
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)  # to one: all stop after the same step
    (code, said), (other, quiet) = end(*processes)
    assert (code, other) == (143, 143), (said, quiet)
    stopped = len(records(both))
    assert 3 <= stopped < STEPS
    assert "stopped by SIGTERM" in said and "step" not in quiet
    (code, said), (other, quiet) = end(*pair(config, both))
    assert (code, other) == (0, 0), (said, quiet)
    assert f"resuming tiny after step {stopped}" in said and "resuming" not in quiet
    assert [record["step"] for record in records(both)] == list(range(1, STEPS + 1))
    for one, two in zip(records(alone), records(both), strict=True):
        for name in ("loss", "grad_norm", "learning_rate", "tokens"):
            assert two[name] == pytest.approx(one[name], rel=1e-6)
    expected, found = state(config, alone), state(config, both)
    assert expected.keys() == found.keys() and len(found) > 20
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert len(list((both / "tensorboard").iterdir())) == 2  # one of each start, and none of the second process


@pytest.mark.slow
def test_what_one_process_refuses_all_refuse(config: Path, tmp_path: Path) -> None:
    (code, said), (other, quiet) = end(*pair(config, tmp_path / "run", "mesh.topology=3", "mesh.axes.fsdp=1"))
    assert (code, other) == (2, 2)
    assert "mesh.topology=3 has 3 devices, of which the axes use 2; 2 processes need all of them" in said
    (tmp_path / "taken").write_text("")
    (code, said), (other, quiet) = end(*pair(config, tmp_path / "taken"))
    assert (code, other) == (2, 2)
    assert "run.dir=" in said and "the first process cannot begin; it says why" in quiet
