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

__all__ = ["FARTHEST", "add_recompute", "insert_recompute"]

FARTHEST = 3
"""How many of its rank's actions earlier than right before the backward an R may run."""


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
    found = [insert_recompute(schedule, wanted, ahead) for ahead in range(FARTHEST + 1)]
    return min(found, key=lambda one: simulate(one, costs, timing).makespan)


def insert_recompute(schedule: Schedule, stages: Collection[int], ahead: int) -> Schedule:
    """Gives every backward of the stages an R, so many of the rank's actions before it."""
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
