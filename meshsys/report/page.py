"""The report's sections, and the page around them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape

from meshsys.config import Config, to_yaml
from meshsys.planner.plan import Plan, ValuePlan
from meshsys.planner.text import bytes_text, layers_text, place_text, schedule_of
from meshsys.report.charts import line_chart, number_text, smooth
from meshsys.report.history import History
from meshsys.report.rl import rl_facts, rl_sections
from meshsys.report.samples import Sample
from meshsys.report.style import SCRIPT, STYLE
from meshsys.report.tables import bar, key, stack, table
from meshsys.report.timeline import timeline_picture
from meshsys.report.torus import rank_colour, torus_caption, torus_picture

__all__ = ["page"]


def page(config: Config, plan: Plan | None, history: History, samples: Sequence[Sample] = ()) -> str:
    """The whole page as HTML; it asks for nothing from outside.

    Args:
        samples: responses of a run of `meshsys rl`.
    """
    told = [_training(history)] if config.rl is None else rl_sections(history, samples)
    sections = [_head(config, plan, history), *told]
    if plan is None:
        sections.append(
            '<p class="none">This run has no plan.json. <code>meshsys plan</code> shows the schedule, the torus and '
            "the memory of a configuration.</p>"
        )
    else:
        sections += [_schedule(plan), _torus(plan), _stages(plan), _memory(plan), _values(plan)]
    sections.append(f"<details><summary>Configuration</summary><pre>{escape(to_yaml(config))}</pre></details>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(config.run.name)} · meshsys</title><style>{STYLE}</style></head>\n"
        f'<body><main>\n{chr(10).join(sections)}\n</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


# --- Sections -------------------------------------------------------------------------------------------------


def _head(config: Config, plan: Plan | None, history: History) -> str:
    axes = ", ".join(f"{name} {size}" for name, size in config.mesh.axes.model_dump().items() if size > 1)
    where = f"{axes} on a {config.mesh.topology} torus" if axes else "one device"
    about = (config.pipeline.schedule, where, f"remat {config.pipeline.remat}")
    facts = (_training_facts if config.rl is None else rl_facts)(history, config.train.steps)
    if plan is not None:
        facts += [
            ("parameters", number_text(plan.parameters), f"{plan.parameters:,}"),
            ("devices", f"{plan.mesh.devices_used:,}", f"of {plan.mesh.devices:,}"),
            ("bubble", f"{plan.schedule.bubble_fraction:.1%}", "predicted"),
            ("memory a device", bytes_text(plan.memory.total), "predicted"),
        ]
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}<small>{escape(more) or '&nbsp;'}</small></dd></div>"
        for name, value, more in facts
    )
    lead = escape(" · ".join(about))
    return f'<h1>{escape(config.run.name)}</h1><p class="lead">{lead}</p><dl class="facts">{items}</dl>'


def _training_facts(history: History, steps: int) -> list[tuple[str, str, str]]:
    done = history.steps[-1] if history.steps else 0
    speed = _speed(history)
    return [
        ("loss", number_text(history.last("loss")), "" if done >= steps else "so far"),
        ("steps", f"{done:,}", f"of {steps:,}"),
        ("tokens/s", number_text(speed), "median" if math.isfinite(speed) else ""),
        ("tokens seen", number_text(sum(t for t in history.of("tokens") if math.isfinite(t))), ""),
    ]


def _speed(history: History) -> float:
    """Of the later half of the steps: the first ones compile and warm up."""
    speeds = [speed for speed in history.of("tokens_per_s")[len(history.steps) // 2 :] if math.isfinite(speed)]
    return statistics.median(speeds) if speeds else math.nan


def _training(history: History) -> str:
    steps, losses = history.steps, history.of("loss")
    average = smooth(losses, len(steps) // 20) if len(steps) > 40 else None
    loss = line_chart("Loss", steps, losses, width=1056, height=320, average=average)
    small = [
        ("Gradient norm", "grad_norm", ""),
        ("Learning rate", "learning_rate", ""),
        ("Tokens a second", "tokens_per_s", " tokens/s"),
    ]
    charts = "".join(
        f"<div><h3>{label}</h3>{line_chart(label, steps, history.of(name), width=340, height=170, unit=unit)}</div>"
        for label, name, unit in small
    )
    return f'<h2>Loss</h2><div class="wide">{loss}</div><div class="row">{charts}</div>'


def _schedule(plan: Plan) -> str:
    schedule = plan.schedule
    return (
        "<h2>Schedule</h2><p>One row a rank of the pipeline, one column a tick of the program; a tick lasts as long as "
        f"its slowest action. Predicted bubble: {schedule.bubble_fraction:.1%}.</p>"
        f'<div class="wide">{timeline_picture(schedule_of(plan))}</div>'
    )


def _torus(plan: Plan) -> str:
    mesh = plan.mesh
    rows = [
        [escape(axis.name), str(axis.size), escape(axis.dims), str(axis.hops), str(axis.closes)]
        for axis in mesh.axes
        if axis.size > 1
    ]
    axes = table(["axis", "#size", "along", "#hops", "#to close"], rows) if rows else ""
    ranks = table(
        ["rank", "stages", "layers"],
        [
            [
                f"{key(rank_colour(rank.rank, len(plan.ranks)))}{rank.rank}",
                ", ".join(map(str, rank.stages)),
                ", ".join(layers_text(plan.stages[stage].layers) for stage in rank.stages),
            ]
            for rank in plan.ranks
        ],
    )
    return (
        f'<h2>Torus</h2><p>{escape(torus_caption(plan))}</p><div class="row">'
        f'<div class="wide">{torus_picture(plan)}</div><div>{axes}<br>{ranks}</div></div>'
    )


def _stages(plan: Plan) -> str:
    rows = [
        [
            str(stage.stage),
            str(stage.rank),
            str(stage.chunk),
            layers_text(stage.layers),
            " and ".join(name for name, held in (("embedding", stage.embedding), ("head", stage.head)) if held),
            f"{stage.parameters:,}",
            bytes_text(stage.residual_bytes),
            bytes_text(stage.stash_bytes),
            str(stage.peak_microbatches),
        ]
        for stage in plan.stages
    ]
    head = ["#stage", "#rank", "#chunk", "layers", "ends", "#parameters", "#F keeps", "#I leaves for W", "#at once"]
    about = "Bytes of one microbatch, on each device of the stage; at once: the most microbatches that it holds."
    return f"<h2>Stages</h2><p>{about}</p>{table(head, rows)}"


def _memory(plan: Plan) -> str:
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
        ("workspace, transfers, copies", memory.workspace + memory.transfers + memory.copies),
    ]
    total = max(memory.total, 1)
    rows = [
        [f"{key(f'var(--c{place})')}{name}", bytes_text(size), f"{size / total:.1%}"]
        for place, (name, size) in enumerate(parts)
    ]
    pieces = [(name, size, bytes_text(size), place) for place, (name, size) in enumerate(parts)]
    sizes = table(["", "#bytes", "#share"], [*rows, ["total", bytes_text(memory.total), ""]], total=True)
    host = f" Another {bytes_text(memory.host)} of residuals wait in host memory." if memory.host else ""
    most = max(max(rank.peak_bytes for rank in plan.ranks), 1)
    ranks = [
        [
            str(rank.rank),
            str(rank.peak_activations),
            bytes_text(rank.residual_bytes),
            bytes_text(rank.stash_bytes),
            bytes_text(rank.inbox_bytes),
            bytes_text(rank.peak_bytes),
            bar(rank.peak_bytes / most, rank_colour(rank.rank, len(plan.ranks))),
        ]
        for rank in plan.ranks
    ]
    head = ["#rank", "#activations", "#residuals", "#stash", "#inbox", "#at once", "|"]
    return (
        "<h2>Memory</h2><p>Bytes on each device. One program runs on all of them, so each allocates the slots that the "
        f"busiest rank needs. The workspace, and what the tensor axis divides, are predicted.{host}</p>"
        f'{stack(pieces)}<div class="row"><div>{sizes}</div>'
        f"<div><h3>What each rank fills of its slots, at its peak</h3>{table(head, ranks)}</div></div>"
    )


def _values(plan: Plan) -> str:
    found = []
    for title, values in (
        (f"Residuals: what F keeps for the backward, remat {plan.remat}", plan.residuals),
        ("Recomputed: what R leaves for I and W", plan.recomputed),
        ("Stash: what I leaves for W", plan.stash),
    ):
        if values is plan.recomputed and not values:
            continue
        size = bytes_text(sum(value.total_bytes for value in values))
        found.append(
            f"<details{' open' if values is plan.residuals else ''}><summary>{escape(title)} · {size}</summary>"
            f"{_value_table(values)}</details>"
        )
    return "<h2>Values that wait in slots</h2>" + "".join(found)


def _value_table(values: Sequence[ValuePlan]) -> str:
    most = max((value.total_bytes for value in values), default=0) or 1  # full backwards leave nothing for W
    rows = [
        [
            {"first": "embedding", "last": "head"}.get(value.block, value.block),
            escape(value.name),
            " × ".join(map(str, value.shape)),
            escape(value.dtype),
            value.until,
            bytes_text(value.bytes),
            f"{value.slots} × {value.places}" if value.places > 1 else str(value.slots),
            bytes_text(value.total_bytes),
            escape(place_text(value)),
            bar(value.total_bytes / most, "var(--accent)"),
        ]
        for value in values
    ]
    head = ["block", "value", "shape", "dtype", "until", "#bytes", "#slots", "#in all", "", "|"]
    return table(head, rows) if rows else '<p class="none">Nothing.</p>'
