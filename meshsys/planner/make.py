"""From a checked configuration to its plan; no device is touched."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from meshsys.assemble import Assembly, assemble
from meshsys.config import Config
from meshsys.jax_order import jax_order
from meshsys.planner import memory
from meshsys.planner.estimate import estimate
from meshsys.planner.plan import (
    AxisPlan,
    BatchPlan,
    ChipPlan,
    FlowPlan,
    JaxOrderPlan,
    MeshPlan,
    Plan,
    RematPlan,
    SchedulePlan,
    StagePlan,
    ValuePlan,
)
from meshsys.remat_choice import RematChoice
from meshsys.sharding import BATCH_AXES
from meshsys.torus import Placement
from meshsys.torus.groups import seconds
from meshsys.torus.traffic import relevant
from schedules.simulate import simulate
from schedules.ticks import timeline
from schedules.validate import live

__all__ = ["make_plan", "plan_of"]

_PREDICTIONS = (
    "schedule.bubble_fraction: times are pipeline.costs; if null, F, I and W take one unit each, and B two",
    "remat: times are pipeline.costs with what is recomputed in proportion to FLOPs; if null, all are by FLOPs",
    "residuals and stash, tensor: heads, d_ff and vocabulary are taken to be divided, the rest to be whole",
    "memory.workspace: the most that one action has in hand if XLA fuses all but products and reductions",
)


def make_plan(config: Config) -> Plan:
    """The plan of a configuration.

    Raises:
        ConfigError: parts of it that do not fit.
    """
    return plan_of(assemble(config))


def plan_of(assembly: Assembly) -> Plan:
    """The plan of a checked configuration."""
    config = assembly.config
    values = memory.waiting_values(assembly)
    shapes = jax.eval_shape(assembly.decoder.init, jax.eval_shape(jax.random.key, 0))
    return Plan(
        run=config.run.name,
        parameters=_count(shapes),
        mesh=_mesh(assembly),
        stages=_stages(assembly, shapes, values),
        schedule=_schedule(assembly),
        batch=_batch(assembly),
        remat=config.pipeline.remat,
        choice=None if assembly.choice is None else _choice(assembly.choice),
        fsdp_gather=config.pipeline.fsdp_gather,
        residuals=values.residuals,
        recomputed=values.recomputed,
        stash=values.stash,
        memory=memory.on_device(assembly, values),
        ranks=memory.on_ranks(assembly, values),
        predictions=_PREDICTIONS,
        estimate=estimate(assembly),
    )


def _mesh(assembly: Assembly) -> MeshPlan:
    placement, topology = assembly.placement, assembly.placement.topology
    theirs = jax_order(topology, assembly.axes) if topology.generation else None
    chips = []
    for index in np.ndindex(placement.shape):
        position = {name: place for (name, size), place in zip(placement.axes, index, strict=True) if size > 1}
        chips.append(ChipPlan(tuple(map(int, placement.coords[index])), position))
    return MeshPlan(
        topology=str(topology),
        dims=topology.dims,
        dim_names=topology.names,
        wrap=topology.wrap,
        twist=topology.twist,
        devices=topology.size,
        devices_used=placement.size,
        axes=_axes(placement),
        chips=tuple(chips),
        collectives=() if theirs is None else _flows(assembly, theirs),
        jax=_jax(theirs),
    )


def _axes(placement: Placement) -> tuple[AxisPlan, ...]:
    dims = dict(placement.dims)
    return tuple(
        AxisPlan(name, size, dims[name], placement.hops(name), placement.closes(name)) for name, size in placement.axes
    )


def _flows(assembly: Assembly, theirs: Placement | str) -> tuple[FlowPlan, ...]:
    return tuple(
        FlowPlan(
            kind=flow.kind,
            axes="+".join(flow.axes),
            count=flow.count,
            bytes=flow.bytes,
            seconds=seconds(assembly.placement, flow),
            jax_seconds=None if isinstance(theirs, str) else seconds(theirs, flow),
        )
        for flow in relevant(assembly.traffic, assembly.axes)
    )


def _jax(theirs: Placement | str | None) -> JaxOrderPlan | None:
    if theirs is None or isinstance(theirs, str):
        return None if theirs is None else JaxOrderPlan(theirs, ())
    return JaxOrderPlan(None, _axes(theirs))


def _stages(assembly: Assembly, shapes: Any, values: memory.Values) -> tuple[StagePlan, ...]:
    layout = assembly.program.layout
    shared, layers = shapes["shared"], shapes["layers"]
    of_layer = [0] * assembly.config.model.layers
    for name, numbers in assembly.decoder.holders.items():
        for number in numbers:
            of_layer[number] += _count(layers[name]) // len(numbers)
    peaks = memory.peak_microbatches(assembly.schedule)
    stages = []
    for stage, (first, _, last) in enumerate(layout.kinds()):
        remat, apart = assembly.program.treatment[stage]
        times = {"first": int(first), "last": int(last)}
        for run in assembly.program.runs[stage]:
            times[run.block] = times.get(run.block, 0) + run.count
        ends = (_count(shared["embed"]) if first else 0) + (_count(shared["head"]) if last else 0)

        def size(found: tuple[ValuePlan, ...], times: dict[str, int] = times) -> int:
            return sum(value.bytes * times.get(value.block, 0) for value in found)

        stages.append(
            StagePlan(
                stage=stage,
                rank=layout.placement[stage],
                chunk=layout.chunk_of[stage],
                layers=tuple(layout.layers[stage]),
                embedding=first,
                head=last,
                remat=str(remat),
                recompute_apart=apart,
                parameters=sum(of_layer[layer] for layer in layout.layers[stage]) + ends,
                residual_bytes=size(values.residuals),
                stash_bytes=size(values.stash),
                peak_microbatches=peaks[stage],
            )
        )
    return tuple(stages)


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _choice(choice: RematChoice) -> RematPlan:
    return RematPlan(
        cap=choice.cap,
        bytes=choice.outcome.bytes,
        makespan=choice.outcome.makespan,
        keep_all_bytes=choice.keep_all.bytes,
        keep_all_makespan=choice.keep_all.makespan,
        full_bytes=choice.full.bytes,
        full_makespan=choice.full.makespan,
    )


def _schedule(assembly: Assembly) -> SchedulePlan:
    schedule = assembly.schedule
    grid = timeline(schedule)
    times = simulate(schedule, assembly.costs)
    return SchedulePlan(
        name=assembly.config.pipeline.schedule,
        ranks=schedule.ranks,
        stages=schedule.stages,
        chunks=schedule.chunks,
        microbatches=schedule.microbatches,
        ticks=len(grid[0]),
        bubble_fraction=times.bubble_fraction,
        peak_activations=live(schedule),
        period=schedule.period,
        timeline=tuple(tuple(None if action is None else str(action) for action in row) for row in grid),
    )


def _batch(assembly: Assembly) -> BatchPlan:
    data = assembly.config.data
    return BatchPlan(
        batch_size=data.batch_size,
        sequence_length=data.sequence_length,
        microbatch_size=assembly.microbatch_size,
        sequences_a_device=assembly.microbatch_size // math.prod(assembly.axes[axis] for axis in BATCH_AXES),
        tokens_a_step=data.batch_size * data.sequence_length,
    )
