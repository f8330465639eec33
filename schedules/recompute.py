"""Where R goes, as an action of its own.

Recomputation needs nothing that travels, so it can run while its rank would wait for a gradient (Lynx; Chen et al.
2024, arXiv:2406.08756).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from schedules.actions import Action, Kind, Schedule
from schedules.costs import Costs
from schedules.simulate import simulate

__all__ = ["add_recompute"]

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
