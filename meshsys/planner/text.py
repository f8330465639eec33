"""A plan as plain text for the terminal, at most 110 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshsys.planner.plan import (
    AxisPlan,
    CompiledPlan,
    EstimatePlan,
    MeshPlan,
    Plan,
    RematPlan,
    SearchPlan,
    ValuePlan,
)
from schedules import render
from schedules.actions import Schedule, from_csv

__all__ = ["bytes_text", "describe", "describe_search", "layers_text", "place_text", "schedule_of", "seconds_text"]

_WIDTH = 110
_TIMELINE_LINES, _DEVICE_LINES = 40, 16  # the most that are shown


def describe(plan: Plan) -> str:
    """The plan, section by section, without a line break at the end."""
    sections = [_head(plan), _mesh(plan), _stages(plan), _timeline(plan), _values(plan), _memory(plan), _notes(plan)]
    if plan.choice is not None:
        sections.insert(3, _choice(plan, plan.choice))
    if plan.estimate is not None:
        sections.append(_estimate(plan, plan.estimate))
    if plan.compiled is not None:
        sections.append(_compiled(plan, plan.compiled))
    return "\n\n".join("\n".join(section) for section in sections)


def describe_search(found: SearchPlan, most: int = 20) -> str:
    """The table of a search, without a line break at the end."""
    rows = [
        (
            *(getattr(choice, name) for name in ("data", "fsdp", "tensor", "pipe")),
            choice.schedule,
            choice.chunks,
            choice.microbatches,
            choice.remat,
            seconds_text(choice.step_seconds),
            f"{choice.mfu:.1%}",
            f"{choice.bubble_fraction:.1%}",
            bytes_text(choice.bytes),
            "compiled" if choice.verified else "yes" if choice.fits else "no",
        )
        for choice in found.choices[:most]
    ]
    head = ("data", "fsdp", "tensor", "pipe", "schedule", "chunks", "microbatches", "remat", "step", "MFU", "bubble")
    title = (
        f"{found.topology}: {len(found.choices)} of {found.candidates:,} candidates looked at in full; a device has "
        f"{bytes_text(found.limit)}, of which {found.margin:.0%} stay free"
    )
    return "\n".join([title, *_table((*head, "memory", "fits"), rows)])


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that the plan's timeline shows."""
    rows = (",".join(cell or "-" for cell in row) for row in plan.schedule.timeline)
    return replace(from_csv("\n".join(rows), plan.schedule.name), period=plan.schedule.period)


