"""What a training step sends along each mesh axis: the collectives of its actions, of its ticks and around them."""

from __future__ import annotations

import jax
import numpy as np

from meshsys.config import Config
from meshsys.torus import Flow, Traffic
from models.counting import count_parameters, layer_weights
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
    """One layer's action.

    Sums over `tensor`; tokens to their `expert`s and back; keys and values round `context`; and the layer's weights
    gathered over `fsdp`, where that is done in every tick.

    Args:
        way: how the layer is treated.
    """
    again = way.remat.kind != "none" and kind in (Kind.I, Kind.B) and not way.apart
    axes, model = config.mesh.axes, config.model
    found = [Flow("all-reduce", ("tensor",), _bytes(x), _SUMS[kind] + again)]
    passes = (kind in (Kind.F, Kind.R)) + (1 + again) * (kind in (Kind.I, Kind.B))
    if axes.expert > 1 and model.moe and (not model.moe.dense_layers or way.parts & {"moe"}):
        found.append(Flow("all-to-all", ("expert",), _bytes(x) * model.moe.experts_per_token, 2 * passes))
    if axes.context > 1:
        heads = (
            model.heads * (model.size_of_head + model.size_of_value)
            if model.latent
            else (2 * model.num_kv_heads * model.size_of_head)
        )
        both = _bytes(x) * heads / model.d_model / axes.tensor
        # A backward sends keys and values round again, and their gradients.
        rounds = passes + (2 if kind in (Kind.I, Kind.B) else 0)
        found.append(Flow("rotate", ("context",), both, rounds * (axes.context - 1)))
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
    """The mean layer's weights in the compute dtype, a device's part along `tensor` and `expert`."""
    axes, layers = config.mesh.axes, layer_weights(config.model)
    weights = sum(layer.always + layer.experts / axes.expert for layer in layers) / len(layers)
    return weights * x.dtype.itemsize / axes.tensor


def end_bytes(config: Config, x: jax.ShapeDtypeStruct) -> float:
    """Embedding and head in the compute dtype, a device's part along `tensor`."""
    layers = sum(layer.always + layer.experts for layer in layer_weights(config.model))
    return (count_parameters(config.model) - layers) * x.dtype.itemsize / config.mesh.axes.tensor


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
