"""Bytes on each device: what stays between steps, what waits in slots, what an action needs.

Slots, accumulators and parameters are those of `schedules.program` and `meshsys.step`; see `meshsys.planner.make` for
what is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from meshsys.assemble import Assembly
from meshsys.blocks import tensor_parts
from meshsys.planner.plan import MemoryPlan, RankPlan, ValuePlan
from meshsys.sharding import BATCH_AXES, training_specs
from schedules.actions import Kind, Schedule
from schedules.backward import Crossing
from schedules.slots import waits
from schedules.validate import live

__all__ = ["Values", "on_device", "on_ranks", "peak_microbatches", "waiting_values"]

PyTree = Any


# --- Values that wait in slots --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """What F leaves for R, I and W, what R leaves for I and W, and what I leaves for W."""

    residuals: tuple[ValuePlan, ...]
    recomputed: tuple[ValuePlan, ...]
    stash: tuple[ValuePlan, ...]

    def waits(self) -> Iterable[tuple[ValuePlan, Kind]]:
        """Each value, and the action that leaves it."""
        yield from ((value, Kind.F) for value in self.residuals)
        yield from ((value, Kind.R) for value in self.recomputed)
        yield from ((value, Kind.I) for value in self.stash)


def waiting_values(assembly: Assembly) -> Values:
    """Every value that waits, with its slots."""
    blocks = assembly.blocks.items()
    return Values(
        tuple(_value(assembly, name, value, Kind.F) for name, block in blocks for value in block.residuals),
        tuple(_value(assembly, name, value, Kind.R) for name, block in blocks for value in block.recomputed),
        tuple(_value(assembly, name, value, Kind.I) for name, block in blocks for value in block.stash),
    )


def _value(assembly: Assembly, block: str, crossing: Crossing, start: Kind) -> ValuePlan:
    program = assembly.program
    parts = tensor_parts(crossing.aval.shape, assembly.config.model, assembly.axes["tensor"])
    slots = program.table.counts[program.lifetimes[block, start, crossing.until]]
    places = program.block_places.get(block, 1)
    size = crossing.bytes // parts
    return ValuePlan(
        block=block,
        name=crossing.name,
        shape=tuple(crossing.aval.shape),
        dtype=str(crossing.aval.dtype),
        tensor=parts,
        bytes=size,
        until=str(crossing.until),
        slots=slots,
        places=places,
        total_bytes=size * slots * places,
        on_host=crossing.on_host,
    )


# --- On each device -------------------------------------------------------------------------------------------


def on_device(assembly: Assembly, values: Values) -> MemoryPlan:
    """What each device allocates."""
    config, axes, decoder = assembly.config, assembly.axes, assembly.decoder
    canonical = jax.eval_shape(decoder.init, _key())
    specs = training_specs(decoder.logical_axes(), canonical, axes)
    stored = _staged(assembly, canonical)
    computed = jax.eval_shape(decoder.cast, stored)
    each_tick = config.pipeline.fsdp_gather == "tick"
    spread = config.pipeline.head == "vocab_parallel"
    whole = {"shared": ("pipe", "tensor") if spread else ("tensor",), "layers": ("pipe", "tensor")}

    parameters = sum(_bytes(stored[part], specs[part], axes) for part in whole)
    gradients = gathered = 0
    program, layout = assembly.program, assembly.program.layout
    # Without a flush gradients of two steps add up at a time.
    sums, versions = (2, program.versions) if program.period else (1, 1)
    for part, kept in whole.items():
        copies = layout.numbers.size // layout.table.size if part == "layers" else 1  # with what is borrowed
        held = axes if each_tick and part == "layers" else {name: axes[name] for name in kept}
        gradients += sums * copies * _bytes(computed[part], specs[part], held, least=4)
        copy, original = _bytes(computed[part], specs[part], held), _bytes(stored[part], specs[part], axes)
        cast = copy != _bytes(stored[part], specs[part], held)
        # An unrolled program takes its layers out of the stacked arrays, which on CPU copies them too.
        on_cpu = assembly.placement.topology.chip is None
        sliced = on_cpu and part == "layers" and program.unroll and math.prod(layout.table.shape[1:]) > 1
        gathered += versions * copies * copy if cast or sliced or copies > 1 or copy != original else 0
    if each_tick:
        places = math.prod(layout.table.shape)
        gathered += _bytes(computed["layers"], specs["layers"], {"tensor": axes["tensor"]}) // places

    rows = config.data.batch_size // math.prod(axes[axis] for axis in BATCH_AXES)
    x = assembly.x
    waiting = {
        "gradients": gradients,
        "residual_slots": sum(value.total_bytes for value in values.residuals if not value.on_host),
        "recomputed_slots": sum(value.total_bytes for value in values.recomputed),
        "stash_slots": sum(value.total_bytes for value in values.stash),
        "inbox_slots": (program.table.inbox_slots + 1) * x.size * x.dtype.itemsize,
    }
    within = {
        "gathered_weights": gathered,
        "transfers": _transfers(assembly),
        "workspace": _workspace(assembly),
        "copies": _copies(assembly, parameters, gradients),
    }
    staying = {
        "parameters": parameters * (2 if program.period else 1),  # without a flush the step before's too
        "optimizer_state": 2 * parameters,  # AdamW's two moments
        "batch": rows * 4 * (5 * config.data.sequence_length + 1),  # five arrays [rows, S] and one [rows]
    }
    return MemoryPlan(
        **staying,
        **waiting,
        **within,
        temporaries=sum(within.values()) + (0 if program.period else sum(waiting.values())),
        total=sum(staying.values()) + sum(waiting.values()) + sum(within.values()),
        host=sum(value.total_bytes for value in values.residuals if value.on_host),
    )


def _copies(assembly: Assembly, parameters: int, gradients: int) -> int:
    if assembly.program.period:
        return gradients  # the sums of two steps, as they are handed on
    # On CPU the optimizer's update is not one fusion: a parameter's reads the moments that theirs overwrite, so XLA
    # copies both moments, at the start of the step.
    return 0 if assembly.placement.topology.generation else 2 * parameters


def _staged(assembly: Assembly, canonical: PyTree) -> PyTree:
    layout = assembly.program.layout
    layers = {name: jax.eval_shape(layout.part(name).to_stages, part) for name, part in canonical["layers"].items()}
    return {"shared": canonical["shared"], "layers": layers}


def _bytes(tree: PyTree, specs: PyTree, axes: Mapping[str, int], least: int = 1) -> int:
    """One device's share, of leaves sharded over these axes alone; `least` is the fewest bytes of an element."""

    def leaf(value: jax.ShapeDtypeStruct, spec: PartitionSpec) -> int:
        names = {name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)}
        return value.size * max(value.dtype.itemsize, least) // math.prod(axes.get(name, 1) for name in names)

    return sum(jax.tree.leaves(jax.tree.map(leaf, tree, specs)))


