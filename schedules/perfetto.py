"""A schedule in time as a trace for ui.perfetto.dev or chrome://tracing (the Chrome trace event format, JSON).

A rank is a thread, an action a slice, a result that goes to another rank an arrow to the action that reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from schedules.actions import Action, Kind, Schedule
from schedules.render import MEANING
from schedules.simulate import Timeline

__all__ = ["perfetto", "rank_names", "trace_events", "trace_file"]


def perfetto(schedule: Schedule, found: Timeline, about: Mapping[str, str] | None = None) -> str:
    """The whole trace; one unit of the costs is shown as a millisecond.

    Args:
        about: said in the trace's `otherData`, with what the trace itself knows.
    """
    known = {
        "schedule": schedule.name,
        "makespan": f"{found.makespan:g}",
        "bubble_fraction": f"{found.bubble_fraction:.4f}",
        "time": "one unit of the costs is shown as 1 ms",
    }
    return trace_file([*rank_names(schedule.ranks), *trace_events(schedule, found, 1e3)], {**known, **(about or {})})


def trace_file(events: Iterable[Mapping[str, Any]], about: Mapping[str, str]) -> str:
    """The JSON of a trace, an event a line."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(dict(about))},"traceEvents":[\n{lines}\n]}}\n'


def rank_names(ranks: int) -> Iterator[dict[str, Any]]:
    """The events that name the threads."""
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "pipe"}}
    for rank in range(ranks):
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}


def trace_events(
    schedule: Schedule, found: Timeline, scale: float, begin: float = 0.0, step: int | None = None
) -> Iterator[dict[str, Any]]:
    """A slice an action and an arrow a message.

    Args:
        scale: microseconds of one unit of the timeline.
        begin: microseconds at which the timeline begins.
        step: the training step, noted with every action.
    """
    place = schedule.placement
    for rank, row in enumerate(schedule.actions):
        for action in row:
            start, end = (begin + scale * times[action] for times in (found.start, found.end))
            args = {"stage": action.stage, "microbatch": action.microbatch, **({} if step is None else {"step": step})}
            yield {
                "ph": "X",
                "pid": 0,
                "tid": rank,
                "name": str(action),
                "cat": MEANING[action.kind],
                "ts": start,
                "dur": end - start,
                "args": args,
            }
    for action in found.arrival:
        reader = Action(action.stage + (1 if action.kind is Kind.F else -1), action.kind, action.microbatch)
        if reader not in found.start:  # a full backward may follow an input gradient, and the other way round
            reader = reader._replace(kind=Kind.B if action.kind is Kind.I else Kind.I)
        name = f"{action} to {reader}" + ("" if step is None else f", step {step}")
        arrow = {"cat": "message", "name": "message", "id": name, "pid": 0}
        # An arrow begins and ends at the slices that are open at its times.
        middle = (found.start[action] + found.end[action]) / 2
        yield {**arrow, "ph": "s", "tid": place[action.stage], "ts": begin + scale * middle}
        yield {**arrow, "ph": "f", "bp": "e", "tid": place[reader.stage], "ts": begin + scale * found.start[reader]}
