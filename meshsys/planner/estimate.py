"""A step's time without compiling it: lock step over the tick table, with times from peaks and closed forms.

An action takes as long as its products at the chip's peak or their operands and results at its memory's bandwidth,
whichever is longer, and the sums over `tensor` after them, which nothing overlaps. Around the scan: gathers of the
weights, reductions of the gradients, the optimizer's pass over its state.
"""

from __future__ import annotations

import math

import numpy as np

from meshsys.assemble import Assembly
from meshsys.planner.flops import model_flops
from meshsys.planner.plan import EstimatePlan
from meshsys.torus.collectives import all_gather, all_reduce, permute, reduce_scatter
from meshsys.torus.generations import Chip
from meshsys.torus.groups import span
from models import count_parameters
from schedules.actions import Kind
from schedules.slots import TickTable

__all__ = ["estimate"]

# Sums over `tensor` of an activation: behind attention and MLP, and in their gradients; recomputing a layer repeats the
# first alone, since nothing reads the second.
_SUMS = {Kind.F: 2, Kind.I: 2, Kind.W: 0, Kind.B: 2, Kind.R: 1}
# AdamW reads parameter, gradient and two moments and writes all but the gradient.
_PASSES = 7


def estimate(assembly: Assembly) -> EstimatePlan | None:
    """The estimate for chips whose peak numbers are known, None for others."""
    chip = assembly.placement.topology.chip
    if chip is None:
        return None
    seconds = _action_seconds(assembly, chip)
    table, layout, block_of = assembly.program.table, assembly.program.layout, assembly.program.block_of
    of = np.zeros((len(TickTable.KINDS), assembly.schedule.stages))
    spread = assembly.config.pipeline.head == "vocab_parallel"
    for stage, (first, count, last) in enumerate(layout.kinds()):
        for number, kind in enumerate(TickTable.KINDS):
            if kind is not None:
                ends = 0 if spread else first * seconds["first", kind] + last * seconds["last", kind]
                of[number, stage] = count * seconds[block_of[stage], kind] + ends
    ticks = of[table.kind, table.stage]  # 0 where a rank idles
    x = assembly.x
    hops = max(1, assembly.placement.hops("pipe"))
    send = len([offset for offset in table.offsets if offset]) * permute(x.size * x.dtype.itemsize, hops, chip)
    if spread:
        whole = sum(seconds[block, kind] for block in ("first", "last") for kind in (Kind.F, Kind.I, Kind.W))
        send += whole / assembly.schedule.ranks * assembly.schedule.microbatches / table.ticks
    in_ticks = float(ticks.max(1).sum())
    around = _around(assembly, chip)
    step = in_ticks + table.ticks * send + around
    return EstimatePlan(
        step_seconds=step,
        ticks_seconds=in_ticks,
        send_seconds=table.ticks * send,
        around_seconds=around,
        bubble_fraction=1 - float(ticks.sum()) / (assembly.schedule.ranks * in_ticks),
        mfu=model_flops(assembly) / (step * chip.flops * assembly.placement.size),
    )


def _action_seconds(assembly: Assembly, chip: Chip) -> dict[tuple[str, Kind], float]:
    tensor, x = assembly.axes["tensor"], assembly.x
    total = all_reduce(x.size * x.dtype.itemsize, span(assembly.placement, ["tensor"]), chip)
    gathers = _tick_gathers(assembly, chip)
    ways, found = assembly.program.ways, {}
    for (block, kind), action in assembly.actions.items():
        time = max(action.flops / chip.flops, action.traffic / chip.hbm_bandwidth) / tensor
        if block in ways:
            remat, apart = ways[block]
            again = remat.kind != "none" and kind in (Kind.I, Kind.B) and not apart
            time += (_SUMS[kind] + again) * total + gathers
            time += gathers if kind in (Kind.W, Kind.B) else 0.0  # the gradient goes back in shards
        found[block, kind] = time
    for block in assembly.blocks:
        found.setdefault((block, Kind.R), 0.0)
    return found


def _tick_gathers(assembly: Assembly, chip: Chip) -> float:
    """To gather one layer's weights over `fsdp`, where that is done in every tick."""
    if assembly.config.pipeline.fsdp_gather != "tick":
        return 0.0
    return all_gather(_layer_bytes(assembly), span(assembly.placement, ["fsdp"]), chip)


def _around(assembly: Assembly, chip: Chip) -> float:
    """Outside the scan."""
    axes, placement = assembly.axes, assembly.placement
    each_tick = assembly.config.pipeline.fsdp_gather == "tick"
    layers = _layer_bytes(assembly) * math.prod(assembly.program.layout.table.shape[1:])
    parameters = count_parameters(assembly.config.model)
    itemsize = assembly.x.dtype.itemsize
    ends = parameters * itemsize / axes["tensor"] - _layer_bytes(assembly) * assembly.config.model.layers
    widened = 4 / itemsize  # gradients are float32
    fsdp, both = span(placement, ["fsdp"]), span(placement, ["pipe", "fsdp"])
    time = all_gather(ends, both, chip) + reduce_scatter(ends * widened, both, chip)
    if not each_tick:
        time += all_gather(layers, fsdp, chip) + reduce_scatter(layers * widened, fsdp, chip)
    share = (layers + ends) / axes["fsdp"]
    time += all_reduce(share * widened, span(placement, ["data"]), chip)
    # The scan adds up zeroed gradients; the optimizer passes over the device's own share.
    state = 4.0 * parameters / math.prod(axes[name] for name in ("pipe", "fsdp", "tensor"))
    return time + ((layers + ends) * widened + _PASSES * state) / chip.hbm_bandwidth


def _layer_bytes(assembly: Assembly) -> float:
    """One layer's weights in the compute dtype, a device's part along `tensor`."""
    model = assembly.config.model
    attention = model.d_model * model.head_dim * (2 * model.heads + 2 * model.num_kv_heads)
    weights = attention + 3 * model.d_model * model.d_ff
    return weights * assembly.x.dtype.itemsize / assembly.axes["tensor"]