def bytes_text(size: float) -> str:
    """Bytes with three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def seconds_text(seconds: float | None) -> str:
    """Seconds with three digits and a unit; "-" for None."""
    if seconds is None:
        return "-"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _count_text(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} P"


def layers_text(layers: Sequence[int]) -> str:
    """Successive layers as a range."""
    if len(layers) < 2:
        return str(layers[0]) if layers else "none"
    return f"{layers[0]}-{layers[-1]}"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, successive ones as a range."""
    starts = [place for place, number in enumerate(numbers) if not place or numbers[place - 1] != number - 1]
    parts = [numbers[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return ", ".join(layers_text(part) for part in parts)


def place_text(value: ValuePlan) -> str:
    """Where a value waits and how it is divided."""
    divided = f"1/{value.tensor} by tensor" if value.tensor > 1 else ""
    return ", ".join(filter(None, ("host" if value.on_host else "", divided)))


# --- Sections -------------------------------------------------------------------------------------------------


def _head(plan: Plan) -> list[str]:
    batch, schedule = plan.batch, plan.schedule
    ways = f"{schedule.microbatches} microbatches of {batch.microbatch_size}"
    if schedule.microbatches == 1:
        ways = f"1 microbatch of {batch.microbatch_size}"
    return [
        f"{plan.run}: {plan.parameters:,} parameters on {plan.mesh.devices_used} of {plan.mesh.devices} devices",
        f"  a step      {batch.tokens_a_step:,} tokens: {batch.batch_size} sequences of {batch.sequence_length}, in "
        f"{ways}; a device runs {batch.sequences_a_device} at once",
        f"  remat       {plan.remat}",
        f"  weights     gathered once a {plan.fsdp_gather}",
    ]


def _mesh(plan: Plan) -> list[str]:
    mesh = plan.mesh
    sides = ", ".join(
        f"{name} {size}{' (ring)' if wrap else ' (twisted)' if dim in mesh.twisted else ''}"
        for dim, (name, size, wrap) in enumerate(zip(mesh.dim_names, mesh.dims, mesh.wrap, strict=True))
    )
    theirs = {axis.name: axis for axis in mesh.jax.axes} if mesh.jax else {}
    rows = [
        (axis.name, axis.size, *_way(axis), *(_way(theirs[axis.name]) if theirs else ())) for axis in mesh.axes
    ]
    head = ("axis", "size", "along", "hops", "to close", *(("JAX along", "hops", "to close") if theirs else ()))
    lines = [f"Mesh: topology {mesh.topology} ({sides})", *_table(head, rows), *_traffic(mesh)]
    chips = [
        f"({','.join(map(str, chip.coords))}) {' '.join(f'{name} {place}' for name, place in chip.position.items())}"
        for chip in mesh.chips
    ]
    shown = _cut(_columns(chips), _DEVICE_LINES, "--json has them all")
    return [*lines, "", "Devices, by coordinates on the torus", *shown]


def _way(axis: AxisPlan) -> tuple[str, str, str]:
    return (axis.dims, str(axis.hops), str(axis.closes)) if axis.size > 1 else ("-", "-", "-")


def _traffic(mesh: MeshPlan) -> list[str]:
    """What the axes are laid for, and how long it takes."""
    if mesh.jax is None:
        return []
    rows = [
        (
            flow.kind,
            flow.axes,
            f"{flow.count:g}",
            bytes_text(flow.bytes),
            seconds_text(flow.seconds),
            seconds_text(flow.jax_seconds),
        )
        for flow in mesh.collectives
    ]
    lines = ["", "Collectives of a step, by the closed forms (bytes of one; time of all, if they ran alone)"]
    lines += _table(("kind", "axes", "count", "bytes", "time", "with JAX's order"), rows)
    if mesh.jax.error is not None:
        lines.append(f"  JAX's create_device_mesh has no order for these axes ({mesh.jax.error})")
    elif rows:
        ours = seconds_text(sum(flow.seconds for flow in mesh.collectives))
        theirs = seconds_text(sum(flow.jax_seconds or 0.0 for flow in mesh.collectives))
        lines.append(f"  in all {ours}; with the order of JAX's create_device_mesh {theirs}")
    return lines


def _stages(plan: Plan) -> list[str]:
    rows = [
        (
            stage.stage,
            stage.rank,
            stage.chunk,
            layers_text(stage.layers),
            " + ".join(name for name, held in (("embedding", stage.embedding), ("head", stage.head)) if held) or "-",
            f"{stage.parameters:,}",
            bytes_text(stage.residual_bytes),
            bytes_text(stage.stash_bytes),
            stage.peak_microbatches,
        )
        for stage in plan.stages
    ]
    head = ("stage", "rank", "chunk", "layers", "ends", "parameters", "F keeps", "I leaves W", "at once")
    return ["Stages (bytes a device, for one microbatch; at once: the most microbatches)", *_table(head, rows)]


def _choice(plan: Plan, choice: RematPlan) -> list[str]:
    ways: dict[tuple[str, bool], list[int]] = {}
    for stage in plan.stages:
        ways.setdefault((stage.remat, stage.recompute_apart), []).append(stage.stage)
    places = {("none", False): "nowhere"}
    rows = [
        (_ranges(stages), remat, places.get((remat, apart), "R" if apart else "I or B"))
        for (remat, apart), stages in ways.items()
    ]
    outcomes = [
        ("auto", choice.makespan, choice.bytes),
        ("none", choice.keep_all_makespan, choice.keep_all_bytes),
        ("full", choice.full_makespan, choice.full_bytes),
    ]
    found = [
        (name, f"{time:.4g}", f"{time / choice.keep_all_makespan:.3f}x", bytes_text(size), f"{size / choice.cap:.1%}")
        for name, time, size in outcomes
    ]
    return [
        f"Remat, chosen for at most {bytes_text(choice.cap)} of slots (pipeline.activation_memory)",
        *_table(("stages", "remat", "recomputed in"), rows),
        "",
        "Predicted, with the same policy for all stages below",
        *_table(("remat", "makespan", "over none", "slots", "of the cap"), found),
    ]


def _timeline(plan: Plan) -> list[str]:
    schedule = plan.schedule
    picture = render.text(schedule_of(plan), _WIDTH).rstrip().splitlines()
    options = f"--stages {schedule.ranks} --microbatches {schedule.microbatches} --chunks {schedule.chunks}"
    more = f"`meshsys schedule show {schedule.name} {options}` shows all"
    return [
        f"Schedule, tick by tick; predicted bubble {schedule.bubble_fraction:.1%} at pipeline.costs",
        *_cut([f"  {line}".rstrip() for line in picture], _TIMELINE_LINES, more),
    ]


def _values(plan: Plan) -> list[str]:
    lines = []
    for title, values in (
        (f"Residuals: what F keeps for the backward (remat {plan.remat})", plan.residuals),
        ("Recomputed: what R leaves for I and W", plan.recomputed),
        ("Stash: what I leaves for W", plan.stash),
    ):
        if values is plan.recomputed and not values:
            continue
        rows = [
            (
                value.block,
                value.name,
                "x".join(map(str, value.shape)),
                value.dtype,
                bytes_text(value.bytes),
                value.until,
                f"{value.slots} x {value.places}",
                bytes_text(value.total_bytes),
                place_text(value),
            )
            for value in values
        ]
        head = ("block", "value", "shape", "dtype", "bytes", "until", "slots", "in all", "")
        lines += [title, *_table(head, rows), ""]
    return lines[:-1]


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    parts = [
        ("parameters", memory.parameters),
        ("optimizer state", memory.optimizer_state),
        ("batch", memory.batch),
        ("gradients", memory.gradients),
        ("gathered weights", memory.gathered_weights),
        ("residual slots", memory.residual_slots),
        ("recomputed slots", memory.recomputed_slots),
        ("stash slots", memory.stash_slots),
        ("inbox slots", memory.inbox_slots),
        ("transfers", memory.transfers),
        ("workspace", memory.workspace),
        ("copies", memory.copies),
        ("total", memory.total),
    ]
    if memory.host:
        parts.append(("on the host", memory.host))
    rows = [
        (
            rank.rank,
            ", ".join(map(str, rank.stages)),
            rank.layers,
            rank.peak_activations,
            bytes_text(rank.residual_bytes),
            bytes_text(rank.stash_bytes),
            bytes_text(rank.inbox_bytes),
            bytes_text(rank.peak_bytes),
        )
        for rank in plan.ranks
    ]
    head = ("rank", "stages", "layers", "activations", "residuals", "stash", "inbox", "at once")
    return [
        "Memory of each device (all allocate what the busiest rank needs)",
        *_table(("", "bytes"), [(name, bytes_text(size)) for name, size in parts]),
        "",
        "Peaks of each rank, in bytes a device (what it fills of its slots)",
        *_table(head, rows),
    ]


def _estimate(plan: Plan, time: EstimatePlan) -> list[str]:
    parts = ("ticks", time.ticks_seconds), ("transfers", time.send_seconds), ("around them", time.around_seconds)
    return [
        "Time of a step at best, by the chip's peak numbers and the closed forms of collectives",
        f"  {seconds_text(time.step_seconds)}: {', '.join(f'{what} {seconds_text(part)}' for what, part in parts)}",
        f"  bubble {time.bubble_fraction:.1%}, {time.mfu:.1%} of the peak (MFU), "
        f"{plan.batch.tokens_a_step / time.step_seconds:,.0f} tokens/s",
    ]


def _compiled(plan: Plan, compiled: CompiledPlan) -> list[str]:
    parts = [
        ("arguments", compiled.arguments),
        ("outputs", compiled.outputs),
        ("of these in the arguments", compiled.reused),
        ("temporaries", compiled.temporaries),
        ("host temporaries", compiled.host_temporaries),
        ("program", compiled.program),
        ("total", compiled.total),
    ]
    if compiled.limit is not None:
        parts.append(("the compiler's limit", compiled.limit))
    rows = [
        (each.kind, each.axes, f"{each.count:,}", bytes_text(each.bytes), seconds_text(each.seconds))
        for each in compiled.collectives
    ]
    lines = [
        f"Compiled for {plan.mesh.topology} in {compiled.seconds:.1f} s; of a device:",
        *_table(("", "bytes"), [(name, bytes_text(size)) for name, size in parts]),
        f"  temporaries: predicted {plan.memory.temporaries / max(1, compiled.temporaries):.2f}x",
        "",
        "Collectives of a step, on the busiest rank (bytes of the full arrays; time if they ran alone)",
        *_table(("kind", "axes", "count", "bytes", "time"), rows),
        "",
        "Work of a step, on the busiest rank, and the time that it takes by the chip's peak numbers",
        f"  {_count_text(compiled.flops)}FLOP, {bytes_text(compiled.traffic)} of memory traffic",
    ]
    if compiled.step_seconds is not None:
        lines.append(
            f"  {seconds_text(compiled.step_seconds)} a step at best, {compiled.mfu:.1%} of the peak (MFU), "
            f"{plan.batch.tokens_a_step / compiled.step_seconds:,.0f} tokens/s"
        )
    return lines


def _notes(plan: Plan) -> list[str]:
    return ["Predicted; all else is what the program is built from", *(f"  {note}" for note in plan.predictions)]


# --- Layout ---------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns as wide as they must be; those that hold numbers are set to the right."""
    cells = [head, *([str(cell) for cell in row] for row in rows)]
    if len(cells) == 1:
        return ["  none"]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(row[i][:1].isdigit() or row[i] in ("-", "") for row in cells[1:]) for i in range(len(head))]
    lines = []
    for row in cells:
        fields = zip(row, widths, right, strict=True)
        words = (cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in fields)
        lines.append(f"  {'  '.join(words)}".rstrip())
    return lines


def _columns(items: Sequence[str]) -> list[str]:
    width = max(map(len, items)) + 3
    per_line = max(1, (_WIDTH - 2) // width)
    return [
        "  " + "".join(item.ljust(width) for item in items[first : first + per_line]).rstrip()
        for first in range(0, len(items), per_line)
    ]


def _cut(lines: Sequence[str], most: int, way: str) -> list[str]:
    """At most so many lines; where there are blank ones, it ends before one."""
    if len(lines) <= most:
        return list(lines)
    end = max((place for place in range(1, most + 1) if not lines[place]), default=most)
    end = end if any(lines[1:end]) else most
    return [*lines[:end], f"  ... {sum(map(bool, lines[end:]))} more lines; {way}"]
