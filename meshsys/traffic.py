"""What a training step sends along each mesh axis: the collectives of its actions, of its ticks and around them."""

from __future__ import annotations

import jax
import numpy as np

from meshsys.config import Config
from meshsys.torus import Flow, Traffic
from models import count_parameters
from schedules.actions import Kind
from schedules.program import Program
from schedules.program_tables import Way
from schedules.slots import TickTable

__all__ = ["action_traffic", "around_traffic", "end_bytes", "layer_bytes", "sent_traffic", "training_traffic"]

# Sums over `tensor` of an activation: behind attention and MLP, and in their gradients; recomputing a layer repeats the
# first alone, since nothing reads the second.
_SUMS = {Kind.F: 2, Kind.I: 2, Kind.W: 0, Kind.B: 2, Kind.R: 1}


def training_traffic(config: Config, program: Program, x: jax.ShapeDtypeStruct) -> Traffic:
    """All of a step, on the busiest rank.

    Args:
        x: what travels between stages, a device's share.
    """
    table = program.table
    runs = [[flow for rank_flows in _on_rank(config, program, x, rank) for flow in rank_flows]
            for rank in range(program.ranks)]  # fmt: skip
    busiest = max(runs, key=lambda flows: sum(flow.bytes * flow.count for flow in flows))
    sent = sent_traffic(table, x)
    total: dict[tuple[str, tuple[str, ...], float], float] = {}
    for flow in (*sent, *busiest, *around_traffic(config, program, x)):
        key = flow.kind, flow.axes, flow.bytes
        total[key] = total.get(key, 0.0) + flow.count
    return tuple(Flow(*key, count) for key, count in total.items() if count)


def action_traffic(config: Config, x: jax.ShapeDtypeStruct, kind: Kind, way: Way) -> Traffic:
    """One layer's action: sums over `tensor`, and its weights gathered over `fsdp` where that is done in every tick.

    Args:
        way: how the layer is treated.
    """
    again = way.remat.kind != "none" and kind in (Kind.I, Kind.B) and not way.apart
    found = [Flow("all-reduce", ("tensor",), _bytes(x), _SUMS[kind] + again)]
    if config.pipeline.fsdp_gather == "tick":
        weights = layer_bytes(config, x)
        found.append(Flow("all-gather", ("fsdp",), weights))
        if kind in (Kind.W, Kind.B):  # the gradient goes back in shards
            found.append(Flow("reduce-scatter", ("fsdp",), weights))
    return tuple(found)


def sent_traffic(table: TickTable, x: jax.ShapeDtypeStruct) -> Traffic:
    """Between stages: in every tick each rank sends as far as any output travels, round the ring."""
    ways = len([offset for offset in table.offsets if offset])
    return (Flow("rotate", ("pipe",), _bytes(x), ways * table.ticks),) if ways else ()


def around_traffic(config: Config, program: Program, x: jax.ShapeDtypeStruct) -> Traffic:
    """Once a step: weights are gathered, float32 gradients scattered and summed over `data`."""
    layers = layer_bytes(config, x) * int(np.prod(program.layout.table.shape[1:]))
    ends, widened = end_bytes(config, x), 4 / x.dtype.itemsize
    found = [
        Flow("all-gather", ("pipe", "fsdp"), ends),
        Flow("reduce-scatter", ("pipe", "fsdp"), ends * widened),
        Flow("all-reduce", ("data",), (layers + ends) / config.mesh.axes.fsdp * widened),
    ]
    if config.pipeline.fsdp_gather != "tick":
        found += [Flow("all-gather", ("fsdp",), layers), Flow("reduce-scatter", ("fsdp",), layers * widened)]
    return tuple(found)


def layer_bytes(config: Config, x: jax.ShapeDtypeStruct) -> float:
    """One layer's weights in the compute dtype, a device's part along `tensor`."""
    model = config.model
    attention = model.d_model * model.size_of_head * (2 * model.heads + 2 * model.num_kv_heads)
    weights = attention + 3 * model.d_model * model.d_ff
    return weights * x.dtype.itemsize / config.mesh.axes.tensor


def end_bytes(config: Config, x: jax.ShapeDtypeStruct) -> float:
    """Embedding and head in the compute dtype, a device's part along `tensor`."""
    whole = count_parameters(config.model) * x.dtype.itemsize / config.mesh.axes.tensor
    return whole - layer_bytes(config, x) * config.model.layers


def _on_rank(config: Config, program: Program, x: jax.ShapeDtypeStruct, rank: int) -> list[Traffic]:
    table, found = program.table, []
    for number, kind in enumerate(TickTable.KINDS):
        if kind is None:
            continue
        for stage in set(table.stage[table.kind[:, rank] == number, rank].tolist()):
            times = int(((table.kind[:, rank] == number) & (table.stage[:, rank] == stage)).sum())
            for run in program.runs[stage]:
                each = action_traffic(config, x, kind, program.ways[run.block])
                count = times * run.count
                found.append(tuple(Flow(flow.kind, flow.axes, flow.bytes, flow.count * count) for flow in each))
    return found


def _bytes(x: jax.ShapeDtypeStruct) -> float:
    return float(x.size * x.dtype.itemsize)
