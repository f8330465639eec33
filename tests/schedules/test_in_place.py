"""Buffers are updated in place: no branch of the switch copies one."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import Decoder, ModelConfig
from schedules.actions import split_backward
from schedules.families import make
from schedules.pipeline_model import PipelineModel
from schedules.program import Program
from schedules.remat import Remat
from tests.oracles.inputs import random_batch, random_parameters

_HEADER = re.compile(r"^(ENTRY )?%?[\w.\-]+ \(.*\{$")
_COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* copy\(")


def copied_bytes(hlo: str) -> int:
    """Bytes of the copies of whole values outside the entry computation and outside fusions."""
    total, inside = 0, False
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            inside = not header[1] and "fused" not in line.split(" (")[0]
        elif inside and (copy := _COPY.search(line)):
            total += 4 * math.prod(int(size) for size in copy[2].split(",") if size)
    return total


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA drops the barriers before it inserts copies")
@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "scan"])
@pytest.mark.parametrize("family", ["1f1b", "zb_h1"])
def test_the_ticks_copy_no_buffers(family, unroll):
    decoder = Decoder(ModelConfig(layers=4, d_model=16, heads=2, d_ff=64, vocab_size=24))
    params = random_parameters(decoder)
    program = Program(split_backward(make(family, ranks=2, microbatches=6)), 4, Remat("none"), unroll=unroll)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), ("pipe", "data", "fsdp"))
    specs = {
        "shared": jax.tree.map(lambda _: PartitionSpec(), params["shared"]),
        "layers": jax.tree.map(lambda _: PartitionSpec("pipe"), params["layers"]),
    }
    staged = {"shared": params["shared"], "layers": program.layout.to_stages(params["layers"])}
    staged = jax.device_put(staged, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    batch = jax.tree.map(lambda leaf: leaf.reshape(6, 8, *leaf.shape[1:]), random_batch(48, 32, 24))
    model = PipelineModel(decoder.prepare, decoder.embed, decoder.layer, decoder.head)
    step = jax.jit(program.value_and_grad(model, mesh, specs))
    compiled = step.lower(staged, batch, np.float32(1), None, program.rows()).compile()
    # One copy in each branch would be several times the temporaries; loops over layers copy what they carry.
    assert copied_bytes(compiled.as_text()) < compiled.memory_analysis().temp_size_in_bytes / 10