def _workspace(assembly: Assembly) -> int:
    """The most that one action of one block has in hand."""
    model, tensor = assembly.config.model, assembly.axes["tensor"]

    def size(aval: Any) -> int:
        return aval.size * aval.dtype.itemsize // tensor_parts(aval.shape, model, tensor)

    kinds = {action.kind for action in assembly.schedule}
    on_tpu = assembly.placement.topology.chip is not None
    actions = assembly.actions.items()
    return max(action.peak(size, on_tpu=on_tpu) for (_, kind), action in actions if kind in kinds)


def _transfers(assembly: Assembly) -> int:
    """What an action hands on, and what arrives in its place over each distance, before it is in the inbox."""
    x = assembly.x
    return (1 + len(assembly.program.table.offsets)) * x.size * x.dtype.itemsize


def _key() -> PyTree:
    return jax.eval_shape(jax.random.key, 0)


# --- On each rank ---------------------------------------------------------------------------------------------


def on_ranks(assembly: Assembly, values: Values) -> tuple[RankPlan, ...]:
    """What each rank really fills."""
    schedule, layout, table = assembly.schedule, assembly.program.layout, assembly.program.table
    kinds, runs = layout.kinds(), assembly.program.runs
    # Integers would end at 2**63, and what a slip of the finger asks for does not.
    filled = {start: np.zeros((schedule.ranks, table.ticks)) for start in (Kind.F, Kind.R, Kind.I)}
    for end in (Kind.R, Kind.I, Kind.W):
        for start in (kind for kind in filled if kind is not end):
            sizes = dict.fromkeys(assembly.blocks, 0)
            for value, left_by in values.waits():
                if left_by is start and value.until == end and not value.on_host:
                    sizes[value.block] += value.bytes
            for stage, begins, ends in waits(schedule, start, end):
                first, _, last = kinds[stage]
                layers = sum(sizes[run.block] * run.count for run in runs[stage])
                size = sizes["first"] * first + layers + sizes["last"] * last
                filled[start][schedule.placement[stage], begins : ends + 1] += float(size)
    x = assembly.x
    inbox = np.zeros(schedule.ranks, np.int64)
    for slots in table.receive:
        inbox = np.maximum(inbox, np.where(slots < table.inbox_slots, slots + 1, 0).max(0))
    return tuple(
        RankPlan(
            rank=rank,
            stages=schedule.stages_of(rank),
            layers=sum(kinds[stage][1] for stage in schedule.stages_of(rank)),
            peak_activations=peak,
            residual_bytes=int(filled[Kind.F][rank].max()),
            stash_bytes=int(filled[Kind.I][rank].max()),
            inbox_bytes=int(inbox[rank]) * x.size * x.dtype.itemsize,
            peak_bytes=int(sum(filled.values())[rank].max()),  # type: ignore[index]
        )
        for rank, peak in enumerate(live(schedule))
    )


def peak_microbatches(schedule: Schedule) -> tuple[int, ...]:
    """Per stage, the most microbatches between F and the end of their backward."""
    held: dict[int, list[tuple[int, int]]] = {stage: [] for stage in range(schedule.stages)}
    for stage, begins, ends in waits(schedule, Kind.F, Kind.W):
        held[stage].append((begins, ends))
    return tuple(
        max(sum(begins <= tick <= ends for begins, ends in spans) for tick, _ in spans) for spans in held.values()
    )
