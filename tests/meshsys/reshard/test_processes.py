"""Devices of several processes: each lays out its own blocks, and the collectives go between all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

_WORKER = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from meshsys.reshard import Resharder, plan_reshard

devices = np.array(jax.devices())
train, sample = Mesh(devices, ("fsdp",)), Mesh(devices.reshape(2, 2), ("data", "tensor"))
whole = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
specs = [(P("fsdp"), P(None, "tensor")), (P(None, "fsdp"), P()), (P(), P(("tensor", "data")))]
sources = [NamedSharding(train, before) for before, _ in specs]
destinations = [NamedSharding(sample, after) for _, after in specs]
tree = [jax.make_array_from_callback(whole.shape, one, lambda index: whole[index]) for one in sources]
plan = plan_reshard(tree, destinations)
assert plan.moved_bytes == plan.lower_bound_bytes > 0
for mode in ("copy", "delta", "in_place"):
    resharder = Resharder(plan, mode, delta_bytes=64)
    for _ in range(2 if mode == "delta" else 1):
        for array in resharder(tree):
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
print("equal")
"""


@pytest.mark.slow
def test_two_processes_reshard_as_one_does():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, address, str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for worker in workers:
            out, err = worker.communicate(timeout=120)
            assert worker.returncode == 0 and "equal" in out, err[-2000:]
    finally:
        for worker in workers:
            worker.kill()
