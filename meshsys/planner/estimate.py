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
from meshsys.torus import Traffic
from meshsys.torus.generations import Chip
from meshsys.torus.groups import seconds
from meshsys.traffic import action_traffic, around_traffic, end_bytes, layer_bytes, sent_traffic
from models import count_parameters
from schedules.actions import Kind
from schedules.slots import TickTable

__all__ = ["estimate"]

# AdamW reads parameter, gradient and two moments and writes all but the gradient.
_PASSES = 7


def estimate(assembly: Assembly) -> EstimatePlan | None:
    """The estimate for chips whose peak numbers are known, None for others."""
    chip = assembly.placement.topology.chip
    if chip is None:
        return None
    alone = _action_seconds(assembly, chip)
    table, layout, runs = assembly.program.table, assembly.program.layout, assembly.program.runs
    of = np.zeros((len(TickTable.KINDS), assembly.schedule.stages))
    spread = assembly.config.pipeline.head == "vocab_parallel"
    for stage, (first, _, last) in enumerate(layout.kinds()):
        for number, kind in enumerate(TickTable.KINDS):
            if kind is not None:
                ends = 0 if spread else first * alone["first", kind] + last * alone["last", kind]
                of[number, stage] = sum(run.count * alone[run.block, kind] for run in runs[stage]) + ends
    ticks = of[table.kind, table.stage]  # 0 where a rank idles
    send = _seconds(assembly, sent_traffic(table, assembly.x)) / table.ticks
    if spread:
        whole = sum(alone[block, kind] for block in ("first", "last") for kind in (Kind.F, Kind.I, Kind.W))
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
    tensor = assembly.axes["tensor"]
    ways, found = assembly.program.ways, {}
    for (block, kind), action in assembly.actions.items():
        time = max(action.flops / chip.flops, action.traffic / chip.hbm_bandwidth) / tensor
        if block in ways:
            time += _seconds(assembly, action_traffic(assembly.config, assembly.x, kind, ways[block]))
        found[block, kind] = time
    for block in assembly.blocks:
        found.setdefault((block, Kind.R), 0.0)
    return found


def _seconds(assembly: Assembly, traffic: Traffic) -> float:
    return sum(seconds(assembly.placement, flow) for flow in traffic)


def _around(assembly: Assembly, chip: Chip) -> float:
    """Outside the scan."""
    axes, x = assembly.axes, assembly.x
    time = _seconds(assembly, around_traffic(assembly.config, assembly.program, x))
    layers = layer_bytes(assembly.config, x) * math.prod(assembly.program.layout.table.shape[1:])
    held = (layers + end_bytes(assembly.config, x)) * 4 / x.dtype.itemsize
    parameters = count_parameters(assembly.config.model)
    # The scan adds up zeroed float32 gradients; the optimizer passes over the device's own share.
    state = 4.0 * parameters / math.prod(axes[name] for name in ("pipe", "fsdp", "tensor"))
    return time + (held + _PASSES * state) / chip.hbm_bandwidth
