"""R as an action of its own: which stages have it, and where it goes.

Recomputation needs nothing that travels, so it can run while its rank would wait for a gradient (Lynx; Chen et al.
2024, arXiv:2406.08756).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from schedules.actions import Action, Kind, Schedule, ScheduleError
from schedules.costs import Costs
from schedules.simulate import simulate

__all__ = ["add_recompute", "recomputing_stages"]

# How many of its rank's actions earlier than right before the backward an R may run.
_FARTHEST = 3


def add_recompute(
    schedule: Schedule,
    costs: Costs,
    timing: Literal["lockstep", "asynchronous"] = "lockstep",
    stages: Collection[int] | None = None,
) -> Schedule:
    """Gives every backward of the stages (None for all) an R, where it takes the least time.

    R comes right before its backward, which hides it where the rank would wait for the gradient, or a few of the rank's
    actions earlier, all by the same number; of equal makespans the latest R wins, since what it makes takes memory.
    """
    wanted = range(schedule.stages) if stages is None else stages
    found = [_insert(schedule, frozenset(wanted), ahead) for ahead in range(_FARTHEST + 1)]
    return min(found, key=lambda one: simulate(one, costs, timing).makespan)


def _insert(schedule: Schedule, stages: frozenset[int], ahead: int) -> Schedule:
    rows = []
    for row in schedule.actions:
        made: list[Action] = []
        for action in row:
            if action.kind in (Kind.I, Kind.B) and action.stage in stages:
                forward = made.index(Action(action.stage, Kind.F, action.microbatch))
                made.insert(max(forward + 1, len(made) - ahead), Action(action.stage, Kind.R, action.microbatch))
            made.append(action)
        rows.append(tuple(made))
    return replace(schedule, actions=tuple(rows))


def recomputing_stages(schedule: Schedule) -> frozenset[int]:
    """The stages that have R.

    Raises:
        ScheduleError: a stage has R for some of its microbatches only.
    """
    having: dict[Kind, dict[int, set[int]]] = {Kind.F: {}, Kind.R: {}}
    for action in schedule:
        if action.kind in having:
            having[action.kind].setdefault(action.stage, set()).add(action.microbatch)
    for stage, again in having[Kind.R].items():
        missing = having[Kind.F].get(stage, set()) - again
        if missing:
            raise ScheduleError(
                f"stage {stage} has {stage}R{min(again)} but no {stage}R{min(missing)}; "
                "write R for all microbatches of a stage or for none"
            )
    return frozenset(having[Kind.R])
