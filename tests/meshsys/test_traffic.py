"""What a step sends, counted by hand for a small model."""

from __future__ import annotations

import pytest

from meshsys.assemble import assemble
from meshsys.config import Config
from meshsys.torus import Flow
from models import count_parameters

LAYERS, MODEL, HEADS, HIDDEN, LENGTH, BATCH, MICROBATCHES = 4, 32, 4, 48, 16, 16, 4


def assembly(topology: str = "2x2x2", pipeline: dict | None = None, **axes: int):
    return assemble(
        Config.model_validate(
            {
                "run": {"name": "small"},
                "model": {"layers": LAYERS, "d_model": MODEL, "heads": HEADS, "d_ff": HIDDEN, "dtype": "bfloat16"},
                "data": {"sequence_length": LENGTH, "batch_size": BATCH},
                "mesh": {"topology": topology, "axes": axes},
                "pipeline": {"microbatches": MICROBATCHES, "schedule": "1f1b"} | (pipeline or {}),
            }
        )
    )


LAYER = 2 * (4 * MODEL * MODEL + 3 * MODEL * HIDDEN)  # bytes of a layer's matrices in bfloat16


@pytest.mark.parametrize(("remat", "sums"), [("none", 4), ("full", 5)])
def test_a_step(remat, sums):
    made = assembly(pipe=2, fsdp=2, tensor=2, pipeline={"remat": remat})
    flows = {(flow.kind, flow.axes): flow for flow in made.traffic}
    activation = 2 * (BATCH // MICROBATCHES // 2) * LENGTH * MODEL
    # Two layers a rank, each with so many sums in a microbatch; every tick sends up and down.
    assert flows["all-reduce", ("tensor",)] == Flow("all-reduce", ("tensor",), activation, 2 * MICROBATCHES * sums)
    assert flows["rotate", ("pipe",)].bytes == activation
    # With two ranks the next one and the one before are the same.
    assert flows["rotate", ("pipe",)].count == made.program.table.ticks
    layers = 2 * LAYER / 2
    assert flows["all-gather", ("fsdp",)] == Flow("all-gather", ("fsdp",), layers)
    assert flows["reduce-scatter", ("fsdp",)] == Flow("reduce-scatter", ("fsdp",), 2 * layers)
    ends = 2 * count_parameters(made.config.model) / 2 - LAYERS * LAYER / 2
    assert flows["all-gather", ("pipe", "fsdp")].bytes == pytest.approx(ends)
    assert flows["all-reduce", ("data",)].bytes == pytest.approx(2 * (layers + ends) / 2)


def test_weights_that_are_gathered_in_every_tick():
    made = assembly(pipe=2, fsdp=2, tensor=2, pipeline={"fsdp_gather": "tick", "split_backward": True})
    flows = {(flow.kind, flow.axes): flow for flow in made.traffic}
    assert flows["all-gather", ("fsdp",)] == Flow("all-gather", ("fsdp",), LAYER / 2, 2 * MICROBATCHES * 3)
    assert flows["reduce-scatter", ("fsdp",)] == Flow("reduce-scatter", ("fsdp",), LAYER / 2, 2 * MICROBATCHES)


def test_four_ranks_send_both_ways():
    made = assembly("2x2", pipe=4)
    flow = next(flow for flow in made.traffic if flow.kind == "rotate")
    assert flow.count == 2 * made.program.table.ticks


def test_the_placement_is_made_for_it():
    """Tensor sums outweigh all else, so tensor has a block that is a ring, and not a row that is none."""
    made = assembly("v5e:4x4", data=4, tensor=4)
    assert dict(made.placement.dims)["tensor"] == "x:2*y:2"
    assert made.placement.hops("tensor") == made.placement.closes("tensor") == 1
